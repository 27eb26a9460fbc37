"""Clipping by norm over ranks: rows under plans and a dense part of DDP, against torch's own clipping."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from replicated_models import batch_of, case_of, replica_of, sharding_groups, shards_of
from sharded_cases import Case, Table, three_tables, usual_plan
from sharded_training import batches, collection_of, shard, sharder_of, with_dense_sgd
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingPlan

import torchrec_dyn as dyn

DEFERRED = {"optimizer": "EXACT_SGD", "learning_rate": 0.1, "defer_updates": True}
WIDTH = 8 + 2 * 4 + 2 * 4  # of the outputs of `three_tables`


class WithHead(nn.Module):
    """Tables and a dense part."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.collection = tables
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        outputs = self.collection(features)  # in an order that depends on the plan
        pooled = torch.cat([outputs[name] for name in sorted(outputs.keys())], dim=1)
        return self.head(pooled).square().mean()


class Static(nn.Module):
    """The tables of a case as `nn.EmbeddingBag`, with the rows of a collection."""

    def __init__(self, case: Case, collection: Any) -> None:
        super().__init__()
        self.tables, self.bags, self.ids = case.tables, nn.ModuleDict(), {}
        for table in case.tables:
            self.ids[table.name] = dyn.read_ids(collection, table.name).sort().values
            rows, _ = dyn.lookup_rows(collection, table.name, self.ids[table.name])
            self.bags[table.name] = nn.EmbeddingBag.from_pretrained(rows, False, mode="sum")

    def forward(self, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        pooled = {}
        for table in self.tables:
            for name in table.features:
                jagged = features[name]
                places = torch.searchsorted(self.ids[table.name], jagged.values())
                output = f"{name}@{table.name}" if name == "a" else name  # "a" has two tables
                pooled[output] = self.bags[table.name](places, jagged.offsets()[:-1])
        return pooled


def check_clipped_with_a_head(kinds: tuple[str, ...]) -> None:
    """Norms, dense gradients and rows of two micro-batches a step."""
    rank = dist.get_rank()
    case = Case(three_tables(kinds, 2, 2, (8, 4, 4)), fused_params=DEFERRED)
    empty = collection_of(case, fused_params=DEFERRED)
    source = [batches(case, number) for number in range(6)]
    seen = copy.deepcopy(empty)
    with torch.no_grad():
        for _, together in source:
            seen(together)
    torch.manual_seed(1)
    static = WithHead(Static(case, seen))
    dynamic = WithHead(empty)
    dynamic.head.load_state_dict(static.head.state_dict())
    plan = ShardingPlan({"collection": {table.name: table.plan for table in case.tables}})
    model = DistributedModelParallel(dynamic, plan=plan, sharders=[sharder_of(case)])
    optimizer = with_dense_sgd(model, 0.1)
    plain = torch.optim.SGD(static.parameters(), lr=0.1)
    for step, part in enumerate((0.1, 10.0, 0.5)):
        optimizer.zero_grad(), plain.zero_grad()
        for per_rank, together in source[2 * step : 2 * step + 2]:
            model(per_rank[rank]).backward(), static(together).backward()
        most = part * float(dyn.clip_grad_norm_(model, math.inf))
        norm = dyn.clip_grad_norm_(model, most)
        expected = nn.utils.clip_grad_norm_(static.parameters(), most)
        assert float(norm) == pytest.approx(float(expected), rel=1e-5)
        got = [one.grad for one in model.parameters() if one.grad is not None]
        for one, other in zip(got, static.head.parameters(), strict=True):
            torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-6)
        optimizer.step(), plain.step()
        for name, ids in static.collection.ids.items():
            rows, found = dyn.lookup_rows(model.module.collection, name, ids)
            of_static = static.collection.bags[name].weight.detach()
            torch.testing.assert_close(rows[found], of_static[found], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "kinds", [("row_wise", "table_wise", "column_wise"), ("column_wise", "grid_shard")]
)
def test_clips_rows_and_a_dense_part_as_torch(kinds: tuple[str, ...]) -> None:
    workers.run(check_clipped_with_a_head, kinds, world_size=2)


def check_with_a_sharded_parameter() -> None:
    """Each rank has half of a parameter's gradient, as under `fully_shard`."""
    case = Case(
        [Table("t", ["a"], usual_plan("row_wise", 8, 2, 2))], fused_params=DEFERRED, exact=False
    )
    model = shard(case, collection_of(case))
    model(batches(case, 0)[0][dist.get_rank()]).values().sum().backward()
    of_rows = float(dyn.clip_grad_norm_(model, math.inf))
    mesh = dist.init_device_mesh("cpu", (2,))
    whole = torch.tensor([3.0, 4.0, 12.0, 84.0])
    model.module.dense = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    model.module.dense.grad = distribute_tensor(whole, mesh, [Shard(0)])
    norm = float(dyn.clip_grad_norm_(model, 1.0))
    assert of_rows > 1 and norm == pytest.approx(math.hypot(of_rows, 85.0), rel=1e-6)
    torch.testing.assert_close(model.module.dense.grad.full_tensor(), whole / norm)


def test_a_parameter_spread_over_ranks_counts_as_a_whole() -> None:
    workers.run(check_with_a_sharded_parameter, world_size=2)


def beside_static_tables(kind: str, kernel: str) -> list[str]:
    """Returns the errors of clipping and scaling a model with a static table; "" if there is none."""
    case = Case([Table("t", ["a"], usual_plan("table_wise", 8, 2, 2))], fused_params=DEFERRED)
    beside = EmbeddingBagConfig(name="s", embedding_dim=8, num_embeddings=1000, feature_names=["s"])
    static = EmbeddingBagCollection([beside])
    model = nn.ModuleDict({"collection": collection_of(case), "static": static})
    of_static = replace(usual_plan("table_wise", 8, 2, 2), compute_kernel=kernel)
    if kind == "data_parallel":
        of_static = ParameterSharding(kind, kernel, [0, 1])
    plan = ShardingPlan({"collection": {"t": case.tables[0].plan}, "static": {"s": of_static}})
    sharded = DistributedModelParallel(
        model, plan=plan, sharders=[sharder_of(case), EmbeddingBagCollectionSharder()]
    )
    told = []
    for call in (
        lambda: dyn.clip_grad_norm_(sharded, 1.0),
        lambda: dyn.GradScaler(sharded, "cpu"),
        lambda: dyn.GradScaler(sharded, "cpu", enabled=False),
    ):
        try:
            call()
            told.append("")
        except ValueError as error:
            told.append(str(error))
    return told


def test_gradients_of_static_tables_that_cannot_be_clipped_or_scaled_are_refused() -> None:
    for clips, scales, _ in workers.run(beside_static_tables, "table_wise", "dense", world_size=2):
        assert "static.s with the kernel dense, whose gradients are spread" in clips
        assert not scales
    for clips, scales, disabled in workers.run(
        beside_static_tables, "table_wise", "fused", world_size=2
    ):
        assert not clips and not disabled
        assert "GradScaler: expected static tables that are data_parallel, got " in scales
        assert "static.s with the kernel fused" in scales
    none = workers.run(beside_static_tables, "data_parallel", "dense", world_size=2)
    assert none == [["", "", ""]] * 2


def replica_with_a_head() -> tuple[Any, Case]:
    """Returns a replica of one rank, and its case; the dense gradients are averaged over both ranks."""
    case = replace(case_of({"t": None}), fused_params=DEFERRED)
    model = replica_of(case)
    model.module.head = nn.Linear(2, 1)
    for one in model.module.head.parameters():
        one.grad = torch.ones_like(one)
    return model, case


def train_replica(model: Any, case: Case, factor: float = 1.0) -> None:
    output = model(batch_of(case, 0)).values()
    output.backward(torch.full_like(output, factor))


def check_clipped_over_replicas() -> None:
    model, case = replica_with_a_head()
    train_replica(model, case, 1.0 + 50.0 * dist.get_rank())
    own: list[Any] = [None, None]
    dist.all_gather_object(own, float(dyn.clip_grad_norm_(model, math.inf)))
    expected = math.sqrt(own[0] ** 2 + own[1] ** 2 - 3.0)  # both have the three dense ones
    everyone = dist.group.WORLD
    norm = float(dyn.clip_grad_norm_(model, 0.5, group=everyone))
    assert norm == pytest.approx(expected, rel=1e-6) and own[1] > 2 * own[0] > 0.5
    torch.testing.assert_close(model.module.head.weight.grad, torch.full((1, 2), 0.5 / norm))
    clipped = float(dyn.clip_grad_norm_(model, math.inf, group=everyone))
    assert clipped == pytest.approx(0.5, rel=1e-4)
    other = sharding_groups()[1 - dist.get_rank()]
    with pytest.raises(ValueError, match="clip_grad_norm_: expected a group with all ranks"):
        dyn.clip_grad_norm_(model, 1.0, group=other)
    with pytest.raises(ValueError, match="GradScaler: expected a group with all ranks"):
        dyn.GradScaler(model, "cpu", group=other)


def test_replicas_clip_by_one_norm() -> None:
    workers.run(check_clipped_over_replicas, world_size=2)


def check_scaled_over_replicas() -> None:
    model, case = replica_with_a_head()
    scaler = dyn.GradScaler(model, "cpu", group=dist.group.WORLD, init_scale=8.0)
    rows = []
    for step in range(3):
        model.fused_optimizer.zero_grad()
        scaler.scale(torch.ones(()))  # which makes the scale
        train_replica(model, case, math.inf if step == dist.get_rank() == 1 else 8.0)
        scaler.step(model.fused_optimizer)
        scaler.update()
        rows.append(shards_of(model)["t.0"]["weight"])
        assert scaler.get_scale() == (8.0 if step == 0 else 4.0)
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[1], rows[2])


def test_replicas_skip_a_step_together() -> None:
    workers.run(check_scaled_over_replicas, world_size=2)
