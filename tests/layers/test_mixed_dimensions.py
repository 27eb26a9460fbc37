"""Block and quotient-remainder embeddings in models: trained under every plan, and served."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import quietly
from mixed_cases import ADAGRAD, FEATURES, batch, some_grad, tables, varied_batch
from pipeline_model import Clicks
from pipeline_runs import drain
from sharded_cases import usual_plan
from sharded_training import dense_sgd, with_dense_sgd
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from workers import run

import torchrec_dyn as dyn
from torchrec_dyn import serving

COLLECTIONS = (dyn.DynamicEmbeddingBagCollection, dyn.DynamicEmbeddingCollection)
STEPS = 3
RATE = 0.2


def collection_of(kind: str, weighted: bool = False, device: str | None = None) -> nn.Module:
    """Returns the collection of a kind: "block" or an op of quotient-remainder, and " max" for two tables."""
    configs = tables()
    configs[1].pooling = PoolingType.MEAN
    options: dict[str, Any] = {
        "is_weighted": weighted,
        "device": device,
        "fused_params": dict(ADAGRAD),
    }
    kind, is_max = kind.removesuffix(" max"), kind.endswith(" max")
    if is_max:
        options["dynamic"] = dict.fromkeys("ac", dyn.DynamicTableConfig(pooling="max"))
    if kind == "block":
        return dyn.BlockEmbeddingBagCollection(configs, {"a": 2, "b": 4, "c": 8}, **options)
    buckets = {"a": 7, "b": 2**32, "c": 10}
    return dyn.QuotientRemainderEmbeddingBagCollection(configs, buckets, kind, **options)


class Model(nn.Module):
    """A collection and a linear head; `dense` of a batch is the weight of each click in the loss."""

    def __init__(self, kind: str, weighted: bool = False, device: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.mixed = collection_of(kind, weighted, device)
        self.head = nn.Linear(36, 1)

    def forward(self, clicks: Clicks) -> Any:
        """Returns the loss, and the logits as the output of a pipeline."""
        logits = self.head(self.mixed(clicks.features).values()).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(
            logits, clicks.labels, reduction="none"
        )
        return (losses * clicks.dense).sum(), logits.detach()


def inner(model: nn.Module) -> dict[str, Any]:
    """Returns the unsharded dynamic collections of a model by path."""
    return {path: one for path, one in model.named_modules() if isinstance(one, COLLECTIONS)}


def shard(model: nn.Module, kinds: Sequence[str], dedup: bool = False) -> Any:
    """Returns the model under DistributedModelParallel; tables take the plans in turn."""
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    plan: dict[str, Any] = {}
    for path, one in inner(model).items():
        pooled = isinstance(one, dyn.DynamicEmbeddingBagCollection)
        configs = one.embedding_bag_configs() if pooled else one.embedding_configs()
        plan[path] = {
            config.name: usual_plan(
                kinds[turn % len(kinds)],
                config.embedding_dim,
                world,
                local,
                turn,
                config.num_embeddings,
            )
            for turn, config in enumerate(configs)
        }
    sharders = [
        dyn.DynamicEmbeddingBagCollectionSharder(),
        dyn.DynamicEmbeddingCollectionSharder(use_index_dedup=dedup),
    ]
    return DistributedModelParallel(model, plan=ShardingPlan(plan), sharders=sharders)


def clicks_of(step: int, rank: int, bags: int, share: float, weighted: bool = False) -> Clicks:
    """Returns one rank's batch; each click has the weight `share`."""
    features = batch(100 * step + rank, bags, weighted)
    if weighted:
        features.weights().requires_grad_(False)
    labels = torch.rand(bags, generator=torch.Generator().manual_seed(step + 10 * rank)).round()
    return Clicks(features, torch.full((bags,), share), labels)


def together(parts: Sequence[Clicks]) -> Clicks:
    """Returns the batches of all ranks as one batch."""
    jagged = {name: [part.features[name] for part in parts] for name in FEATURES}
    every = [one for name in FEATURES for one in jagged[name]]
    weights = [one.weights_or_none() for one in every]
    features = KeyedJaggedTensor(
        FEATURES,
        torch.cat([one.values() for one in every]),
        weights=None if weights[0] is None else torch.cat(weights),
        lengths=torch.cat([one.lengths() for one in every]),
    )
    world = len(parts)
    dense = torch.cat([part.dense for part in parts]) / world
    return Clicks(features, dense, torch.cat([part.labels for part in parts]))


def close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Asserts equality up to rounding."""
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=lambda m: f"{what}: {m}")


def check_trains_as_unsharded(
    kind: str, kinds: Sequence[str], sizes: Sequence[int], weighted: bool, dedup: bool = False
) -> int:
    """Trains both models and asserts that they stay equal; returns the number of compared rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    unsharded = Model(kind, weighted)
    sharded = shard(copy.deepcopy(unsharded), kinds, dedup)
    optimizers = [dense_sgd(unsharded, RATE), dense_sgd(sharded, RATE)]
    for step in range(STEPS):
        share = world / sum(sizes)
        parts = [clicks_of(step, r, sizes[r], share, weighted) for r in range(world)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, logits = unsharded(together(parts))
        loss.backward()
        own_loss, own_logits = sharded(parts[rank])
        own_loss.backward()
        first = sum(sizes[:rank])
        close(own_logits, logits[first : first + sizes[rank]], f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
    return same_parameters(sharded, unsharded)


def same_parameters(sharded: Any, unsharded: nn.Module) -> int:
    """Asserts that all rows and all dense parameters are equal; returns the number of rows. Collective."""
    expected = {
        name: one for name, one in unsharded.named_parameters() if one.device.type != "meta"
    }
    got = dict(sharded.module.named_parameters())
    for name, one in expected.items():
        close(got[name].detach(), one.detach(), name)
    compared = 0
    for path, one in inner(unsharded).items():
        here = sharded.module.get_submodule(path)
        for table in one.dynamic_configs():
            ids = one.table(table).ids()
            assert torch.equal(dyn.read_ids(here, table).sort().values, ids.sort().values), table
            rows, found = dyn.lookup_rows(here, table, ids)
            assert bool(found.all())
            close(rows, one.table(table).lookup(ids)[0], table)
            compared += len(ids)
    return compared


def train_varied(kind: str, kinds: Sequence[str]) -> int:
    """Trains on one batch with a batch size per feature, beside the same batch expanded; returns the rows."""
    unsharded = Model(kind)
    sharded = shard(copy.deepcopy(unsharded), kinds)
    varied, plain = varied_batch()
    share, labels = torch.full((5,), 0.2), torch.tensor([0.0, 1, 1, 0, 1])
    logits = []
    for model, features in ((sharded, varied), (unsharded, plain)):
        optimizer = dense_sgd(model, RATE)
        loss, out = model(Clicks(features, share, labels))
        loss.backward()
        optimizer.step()
        logits.append(out)
    close(*logits, "logits")
    return same_parameters(sharded, unsharded)


def from_meta(kind: str) -> int:
    """Asserts that a model built on the meta device has equal projections of the right size on all ranks."""
    torch.manual_seed(dist.get_rank())
    sharded = shard(Model(kind, device="meta"), ["row_wise"])
    sharded(clicks_of(0, dist.get_rank(), 4, 1.0))[0].backward()
    matrices = [one.weight.detach() for one in sharded.module.mixed.projections.tables.values()]
    for matrix in matrices:
        everyones = [torch.empty_like(matrix) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, matrix)
        assert all(torch.equal(one, matrix) for one in everyones)
        bound = 4 * (2 / sum(matrix.shape)) ** 0.5
        assert 0 < matrix.abs().max() < bound
    return len(matrices)


def train_pipelined(kind: str, pipeline: str, options: dict[str, Any]) -> tuple[list[float], int]:
    """Trains through a pipeline; returns the sums of the logits and the number of pipelined collections."""
    rank, world = dist.get_rank(), dist.get_world_size()
    source = [clicks_of(step, rank, 6, 1 / 6) for step in range(5)]
    sharded = shard(Model(kind), ["row_wise", "table_wise", "column_wise"])
    optimizer = with_dense_sgd(sharded, RATE)
    runner = getattr(train_pipelines, pipeline)(sharded, optimizer, torch.device("cpu"), **options)
    sums = [float(logits.double().sum()) for logits in drain(runner, source)]
    assert world > 1 and len(sums) == len(source)
    pipelined = getattr(runner, "_pipelined_modules", [])
    return sums, len(pipelined)


OPS = ("mult", "add", "concat")
MIXED = ["row_wise", "table_wise", "column_wise"]


@pytest.mark.everyday(4)
@pytest.mark.parametrize("plan", [["table_wise"], ["row_wise"], ["column_wise"], MIXED])
@pytest.mark.parametrize("kind", ["block", "mult", "block max", "mult max"])
def test_two_ranks_train_as_one(kind: str, plan: list[str]) -> None:
    assert min(run(check_trains_as_unsharded, kind, plan, [5, 3], False, world_size=2)) > 50


def test_quotients_and_remainders_that_travel_once() -> None:
    sizes = [0, 6]
    rows = run(check_trains_as_unsharded, "mult", MIXED, sizes, True, True, world_size=2)
    assert min(rows) > 50


@pytest.mark.parametrize("kind", ["add", "concat"])
def test_the_other_ops(kind: str) -> None:
    assert min(run(check_trains_as_unsharded, kind, MIXED, [4, 4], False, world_size=2)) > 50


@pytest.mark.parametrize("kind", ["block", "mult"])
def test_weighted_bags_and_a_rank_without_any(kind: str) -> None:
    assert min(run(check_trains_as_unsharded, kind, MIXED, [0, 6], True, world_size=2)) > 50


@pytest.mark.parametrize(
    ("kind", "plan"),
    [("block", ["table_row_wise", "grid_shard", "row_wise"]), ("mult", MIXED)],
)
def test_two_nodes_of_two_ranks(kind: str, plan: list[str]) -> None:
    sizes = [3, 5, 1, 4]
    rows = run(check_trains_as_unsharded, kind, plan, sizes, False, world_size=4, local_size=2)
    assert min(rows) > 50


@pytest.mark.parametrize("kind", ["block", "block max", "mult max", *OPS])
def test_a_batch_size_per_feature(kind: str) -> None:
    assert min(run(train_varied, kind, MIXED, world_size=2)) > 10


def test_projections_made_on_meta_start_alike_on_all_ranks() -> None:
    assert run(from_meta, "block", world_size=2) == [2, 2]


AHEAD: dict[str, Any] = {"pipeline_postproc": True}


@pytest.mark.parametrize(
    ("kind", "pipeline", "options", "run_ahead"),
    [
        ("block", "TrainPipelineSparseDist", {}, 1),
        ("mult", "TrainPipelineSparseDist", {}, 0),
        ("mult", "TrainPipelineSparseDist", AHEAD, 2),
        ("concat", "TrainPipelineSparseDist", AHEAD, 2),
        ("block max", "TrainPipelineSparseDist", AHEAD, 2),
    ],
)
def test_pipelines(kind: str, pipeline: str, options: dict[str, Any], run_ahead: int) -> None:
    plain = run(train_pipelined, kind, "TrainPipelineBase", {}, world_size=2)
    piped = run(train_pipelined, kind, pipeline, options, world_size=2)
    for (expected, _), (got, modules) in zip(plain, piped, strict=True):
        assert got == expected
        assert modules == run_ahead


# Served: the inner collections are replaced


@pytest.mark.parametrize("kind", ["block", "mult", "concat", "block max", "mult max"])
def test_served_rows_in_the_place_of_trained_ones(kind: str, tmp_path: Path) -> None:
    model = collection_of(kind)
    for step in range(2):
        output = model(batch(step)).values()
        output.backward(some_grad(output))
    model.eval()
    expected = model(batch(0)).values().detach()
    quietly(dcp.save, {"model": model.state_dict()}, checkpoint_id=tmp_path / "saved")
    folder = tmp_path / "served"
    serving.build(tmp_path / "saved", folder)
    groups = [model.rows]
    if kind.startswith("block"):
        configs = model.rows.embedding_bag_configs()
        model.rows = serving.ServingEmbeddingBagCollection(folder, configs)
        groups = [model.rows_of_max]
    for of_width in groups:
        for width, one in of_width.items():
            of_width[width] = serving.ServingEmbeddingCollection(folder, one.embedding_configs())
    assert expected.abs().sum() > 0
    assert torch.equal(model(batch(0)).values(), expected)
