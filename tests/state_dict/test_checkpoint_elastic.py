"""A table saved on any plan and number of ranks goes on, on any other, as if it had never moved."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import (
    NODE_KINDS,
    OPTIMIZERS,
    POOLED_KINDS,
    ROW_WISE,
    TABLES,
    WITH_NORMS,
    Setup,
    contents,
    differences,
    load,
    new,
    run_on,
    save,
    train,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

import torchrec_dyn as dyn

SPREAD = {"row_wise", "table_row_wise", "grid_shard"}
CUT = ("column_wise", "table_column_wise", "grid_shard")
LATER = (2, 5)  # at time 15, where ids of step 0 expire
Facts = dict[str, torch.Tensor]


def stay(setup: Setup, folder: str) -> tuple[Facts, list[torch.Tensor]]:
    """Trains, saves, and trains on."""
    model = new(setup)
    train(model, setup, range(2))
    save(model, f"{folder}/before")
    found = facts(model)
    outputs = train(model, setup, LATER)
    save(model, f"{folder}/after")
    return found, outputs


def move(setup: Setup, folder: str) -> tuple[Facts, list[torch.Tensor]]:
    """Loads what was saved, saves it again, and trains on."""
    model = load(new(setup), f"{folder}/before")
    save(model, f"{folder}/before_moved")
    found = facts(model)
    outputs = train(model, setup, LATER)
    save(model, f"{folder}/after_moved")
    return found, outputs


def facts(model: Any) -> Facts:
    """What a user can read of the tables by id."""
    collection, found = getattr(model, "module", model).collection, {}
    for name, _, config in TABLES:
        ids = found[f"{name} ids"] = dyn.read_ids(collection, name)
        found[f"{name} rows"], there = dyn.lookup_rows(collection, name, ids)
        assert bool(there.all()) and dyn.read_num_rows(collection, name) == ids.numel()
        if config is not None and config.eviction is not None:
            asked = torch.cat([ids, torch.arange(100, 110)])  # some of these wait
            found[f"{name} last seen"] = dyn.read_last_seen(collection, name, asked)
            found[f"{name} counts"] = dyn.read_counts(collection, name, asked)
    return found


def joined(outputs: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The outputs of all ranks as those of the whole batch, by step and table."""
    return {str(n): torch.cat(parts) for n, parts in enumerate(zip(*outputs, strict=True))}


def check_move(source: Setup, target: Setup) -> None:
    with tempfile.TemporaryDirectory(prefix="moved_") as folder:
        at_source, at_target = run_on(source, stay, folder), run_on(target, move, folder)
        for when in ("before", "after"):
            there, here = contents(Path(folder, when)), contents(Path(folder, f"{when}_moved"))
            assert not differences(here, there), when
    assert len(at_source[0][0]["plain ids"]) > 20
    for found, _ in (*at_source, *at_target):
        assert not differences(found, at_source[0][0])
    got, expected = (joined([outputs for _, outputs in one]) for one in (at_target, at_source))
    if source.feedback or not source.pooled:
        assert not differences(got, expected)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def fed_back(source: Setup, target: Setup) -> bool:
    """Whether both give the same outputs to the bit."""
    return not source.pooled or not SPREAD & {*source.kinds, *target.kinds}


@st.composite
def setups(draw: Any, pooled: bool, optimizer: str, cuts: tuple[str, ...] | None) -> Setup:
    """A setup with a plan for each table in turn."""
    world = draw(st.integers(0 if cuts is None or "table_wise" in cuts else 1, 4))
    kinds = [*POOLED_KINDS, *(NODE_KINDS if world == 4 and pooled else ())]
    if not pooled:  # their column shards have one width
        kinds.remove(draw(st.sampled_from(("column_wise", "three_columns"))))
    kinds = [kind for kind in kinds if cuts is None or kind in cuts] or [cuts[0]]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    return Setup(world, tuple(chosen), pooled, optimizer)


@st.composite
def moves(draw: Any) -> tuple[Setup, Setup]:
    """Where a model is and where it goes; row-wise state and norms stay on equal cuts."""
    pooled, optimizer = draw(st.booleans()), draw(st.sampled_from(OPTIMIZERS))
    cuts = None
    if optimizer in (*ROW_WISE, *WITH_NORMS):
        uncut = ("table_wise", "row_wise", "table_row_wise")
        cuts = draw(st.sampled_from([uncut, CUT, ("three_columns",)]))
    two = [draw(setups(pooled, optimizer, cuts)) for _ in range(2)]
    return two[0], two[1]


def check_drawn(drawn: tuple[Setup, Setup]) -> None:
    source, target = drawn
    feedback = fed_back(source, target)
    check_move(with_feedback(source, feedback), with_feedback(target, feedback))


def with_feedback(setup: Setup, feedback: bool) -> Setup:
    return Setup(setup.world, setup.kinds, setup.pooled, setup.optimizer, feedback=feedback)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Setup(4, NODE_KINDS), Setup(3, ("row_wise", "three_columns"))),
        (Setup(2, ("row_wise",), False), Setup(3, ("row_wise", "three_columns"), False)),
        (Setup(3, ("three_columns",), optimizer="ADAM"), Setup(0, optimizer="ADAM")),
        (Setup(2, ("row_wise",), optimizer="LAMB"), Setup(0, optimizer="LAMB")),
        (Setup(2, ("column_wise",), optimizer="FTRL"), Setup(0, optimizer="FTRL")),
        (Setup(0, optimizer="lion"), Setup(2, ("column_wise", "row_wise"), optimizer="lion")),
    ],
)
def test_training_goes_on_as_if_nothing_had_moved(source: Setup, target: Setup) -> None:
    check_drawn((source, target))


@pytest.mark.deep
@settings(max_examples=100)
@given(moves())
@example((Setup(3, ("three_columns",)), Setup(2, ("column_wise", "table_wise"))))
@example((Setup(0), Setup(3, ("row_wise", "three_columns"))))
@example((Setup(4, NODE_KINDS, optimizer="ADAM"), Setup(0, optimizer="ADAM")))
def test_many_moves(drawn: tuple[Setup, Setup]) -> None:
    check_drawn(drawn)
