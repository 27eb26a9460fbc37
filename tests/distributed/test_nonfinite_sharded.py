"""`on_nonfinite` under DistributedModelParallel: each owner decides, and no rank waits for an error."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, usual_plan
from sharded_training import collection_of, sharder_of
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn

IDS = torch.arange(1, 10)
BAD = 5  # in the batches of both ranks
KINDS = ["table_wise", "row_wise", "column_wise"]
DIM = 8


class Model(nn.Module):
    """A dense part, whose backward comes after that of the tables, and a collection."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.collection = collection

    def forward(self, batch: KeyedJaggedTensor, factors: torch.Tensor) -> torch.Tensor:
        dense = self.dense(torch.ones(2, 3)).sum()
        return dense + (self.collection(batch).values().float() * factors).sum()


def sharded(choice: str, kinds: list[str], dtypes: list[str]) -> Any:
    tables = [
        Table(
            f"t{i}", [f"f{i}"], usual_plan(kind, DIM, 2, 2), DIM, data_type=dtype,
            config=dyn.DynamicTableConfig(on_nonfinite=choice),
        )
        for i, (kind, dtype) in enumerate(zip(kinds, dtypes, strict=True))
    ]  # fmt: skip
    learning = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    case = Case(tables, fused_params=learning)
    torch.manual_seed(3)
    return DistributedModelParallel(
        Model(collection_of(case)),
        plan=ShardingPlan({"collection": {table.name: table.plan for table in tables}}),
        sharders=[sharder_of(case)],
    )


def step(model: Any, tables: int, spoiled: dict[int, list[int]] | None = None) -> None:
    """Trains a batch in which the last rank's gradient of id 5 has NaN in some columns of some tables."""
    ids = IDS[:6] if dist.get_rank() == 0 else IDS[3:]
    factors = torch.ones(len(ids), DIM * tables)
    for table, columns in (spoiled or {}).items():
        if dist.get_rank() == 1:
            factors[ids == BAD, [DIM * table + column for column in columns]] = math.nan
    batch = KeyedJaggedTensor(
        [f"f{i}" for i in range(tables)],
        ids.repeat(tables),
        lengths=torch.ones(len(ids) * tables, dtype=torch.int64),
    )
    model(batch, factors).backward()


def rows_of(model: Any, tables: int) -> list[torch.Tensor]:
    return [dyn.lookup_rows(model.module.collection, f"t{i}", IDS)[0] for i in range(tables)]


def refused(model: Any, tables: int) -> list[float]:
    return [dyn.read_stats(model.module.collection, f"t{i}")["nonfinite"] for i in range(tables)]


def check_skip_beside_write(kinds: list[str]) -> None:
    tables = len(kinds)
    every_column = {table: [*range(DIM)] for table in range(tables)}
    skips = sharded("skip", kinds, ["FP32"] * tables)
    writes = sharded("write", kinds, ["FP32"] * tables)
    for model in (skips, writes):
        step(model, tables)
    before = rows_of(skips, tables)
    for model in (skips, writes):
        step(model, tables, every_column)
    stays = IDS == BAD
    for got, written, was in zip(
        rows_of(skips, tables), rows_of(writes, tables), before, strict=True
    ):
        assert written[stays].isnan().all() and written[~stays].isfinite().all()
        assert torch.equal(got[stays], was[stays]) and torch.equal(got[~stays], written[~stays])
    shards = [1 + kind.endswith("column_wise") for kind in kinds]
    assert refused(skips, tables) == shards and refused(writes, tables) == [0] * tables


@pytest.mark.parametrize("kinds", [KINDS, ["table_row_wise", "table_column_wise"]])
def test_skip_leaves_the_row_under_every_plan(kinds: list[str]) -> None:
    workers.run(check_skip_beside_write, kinds, world_size=2)


def check_skip_by_column_shard() -> None:
    model = sharded("skip", ["column_wise"], ["FP32"])
    step(model, 1)
    [before] = rows_of(model, 1)
    step(model, 1, {0: [6]})  # of the second shard
    [after] = rows_of(model, 1)
    changed = after != before
    assert changed[IDS == BAD].tolist() == [[True] * 4 + [False] * 4]
    assert changed[IDS != BAD].all() and refused(model, 1) == [1]


def test_column_shards_decide_by_their_own_columns() -> None:
    workers.run(check_skip_by_column_shard, world_size=2)


def errors_of(spoiled: int) -> list[str]:
    """Trains with an error in one of two groups of tables; the ranks go on."""
    model = sharded("error", ["row_wise", "row_wise"], ["FP32", "BF16"])
    step(model, 2)
    before, error = rows_of(model, 2), ""
    try:
        step(model, 2, {spoiled: [2]})
    except RuntimeError as raised:
        error = str(raised)
    after = rows_of(model, 2)
    gradients = [one.grad for one in model.module.dense.parameters()]
    sums = [one.clone() for one in gradients]
    for one in sums:
        dist.all_reduce(one)
    assert all(torch.equal(one, total / 2) for one, total in zip(gradients, sums, strict=True))
    assert torch.equal(after[spoiled][IDS == BAD], before[spoiled][IDS == BAD])
    assert (after[1 - spoiled] != before[1 - spoiled]).any(1).all()
    model.zero_grad()
    for _ in range(2):  # the ranks are in step
        step(model, 2)
    assert all(rows.isfinite().all() for rows in rows_of(model, 2))
    assert refused(model, 2) == [float(t == spoiled) for t in range(2)]
    return [error]


@pytest.mark.parametrize("spoiled", [0, 1])
def test_an_error_is_raised_at_the_end_and_no_rank_waits(spoiled: int) -> None:
    """Without that, the other rank waits for the gradients of the other group, or of the dense part."""
    by_rank = workers.run(errors_of, spoiled, world_size=2, group_timeout=30)
    texts = [text for [text] in by_rank if text]
    assert len(texts) == 1 and "got NaN or infinity in 1 rows" in texts[0]
