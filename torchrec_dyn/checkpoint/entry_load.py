"""Loads an entry: its full save, the dense part of its last delta, then the deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from torchrec_dyn.checkpoint.delta_apply import apply_delta
from torchrec_dyn.checkpoint.dense_part import without_tables
from torchrec_dyn.checkpoint.entry_files import check_files
from torchrec_dyn.checkpoint.further_values import read_values, set_options
from torchrec_dyn.checkpoint_format import Entry, open_files
from torchrec_dyn.ranks import Table, gather_results, run_together, settle
from torchrec_dyn.state_dict import LoadPlanner, only_to_load

_CALL = "Checkpoints.restore"


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
        state = _places_to_load(model, optimizer, tables, line)
        alone = {"process_group": group, "no_dist": group is None}
        dcp.load(
            state, checkpoint_id=line[0].tables, planner=LoadPlanner(path=line[0].tables), **alone
        )
        if len(line) > 1:
            dense = without_tables(state, tables)
            dcp.load(dense, checkpoint_id=line[-1].dense, **alone)
            states = {**state["optimizer"]["state"], **dense["optimizer"]["state"]}
            state["model"].update(dense["model"])
            state["optimizer"].update({**dense["optimizer"], "state": states})
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        set_options(optimizer, options)

    settle(group, _CALL, load)
    for delta in line[1:]:
        apply_delta(model, delta.tables)
    return values


def _places_to_load(
    model: nn.Module, optimizer: Any, tables: Sequence[Table], line: Sequence[Entry]
) -> dict[str, Any]:
    """Returns state dicts with a place for each saved state of the optimizer. Collective.

    torch's optimizers make their state in the first step, and DCP reads only what has a place. So an
    optimizer without state takes a step of zeros, whose results the load replaces.

    Raises:
        ValueError: on every rank, if saved state has no place: it is of another optimizer.
    """

    def missing(state: Mapping[str, Any]) -> list[str]:
        there = tuple(
            f"optimizer.state.{name}." for name, one in state["optimizer"]["state"].items() if one
        )
        of_tables = tuple(f"{table.key}.weight." for table in tables)
        return [
            key
            for folder in {line[0].tables, line[-1].dense}
            for key in open_files(folder)[1].state_dict_metadata
            if key.startswith("optimizer.state.")
            and not key.startswith(there)
            and not any(one in key for one in of_tables)
        ]

    def check(state: Mapping[str, Any]) -> None:
        if left := missing(state):
            raise ValueError(
                f"{line[-1].path}: expected an optimizer with state for {left[0]}, got one without. Restore "
                "with the optimizers and parameters that were saved."
            )

    def state_to_load() -> dict[str, Any]:
        with only_to_load():
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    group = tables[0].group
    state = state_to_load()
    lacks = gather_results(group, _CALL, lambda: bool(missing(state)))
    if any(lacks) and hasattr(optimizer, "init_state"):
        optimizer.init_state()
        optimizer.zero_grad()
        state = state_to_load()
    run_together(group, _CALL, lambda: check(state))
    return state
