"""A hook that loads the state of an earlier hook writes steps and counts as if the job had not ended."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from pipeline_model import Run, batches, sharded_model
from stats_writer import Towers, Writer, features
from torch import nn

from torchrec_dyn import (
    DynamicTableConfig,
    ExpireAfter,
    add_stats_hook,
    read_stats,
)
from torchrec_dyn.checkpoint import LoadPlanner

# Two maps of the same ids have different keys; bytes and slots depend on how the map has grown.
OF_THE_MAP = {"bytes", "slots", "load", "probe_length_mean", "probe_length_max"}


def written(writer: Writer, after: int = 0) -> list[tuple[str, float, int]]:
    """Returns what a writer got after a step, without the numbers of the id maps."""
    return [
        (name, value, step)
        for name, value, step in writer.scalars
        if step > after and name.rpartition("/")[2] not in OF_THE_MAP
    ]


def through_a_file(state: object) -> object:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def towers() -> Towers:
    return Towers(dynamic=DynamicTableConfig(eviction=ExpireAfter(steps=2)))


def train(model: nn.Module, first: int, last: int) -> None:
    for step in range(first, last):
        model(features(step, 100 + step, 5))


def test_a_resumed_hook_goes_on() -> None:
    model, whole, rest = towers(), Writer(), Writer()
    hook = add_stats_hook(model, whole, every=2)
    train(model, 0, 5)
    state, rows = through_a_file(hook.state_dict()), model.state_dict()
    train(model, 5, 9)
    assert dict(whole.steps("ec/word/evicted_expired"))[8] > 4
    resumed = towers()
    resumed.load_state_dict(rows)
    add_stats_hook(resumed, rest, every=2).load_state_dict(state)
    train(resumed, 5, 9)
    assert written(rest) == written(whole, after=5) != []
    assert rest.steps("ec/word/forwards") == [(6, 6), (8, 8)]


def test_a_hook_goes_back_with_its_model_in_the_same_process() -> None:
    """The counts since the save are not counted twice."""
    model, writer = towers(), Writer()
    hook = add_stats_hook(model, writer, every=1)
    train(model, 0, 3)
    state, rows = hook.state_dict(), model.state_dict()
    train(model, 3, 6)
    model.load_state_dict(rows)
    hook.load_state_dict(state)
    assert hook.state_dict() == state
    first = written(writer, after=3)
    writer.scalars.clear()
    train(model, 3, 6)
    assert written(writer) == first


def test_a_resumed_hook_may_be_resumed_again() -> None:
    model, whole, last = towers(), Writer(), Writer()
    add_stats_hook(model, whole, every=1)
    train(model, 0, 6)
    model, state = towers(), None
    for step in range(6):
        rows, model = model.state_dict(), towers()
        model.load_state_dict(rows)
        hook = add_stats_hook(model, last, every=1)
        if state is not None:
            hook.load_state_dict(state)
        train(model, step, step + 1)
        state = hook.state_dict()
    assert written(last) == written(whole)


def test_tables_may_come_and_go() -> None:
    model, resumed, writer = Towers(), Towers(), Writer()
    hook = add_stats_hook(model, {})
    model(features(1))
    state = hook.state_dict()
    state["counts"] = [("gone/table/hits", 9)] + [
        pair for pair in state["counts"] if not pair[0].startswith("ec/word/")
    ]
    add_stats_hook(resumed, writer, every=1).load_state_dict(state)
    resumed(features(1))
    assert writer.steps("ec/word/ids_seen") == [(2, 1)]
    assert writer.steps("deep.ebc/user/ids_seen") == [(2, 2)]
    assert not writer.steps("gone/table/hits")


@pytest.mark.parametrize(
    ("state", "got"),
    [
        ({}, "[]"),
        ({"forwards": 3}, "['forwards']"),
        ({"forwards": -1, "counts": []}, "['counts', 'forwards']"),
        ({"forwards": "3", "counts": []}, "['counts', 'forwards']"),
        (
            {"forwards": 3, "counts_of_rank_0_of_2": []},
            "['counts_of_rank_0_of_2', 'forwards']",
        ),
    ],
)
def test_other_states_are_refused(state: dict[str, object], got: str) -> None:
    model = Towers()
    hook = add_stats_hook(model, {})
    model(features(1))
    before = hook.state_dict()
    text = (
        "StatsHook.load_state_dict: expected a state with 'forwards' and 'counts', got "
        f"{got}. Without totals=True each rank loads what it saved, on as many ranks."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        hook.load_state_dict(state)
    assert hook.state_dict() == before


def test_a_hook_keeps_no_model_in_memory() -> None:
    model = Towers()
    hook = add_stats_hook(model, {})
    del model
    with pytest.raises(ValueError, match="StatsHook: expected its model, got one"):
        hook.state_dict()
    hook.remove()


# On two ranks: a row-wise table, one on rank 1 alone, one of two column shards.

RUN = Run(
    ("row_wise", "table_wise"),
    ("column_wise",),
    lives=[{"eviction": ExpireAfter(steps=1)}],
    steps=6,
)


def resume(folder: str) -> list[Writer]:
    """Trains six steps; loads what was saved after three, and trains the last three again.

    Returns:
        What the hooks wrote: totals and this rank's numbers, then both of the resumed model.
    """
    writers = [Writer() for _ in range(4)]
    is_first = dist.get_rank() == 0

    def hooked(totals: Writer, own: Writer) -> tuple[nn.Module, dict[str, object]]:
        model = sharded_model(RUN)
        to = totals if is_first else None
        hooks = {
            "totals": add_stats_hook(model, to, every=2, totals=True),
            "own": add_stats_hook(model, own, every=2),
        }
        return model, hooks

    def step(model: nn.Module, batch: object) -> None:
        loss, _ = model(batch)
        loss.backward()

    model, hooks = hooked(*writers[:2])
    for number, batch in enumerate(batches(RUN)):
        step(model, batch)
        if number == 2:
            optimizer = model.fused_optimizer.state_dict()
            state = {"model": model.state_dict(), "optimizer": optimizer, **hooks}
            dcp.save(state, checkpoint_id=folder)
    resumed, hooks = hooked(*writers[2:])
    optimizer = resumed.fused_optimizer.state_dict()
    state = {"model": resumed.state_dict(), "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
    resumed.load_state_dict(state["model"])
    resumed.fused_optimizer.load_state_dict(state["optimizer"])
    dcp.load(hooks, checkpoint_id=folder)
    for batch in batches(RUN)[3:]:
        step(resumed, batch)
    # The counts of the tables themselves start anew: the hook adds those of the first process.
    anew = read_stats(resumed.module.pooled, "pooled_0")["evicted_expired"]
    if is_first:
        evicted = dict(writers[2].steps("pooled/pooled_0/evicted_expired"))
        assert evicted[6] > anew > 0
    return writers


def test_a_resumed_sharded_model_goes_on(tmp_path: Path) -> None:
    first, second = workers.run(resume, str(tmp_path), world_size=2)
    for totals, own, resumed_totals, resumed_own in (first, second):
        assert written(resumed_totals) == written(totals, after=3)
        assert written(resumed_own) == written(own, after=3) != []
    assert written(second[0]) == []
    # Rank 0 knows nothing of a table on rank 1, but writes its totals.
    assert dict(first[1].steps("pooled/pooled_1/rows"))[6] == 0
    assert dict(first[0].steps("pooled/pooled_1/rows"))[6] > 0


def states_of_hooks() -> tuple[dict[str, object], dict[str, object]]:
    """Returns the states of a totals hook and of a rank's hook after one step."""
    model = sharded_model(RUN)
    hooks = [add_stats_hook(model, {}, totals=totals) for totals in (True, False)]
    model(batches(RUN)[0])
    with pytest.raises(ValueError, match="counts_of_rank_1_of_3"):
        hooks[1].load_state_dict({"forwards": 1, "counts_of_rank_1_of_3": []})
    return hooks[0].state_dict(), hooks[1].state_dict()


def test_totals_fit_any_number_of_ranks_and_a_ranks_counts_do_not() -> None:
    (totals, own), (same_totals, other) = workers.run(states_of_hooks, world_size=2)
    assert totals == same_totals and {*totals} == {"forwards", "counts"}
    assert {*own} == {"forwards", "counts_of_rank_0_of_2"}
    assert {*other} == {"forwards", "counts_of_rank_1_of_2"}
