"""Sharded models under activation checkpointing train as without it, in plain loops and in pipelines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from pipeline_model import Run, batches, sharded_model
from pipeline_runs import check_same_states, drain, make_pipeline, states_of, stats_of
from processed_training import processed
from sharded_cases import Case, Table, shard_by_hand
from sharded_training import batches as batches_of
from sharded_training import collection_of, shard
from torch.utils.checkpoint import checkpoint
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline.backward_injection import (
    FirstGradTensorFinder,
    InjectionSite,
    register_backward_hook,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import FeatureProcessor
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import torchrec_dyn as dyn

KINDS = ("table_wise", "row_wise", "column_wise")
ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
LIVES = (
    {},
    {"admission": dyn.AdmitAfter(2)},
    {"eviction": (dyn.ExpireAfter(steps=1), dyn.LeastRecentlyUsed())},
)
RUN = Run(KINDS, KINDS, steps=4, fused_params=ADAM, lives=LIVES)


def plainly(model: Any, batch: Any) -> torch.Tensor:
    return model(batch)[0]


def not_reentrant(model: Any, batch: Any) -> torch.Tensor:
    return checkpoint(plainly, model, batch, use_reentrant=False)


def reentrant(model: Any, batch: Any) -> torch.Tensor:
    def run(_: torch.Tensor) -> torch.Tensor:
        return plainly(model, batch)

    return checkpoint(run, torch.zeros(1, requires_grad=True), use_reentrant=True)


def train(forward: Callable[[Any, Any], torch.Tensor], injects: bool) -> Any:
    """Trains; with `injects` each backward runs a forward of another batch, which is an original one."""
    model = sharded_model(RUN, init_data_parallel=False)
    others, losses = iter(batches(RUN, 50)), []

    def look_up(batch: Any) -> None:
        model.module.pooled(batch.features).values()
        model.module.sequences(batch.features).keys()

    if injects:
        site = InjectionSite("head", FirstGradTensorFinder())
        register_backward_hook(site, model.module, lambda _: look_up(next(others)))
    optimizer = torch.optim.SGD(model.module.head.parameters(), lr=0.1)
    for batch in batches(RUN):
        optimizer.zero_grad()
        loss = forward(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert not injects or next(others, None) is None
    return losses, states_of(model), stats_of(model)


trained = cache(partial(workers.run, train, world_size=2, timeout=120))


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    "forward, injects", [(not_reentrant, False), (reentrant, False), (not_reentrant, True)]
)
def test_trains_as_without_checkpointing(forward: Any, injects: bool) -> None:
    for got, expected in zip(trained(forward, injects), trained(plainly, injects), strict=True):
        assert got[0] == expected[0] and got[2] == expected[2]
        check_same_states(got[1], expected[1])


def in_pipeline(name: str, is_checkpointed: bool) -> Any:
    model = sharded_model(RUN, init_data_parallel=False)
    dense = model.module.head.forward

    def checkpointed(batch: Any, pooled: Any, sequences: Any, beside: Any) -> Any:
        pooled.keys(), sequences.keys()  # wait for the outputs, which can be waited for once
        return checkpoint(dense, batch, pooled, sequences, beside, use_reentrant=False)

    if is_checkpointed:
        model.module.head.forward = checkpointed
    outputs = drain(make_pipeline(RUN, name, model), batches(RUN))
    return [float(loss) for loss, _ in outputs], states_of(model)


def test_a_checkpointed_head_in_a_pipeline() -> None:
    got = workers.run(in_pipeline, "sparse_dist", True, world_size=2)
    expected = workers.run(in_pipeline, "sparse_dist", False, world_size=2)
    for (losses, states), (plain_losses, plain_states) in zip(got, expected, strict=True):
        assert losses == plain_losses and len(losses) == RUN.steps
        check_same_states(states, plain_states)


def on_ranks(*ranks: int, kind: str = "table_wise", first: int = 0) -> list[Table]:
    """Returns a table on each of some ranks."""
    tables = range(first, first + len(ranks))
    plans = [shard_by_hand(kind, [([rank], 0, 8)]) for rank in ranks]
    return [Table(f"t{i}", [f"f{i}"], plan) for i, plan in zip(tables, plans, strict=True)]


class Twos(FeatureProcessor):
    """Has no parameters: nothing but lookups saves tensors."""

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        ids = features.values()
        weights = torch.full_like(ids, 2, dtype=torch.float32)
        return JaggedTensor(ids, lengths=features.lengths(), weights=weights)


def bags(
    tables: list[Table], form: str = "weighted", frozen: str = ""
) -> tuple[Case, torch.nn.Module]:
    """Returns a case and its model on two ranks, of one collection."""
    case = Case(tables, weighted=form != "plain")
    collection = collection_of(case)
    if form in ("weighted", "plain"):
        model = shard(case, collection)
    else:
        features, twos = case.features(), Twos()
        wrapped = (
            processed(case, collection, "collection")
            if form == "positions"
            else FeatureProcessedEmbeddingBagCollection(collection, dict.fromkeys(features, twos))
        )
        model = DistributedModelParallel(
            torch.nn.ModuleDict({"collection": wrapped}),
            plan=ShardingPlan({"collection": {table.name: table.plan for table in tables}}),
            sharders=[dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(case.fused_params)],
            init_data_parallel=False,
        )
    if frozen:
        model.module.collection.table(frozen).freeze()
    return case, model.module["collection"] if form in ("positions", "twos") else model


def step_of(case: Case, model: torch.nn.Module, reentrant: bool = False) -> None:
    batch = batches_of(case, 0)[0][dist.get_rank()]

    def run(x: torch.Tensor, batch: KeyedJaggedTensor) -> torch.Tensor:
        return model(batch).values() + x

    x = torch.zeros(1, requires_grad=True)
    checkpoint(run, x, batch, use_reentrant=reentrant).sum().backward()


def recomputed_on_all_ranks() -> list[str]:
    """Trains where all ranks run the function again, or none; returns the errors of the other cases."""
    two_types = [*on_ranks(0), *on_ranks(1, kind="column_wise", first=1)]
    step_of(*bags(on_ranks(0, 1)))
    step_of(*bags(on_ranks(0, 1, 1), frozen="t1"))
    step_of(*bags(on_ranks(0), "plain"))
    step_of(*bags(on_ranks(0), "positions"))
    step_of(*bags(on_ranks(0)), reentrant=True)
    step_of(*bags(on_ranks(0), frozen="t0"))
    texts = []
    for case, model in (
        bags(on_ranks(0)),
        bags(on_ranks(0, 1), frozen="t1"),
        bags(two_types),
        bags(on_ranks(0), "twos"),
    ):
        with pytest.raises(ValueError) as caught:
            step_of(case, model)
        texts.append(str(caught.value))
        model.eval()  # saves nothing
        step_of(case, model)
    return texts


def test_weighted_bags_with_trained_tables_on_some_ranks_only() -> None:
    """Only ranks that had saved weights ran the function again, and waited for the others for ever."""
    for texts in workers.run(recomputed_on_all_ranks, world_size=2):
        for text in texts:
            assert text.startswith("DynamicEmbeddingBagCollection('collection')")
            assert ": expected trained table_wise tables on every rank, since the coll" in text
            assert "got none on ranks [1]: they would not run the function again" in text
            assert "Call the collection outside of the checkpointed function" in text
