"""Loads an entry: its full save, the dense part of its last delta, then the deltas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from torchrec_dyn.checkpoint.delta_apply import apply_delta
from torchrec_dyn.checkpoint.dense_part import optimizers_in, without_tables
from torchrec_dyn.checkpoint.entry_files import check_files
from torchrec_dyn.checkpoint.further_values import read_values, set_options
from torchrec_dyn.checkpoint.interrupts import interrupts_raised
from torchrec_dyn.checkpoint_format import Entry, open_files
from torchrec_dyn.ranks import Table, gather_results, run_together, settle
from torchrec_dyn.state_dict import LoadPlanner, only_to_load

_CALL = "Checkpoints.restore"
_STATE = "optimizer.state."


class Restored(NamedTuple):
    """The result of `Checkpoints.restore`.

    Attributes:
        step: the step that was given to `save`.
        extra: the further values of this rank by name; of an object its state dict.
        entry: the entry.
        skipped: a line for each newer entry that could not be used, and why.
    """

    step: int
    extra: dict[str, Any]
    entry: Entry
    skipped: list[str]


def load_entry(
    model: nn.Module, optimizer: Any, tables: Sequence[Table], line: Sequence[Entry]
) -> dict[str, Any]:
    """Loads a full save and the deltas after it; returns the further values of this rank. Collective.

    Raises:
        ValueError, RuntimeError, CheckpointException: on every rank, if a file is damaged or does not fit.
    """
    group, rank = tables[0].group, tables[0].rank
    ranks = 1 if group is None else dist.get_world_size(group)
    run_together(group, _CALL, lambda: check_files(line, rank, ranks))
    values, options = run_together(group, _CALL, lambda: read_values(line[-1], rank))

    def load() -> None:
        saved = {folder: _saved_states(folder) for folder in (line[0].tables, line[-1].dense)}
        keys = set[str]().union(*saved.values())
        state = _places_to_load(model, optimizer, tables, line[-1], keys)
        lazy = _lazy_states(optimizer)
        alone = {"process_group": group, "no_dist": group is None}
        with interrupts_raised():
            dcp.load(
                _with_states(state, lazy, saved[line[0].tables]),
                checkpoint_id=line[0].tables,
                planner=LoadPlanner(path=line[0].tables),
                **alone,
            )
        if len(line) > 1:
            dense = _with_states(without_tables(state, tables), lazy, saved[line[-1].dense])
            # DCP's own planner would ask for the state {} of a static table that lies on another rank.
            with interrupts_raised():
                dcp.load(dense, checkpoint_id=line[-1].dense, planner=LoadPlanner(), **alone)
            states = {**state["optimizer"]["state"], **dense["optimizer"]["state"]}
            state["model"].update(dense["model"])
            state["optimizer"].update({**dense["optimizer"], "state": states})
        state = _with_states(state, lazy, keys)
        for name in lazy.keys() - state["optimizer"]["state"].keys():
            del lazy[name][optimizer.params[name]]  # it had no state when the entry was saved
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        set_options(optimizer, options)
        optimizer.zero_grad()  # gives FBGEMM the learning rates of static tables

    settle(group, _CALL, load)
    for delta in line[1:]:
        apply_delta(model, delta.tables)
    return values


def _saved_states(folder: Path) -> set[str]:
    """Returns the keys of optimizer state in a checkpoint; each begins with the name of a parameter."""
    saved = open_files(folder)[1].state_dict_metadata
    return {key.removeprefix(_STATE) for key in saved if key.startswith(_STATE)}


def _begins(key: str) -> set[str]:
    """Returns the begins of a key up to a dot, and the key: one of them is the name of a parameter."""
    parts = key.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def _with_states(state: Mapping[str, Any], lazy: Container[str], keys: set[str]) -> dict[str, Any]:
    """Returns state dicts without the lazy state of parameters of which no state is among the keys."""
    saved = set[str]().union(*map(_begins, keys))
    states = state["optimizer"]["state"].items()
    kept = {name: one for name, one in states if name in saved or name not in lazy}
    return {"model": state["model"], "optimizer": {**state["optimizer"], "state": kept}}


def _lazy_states(optimizer: Any) -> dict[str, dict[Any, Any]]:
    """Returns, by names of parameters, the state that optimizers of torch have made in a step."""
    # CombinedOptimizer joins states in a new dict.
    found = [one.state for one in optimizers_in(optimizer) if isinstance(one.state, defaultdict)]
    named = optimizer.params.items()
    return {name: one for name, parameter in named for one in found if parameter in one}


def _places_to_load(
    model: nn.Module, optimizer: Any, tables: Sequence[Table], entry: Entry, keys: set[str]
) -> dict[str, Any]:
    """Returns state dicts with a place for each saved state of the optimizer. Collective.

    torch's optimizers make their state in the first step, and DCP reads only what has a place. So an
    optimizer without state takes a step of zeros, whose results the load replaces.

    Raises:
        ValueError: on every rank, if saved state has no place on any rank: it is of another optimizer.
    """

    def state_to_load() -> dict[str, Any]:
        with only_to_load():
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def missing(state: Mapping[str, Any]) -> list[str]:
        """Returns the keys without a place on any rank: a static table lies on some ranks only."""

        def here() -> set[str]:
            there = {name for name, one in state["optimizer"]["state"].items() if one}
            return {key for key in keys if there.isdisjoint(_begins(key))}

        return sorted(set.intersection(*gather_results(group, _CALL, here)))

    group = tables[0].group
    state = state_to_load()
    left = missing(state)
    if left and hasattr(optimizer, "init_state"):
        optimizer.init_state()
        optimizer.zero_grad()
        state = state_to_load()
        left = missing(state)
    if left:
        raise ValueError(
            f"{entry.path}: expected an optimizer with state for {_STATE}{left[0]}, got one without. Restore "
            "with the optimizers and parameters that were saved."
        )
    return state
