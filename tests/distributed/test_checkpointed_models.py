"""Sharded models whose dense part is checkpointed train as without it; a lookup inside is an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from pipeline_model import Run, batches, sharded_model
from pipeline_runs import check_same_states, drain, make_pipeline, states_of, stats_of
from sharded_cases import Case, Table, shard_by_hand
from sharded_training import batches as batches_of
from sharded_training import collection_of, shard
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.train_pipeline.backward_injection import (
    FirstGradTensorFinder,
    InjectionSite,
    register_backward_hook,
)

import torchrec_dyn as dyn

KINDS = ("table_wise", "row_wise", "column_wise")
ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
LIVES = (
    {},
    {"admission": dyn.AdmitAfter(2)},
    {"eviction": (dyn.ExpireAfter(steps=1), dyn.LeastRecentlyUsed())},
)
RUN = Run(KINDS, KINDS, steps=4, fused_params=ADAM, lives=LIVES)


def checkpointed(head: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a dense part that runs again in backward, behind the lookups."""

    def run(batch: Any, pooled: Any, sequences: Any, beside: Any) -> Any:
        pooled.keys(), sequences.keys()  # wait for the outputs, which can be waited for once
        return checkpoint(head, batch, pooled, sequences, beside, use_reentrant=False)

    return run


def injected(is_checkpointed: bool) -> Any:
    """Trains; each backward runs a forward of another batch, which is an original one."""
    model = sharded_model(RUN, init_data_parallel=False)
    others, losses = iter(batches(RUN, 50)), []

    def look_up(batch: Any) -> None:
        model.module.pooled(batch.features).values()
        model.module.sequences(batch.features).keys()

    site = InjectionSite("head", FirstGradTensorFinder())
    register_backward_hook(site, model.module, lambda _: look_up(next(others)))
    if is_checkpointed:
        model.module.head.forward = checkpointed(model.module.head.forward)
    for batch in batches(RUN):
        loss = model(batch)[0]
        loss.backward()
        losses.append(float(loss.detach()))
    assert next(others, None) is None
    return losses, states_of(model), stats_of(model)


def in_pipeline(is_checkpointed: bool) -> Any:
    model = sharded_model(RUN, init_data_parallel=False)
    if is_checkpointed:
        model.module.head.forward = checkpointed(model.module.head.forward)
    outputs = drain(make_pipeline(RUN, "sparse_dist", model), batches(RUN))
    return [float(loss) for loss, _ in outputs], states_of(model), stats_of(model)


@pytest.mark.parametrize("train", [injected, in_pipeline])
def test_a_checkpointed_dense_part(train: Callable[[bool], Any]) -> None:
    got, expected = (workers.run(train, flag, world_size=2) for flag in (True, False))
    for here, there in zip(got, expected, strict=True):
        assert here[0] == there[0] and len(here[0]) == RUN.steps and here[2] == there[2]
        check_same_states(here[1], there[1])


def checkpointed_lookups(reentrant: bool) -> list[str]:
    """Returns the errors of a table on one rank, and trains the dense part beside it when it is frozen."""
    case = Case([Table("t0", ["f0"], shard_by_hand("table_wise", [([0], 0, 8)]))])
    model = shard(case, collection_of(case))
    batch = batches_of(case, 0)[0][torch.distributed.get_rank()]
    x, texts = torch.zeros(1, requires_grad=True), []
    run = partial(checkpoint, lambda x: model(batch).values() + x, x, use_reentrant=reentrant)
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            run()
        texts.append(str(caught.value))
    model(batch).values().sum().backward()
    model.module.collection.table("t0").freeze()
    run().sum().backward()
    assert x.grad is not None
    return texts


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_lookup_in_a_checkpointed_function_is_an_error_of_all_ranks(reentrant: bool) -> None:
    for texts in workers.run(checkpointed_lookups, reentrant, world_size=2):
        for text in texts:
            assert text.startswith("DynamicEmbeddingBagCollection('collection'): expected a lookup")
            assert "tables ['t0'] outside of torch.utils.checkpoint" in text
