"""A saved table depends on its contents only: the bytes are the same under every plan on 1 to 4 ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import (
    LAST_IDS,
    NODE_KINDS,
    OPTIMIZERS,
    ROW_WISE,
    Setup,
    contents,
    differences,
    kinds_on,
    new,
    run_on,
    save,
    train,
)
from shards import deep_but


def train_and_save(setup: Setup, path: str) -> None:
    model = new(setup)
    train(model, setup, (0, 1, 4))  # at time 12, where ids of step 0 expire
    save(model, path)


def saved(setup: Setup, folder: Path) -> dict[str, Any]:
    """What a setup saves after a few steps, the same ones for all."""
    path = str(folder / f"{setup.world} {setup.kinds}")
    run_on(setup, train_and_save, path)
    return contents(path)


def check_same(setups: list[Setup], folder: Path) -> None:
    """Asserts that all setups save the same bytes."""
    first = saved(setups[0], folder)
    assert any(key.endswith("plain.ids") for key in first)
    for setup in setups[1:]:
        differs = differences(saved(setup, folder), first)
        assert not differs, f"{setup}: {differs}"


def every_plan(pooled: bool, optimizer: str, worlds: range = range(1, 5)) -> list[Setup]:
    return [
        Setup(world, (kind,), pooled, optimizer, feedback=not pooled)
        for world in worlds
        for kind in kinds_on(world, pooled)
    ]


def some_plans(
    pooled: bool, optimizer: str, turn: int, numbers: Iterable[int] = range(1, 4)
) -> list[Setup]:
    """Plans mixed over the tables of one collection: with both turns each kind on 1 to 3 ranks."""
    mixes = [("table_wise", "row_wise", "column_wise"), ("three_columns", "row_wise")]
    setups = [
        Setup(world, mixes[(world + turn) % 2], pooled, optimizer, feedback=not pooled)
        for world in numbers
    ]
    unsharded = Setup(0, pooled=pooled, optimizer=optimizer, feedback=not pooled)
    on_nodes = [Setup(4, NODE_KINDS, pooled, optimizer)] if pooled else []
    return [unsharded, *setups, *on_nodes]


BY_TURN = [(0, "ADAM"), (1, "EXACT_ADAGRAD")]


@pytest.mark.parametrize("turn, optimizer", deep_but(BY_TURN[:1], BY_TURN))
def test_every_plan_saves_the_same_bytes(tmp_path: Path, turn: int, optimizer: str) -> None:
    check_same(some_plans(True, optimizer, turn), tmp_path)


def test_every_plan_of_a_sequence_collection_saves_the_same_bytes(tmp_path: Path) -> None:
    check_same(some_plans(False, "ADAM", 1, (2, 3)), tmp_path)


# Row-wise optimizers learn otherwise under other column cuts, as TorchRec's do.
EQUAL_CUTS = (
    ("table_wise", "row_wise", "table_row_wise"),
    ("column_wise", "table_column_wise", "grid_shard"),
    ("three_columns",),
)


def equal_cuts(
    pooled: bool, optimizer: str, kinds: tuple[str, ...], numbers: Iterable[int] = range(1, 5)
) -> list[Setup]:
    """Plans of the same column cuts; a table that is not sharded has none."""
    worlds = {world: [k for k in kinds if k in kinds_on(world, pooled)] for world in numbers}
    if "table_wise" in kinds:
        worlds[0] = ["table_wise"]
    return [
        Setup(world, tuple(some), pooled, optimizer, feedback=not pooled)
        for world, some in worlds.items()
    ]


@pytest.mark.parametrize("kinds", EQUAL_CUTS[1:2])
def test_row_wise_state_of_equal_cuts_is_the_same_too(tmp_path: Path, kinds: tuple) -> None:
    check_same(equal_cuts(True, "EXACT_ROWWISE_ADAGRAD", kinds, (1, 2, 4)), tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS[:3])
def test_all_plans_and_optimizers(tmp_path: Path, pooled: bool, optimizer: str) -> None:
    check_same(every_plan(pooled, optimizer), tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("optimizer", ROW_WISE)
@pytest.mark.parametrize("kinds", EQUAL_CUTS)
def test_all_plans_and_row_wise_optimizers(
    tmp_path: Path, pooled: bool, optimizer: str, kinds: tuple
) -> None:
    check_same(equal_cuts(pooled, optimizer, kinds), tmp_path)


def test_the_contents_are_what_this_is_about(tmp_path: Path) -> None:
    # Ids that wait, times, scores and ids behind the last range are there, else the comparison is about less.
    found = saved(Setup(4, ("row_wise",)), tmp_path)
    prefix = "model/collection.embedding_bags."
    assert len(found[f"{prefix}counted.waiting"]) > 3
    assert found[f"{prefix}counted.clock"].shape[1] > 1
    assert len(found[f"{prefix}drawn.count"].unique()) > 1
    ids = found[f"{prefix}plain.ids"].tolist()
    assert set(LAST_IDS) <= set(ids)
    assert ids[-len(LAST_IDS) :] == LAST_IDS
