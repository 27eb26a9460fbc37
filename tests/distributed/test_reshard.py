"""A table that moves while the model goes on trains as one that was loaded elsewhere, or stayed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import (
    OPTIMIZERS,
    Setup,
    contents,
    differences,
    held,
    kinds_on,
    load,
    new,
    run_on,
    same_bits,
    save,
    train,
)
from reshard_cases import check_same, counts_of, goes_on, move, plans
from sharded_training import Holder, collection_of, shard
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn

TW, RW, CW, THREE = "table_wise", "row_wise", "column_wise", "three_columns"
BY_NODE = ("table_row_wise", "grid_shard", "table_column_wise", RW, TW)
CASES = {
    "pooled": (Setup(2, (TW, RW, CW, THREE, RW), optimizer="ADAM"), (RW, CW, THREE, TW, TW), 0),
    "back and on": (Setup(2, (RW, CW, THREE, TW, CW), optimizer="ADAM"), (CW, TW, TW, TW, RW), 1),
    "sequences": (Setup(2, (TW, RW, CW), pooled=False), (RW, CW, TW), 1),
    "row-wise state": (
        Setup(2, (THREE, CW, TW, RW, THREE), optimizer="EXACT_ROWWISE_ADAGRAD"),
        (CW, THREE, CW, TW, TW), 0,
    ),
    "two nodes": (
        Setup(4, (TW, "grid_shard", RW, "table_row_wise", CW), optimizer="PARTIAL_ROWWISE_ADAM"),
        BY_NODE, 1,
    ),
    "two nodes, sequences": (Setup(4, (TW, CW, RW), pooled=False, optimizer="EXACT_SGD"), (CW, RW, TW), 1),
}  # fmt: skip


LONG = ("back and on", "two nodes, sequences")


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[pytest.mark.deep] * (one in LONG)) for one in CASES]
)
def test_trains_on_as_through_a_checkpoint(case: str, tmp_path: Path) -> None:
    setup, kinds, shift = CASES[case]
    rows = run_on(setup, goes_on, kinds, shift, str(tmp_path), None)
    assert all(sum(of_table) > 20 for of_table in zip(*rows, strict=True))


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(40))
def test_any_plan_to_any_other(seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    world, pooled = drawn.choice([2, 3, 4]), drawn.random() < 0.7
    kinds = [kind for kind in kinds_on(world, pooled) if pooled or kind != THREE]
    first, second = (tuple(drawn.choices(kinds, k=5)) for _ in range(2))
    setup = Setup(world, first, pooled, drawn.choice(OPTIMIZERS))
    names = drawn.sample(["plain", "sixteen", "brain", "counted", "drawn"], drawn.randint(1, 5))
    run_on(setup, goes_on, second, drawn.randrange(4), str(tmp_path), names)


def stays_or_moves(setup: Setup, folder: str) -> None:
    """Saves what was trained under one plan, and what moved twice and back."""
    stayed, moved = new(setup), new(setup)
    train(stayed, setup, range(6))
    train(moved, setup, range(2))
    move(moved, plans(setup, (RW, CW, TW)))
    train(moved, setup, range(2, 4))
    move(moved, plans(setup, (CW, TW, RW), 1))
    move(moved, plans(setup, setup.kinds))
    check_places(moved, setup)
    train(moved, setup, range(4, 6))
    check_same(held(moved), held(stayed))
    assert counts_of(moved, setup) == counts_of(stayed, setup)
    save(stayed, f"{folder}/stayed")
    save(moved, f"{folder}/moved")


def check_places(model: Any, setup: Setup) -> None:
    """Asserts that tables lie as in a model that was made with the plan of the setup."""
    for table in setup.case().tables:
        mine, theirs = (m.module.collection.table(table.name) for m in (model, new(setup)))
        assert mine.columns == theirs.columns


def test_what_moved_and_came_back_is_saved_as_what_stayed(tmp_path: Path) -> None:
    setup = Setup(2, (TW, RW, CW), optimizer="ADAM", feedback=False)
    run_on(setup, stays_or_moves, str(tmp_path))
    got, expected = contents(tmp_path / "moved"), contents(tmp_path / "stayed")
    assert len(expected) > 50 and not differences(got, expected)


def moves_one(setup: Setup) -> None:
    model, stayed = new(setup), new(setup)
    for one in (model, stayed):
        train(one, setup, range(3))
    shards = model.module.collection._shards
    kept = {name: list(shards.shards_of(name)) for name in ("plain", "drawn")}
    move(model, plans(setup, (CW,), names=["plain"]))
    assert [*shards.shards_of("drawn")] == kept["drawn"], "the very same shards"
    assert [*shards.shards_of("plain")] != kept["plain"]
    assert model.module.collection.module_sharding_plan["plain"].sharding_type == CW
    got, expected = train(model, setup, range(3, 5)), train(stayed, setup, range(3, 5))
    assert all(same_bits(one, other) for one, other in zip(got, expected, strict=True))
    # The whole plan may be given: tables whose pieces lie where they lay do not move.
    here = shards.shards_of("plain")
    move(model, plans(setup, (CW, *setup.kinds[1:])))
    assert [*shards.shards_of("plain")] == [*here]


def test_one_of_several_tables_moves() -> None:
    run_on(Setup(2, (TW, RW, CW, CW, RW)), moves_one)


def moves_empty(setup: Setup) -> None:
    model, other = new(setup), new(setup)
    move(model, plans(setup, (RW,)))
    assert dist.get_world_size() == 2
    train(model, setup, range(2))
    train(other, setup, range(2))
    assert counts_of(model, setup) == counts_of(other, setup)


def test_tables_that_nobody_used_yet_move() -> None:
    run_on(Setup(2), moves_empty)


def starts_as(setup: Setup, folder: str) -> list[torch.Tensor]:
    """A table starts rows as the checkpoint that it was loaded from says, wherever it lies."""
    constant = {"plain": dyn.DynamicTableConfig(initializer=dyn.Constant(0.25))}
    case = setup.case()
    other = shard(case, collection_of(case, dynamic=constant))
    train(other, setup, range(1))
    save(other, folder)
    model = load(new(setup), folder)
    for kind in (RW, CW):
        move(model, plans(setup, (kind,)))
    train(model, setup, range(1, 3))
    ids = torch.tensor([1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007])  # of step 1 alone
    rows, found = dyn.lookup_rows(model.module.collection, "plain", ids)
    return rows[found]


def test_initializers_that_came_with_a_checkpoint_come_along(tmp_path: Path) -> None:
    for rows in run_on(
        Setup(2, optimizer="EXACT_SGD", tables=1), starts_as, str(tmp_path / "saved")
    ):
        assert len(rows) > 2
        # Gradients are multiples of 1/16, the learning rate is 0.1; other rows start within 0.04 of 0.
        steps = (rows - 0.25) * 160
        assert torch.allclose(steps, steps.round(), atol=1e-3)


def sends_once(setup: Setup) -> None:
    case, stayed = setup.case(), new(setup)
    plan = ShardingPlan({"collection": {table.name: table.plan for table in case.tables}})  # type: ignore[misc]
    sharder = dyn.DynamicEmbeddingCollectionSharder(case.fused_params, use_index_dedup=True)
    model = DistributedModelParallel(
        Holder(collection_of(case)), device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    for steps in (range(2), range(2, 4)):
        got, expected = train(model, setup, steps), train(stayed, setup, steps)
        assert all(same_bits(one, other) for one, other in zip(got, expected, strict=True))
        assert len(model.module.collection._send_once) == 3
        move(model, plans(setup, (RW, CW, TW)))


def test_sequences_that_are_sent_once_go_on_so() -> None:
    run_on(Setup(2, (TW, RW, CW), pooled=False, tables=3), sends_once)
