"""Loads an entry: its full save, the dense part of its last delta, then the deltas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_dyn.checkpoint.dcp_files import load_files
from torchrec_dyn.checkpoint.delta_apply import apply_changes
from torchrec_dyn.checkpoint.dense_part import optimizers_in, without_tables
from torchrec_dyn.checkpoint.entry_files import check_files
from torchrec_dyn.checkpoint.entry_fit import (
    PARTIAL,
    MisfitError,
    fit_of_tables,
    misfit_of_dense,
)
from torchrec_dyn.checkpoint.further_values import read_values, set_options
from torchrec_dyn.checkpoint_format import Entry, open_files, read_chain
from torchrec_dyn.ranks import Table, gather_results, run_together, settle
from torchrec_dyn.state_dict import LoadPlanner
from torchrec_dyn.storage import lacks_memory
from torchrec_dyn.whole_model import tables_of

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


def lines_to_load(path: Path, step: int | None) -> Iterator[tuple[list[Entry], list[str], int]]:
    """Yields the lines of a directory that may be loaded, best first, then [].

    Each comes with reports of entries that cannot be, and the highest number. `step`: as of `restore`.
    """
    chain = read_chain(path)
    entries = chain.entries[::-1] if step is None else [chain.at(step)]
    skipped = list(chain.skipped) if step is None else []
    for entry in entries:
        line = chain.line_of(entry)
        if line is None:
            skipped.append(f"{entry.path.name}: an entry before it is missing")
        else:
            yield line, skipped, chain.highest
            skipped = []
    yield [], skipped, chain.highest


def load_entry(
    model: nn.Module,
    optimizer: Any,
    tables: Sequence[Table],
    line: Sequence[Entry],
    is_partial: bool,
) -> tuple[dict[str, Any], bool]:
    """Loads a full save and the deltas after it. Collective.

    With `is_partial` only what the line and the model have both is loaded.

    Returns:
        The further values of this rank; and True if a delta may follow, as `fit_of_tables` says.

    Raises:
        MisfitError: on every rank, if an entry is of another model; no table has changed then.
        ValueError, RuntimeError, CheckpointException: on every rank, if a file is damaged or does not fit.
    """
    group, rank = tables[0].group, tables[0].rank
    ranks = 1 if group is None else dist.get_world_size(group)
    run_together(group, _CALL, lambda: check_files(line, rank, ranks))
    told, is_same = gather_results(
        group, _CALL, lambda: ("", True) if rank else fit_of_tables(tables, line, is_partial)
    )[0]
    if told:
        raise MisfitError(told)
    values, options = run_together(group, _CALL, lambda: read_values(line[-1], rank))

    def load() -> Container[str]:
        """Returns the keys of the full save."""
        folders = {line[0].tables: line[0], line[-1].dense: line[-1]}
        there = {one: open_files(one)[1].state_dict_metadata for one in folders}
        saved = {folder: _saved_states(one) for folder, one in there.items()}
        keys = set[str]().union(*saved.values())
        state = _places_to_load(model, optimizer, tables, line[-1], keys, is_partial)
        lazy = _lazy_states(optimizer)

        def misfit() -> str:
            for folder, metadata in there.items():
                dense = without_tables(_with_states(state, lazy, saved[folder]), tables)
                if told := misfit_of_dense(folders[folder], dense, metadata, is_partial):
                    return told
            return ""

        for one in gather_results(group, _CALL, misfit):
            if one:
                raise MisfitError(one)
        planner = LoadPlanner(path=line[0].tables, allow_partial_load=is_partial)
        load_files(_with_states(state, lazy, saved[line[0].tables]), line[0].tables, planner, group)
        if len(line) > 1:
            dense = _with_states(without_tables(state, tables), lazy, saved[line[-1].dense])
            # DCP's own planner would ask for the state {} of a static table that lies on another rank.
            planner = LoadPlanner(allow_partial_load=is_partial)
            load_files(dense, line[-1].dense, planner, group)
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
        return there[line[0].tables]

    loaded = settle(group, _CALL, load)
    # Anew: the load has taken over initializers.
    kept = [one for one in tables_of(model, _CALL) if f"model.{one.key}.config" in loaded]
    held: Sequence[Mapping[str, int]] = ()
    for delta in line[1:] if kept else ():
        held = apply_changes(kept, delta.tables, is_partial, held)
    return values, is_same and not is_partial  # of what was left out no delta tells


def is_lack_of_memory(error: BaseException) -> bool:
    """Returns True if an error of a load says that a rank has no memory. All ranks decide alike."""
    if isinstance(error, CheckpointException):
        return any(lacks_memory(one) for one, _ in error.failures.values())
    return lacks_memory(error)


def _saved_states(saved: Iterable[str]) -> set[str]:
    """Returns the keys of optimizer state among those saved; each begins with the name of a parameter."""
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
    model: nn.Module,
    optimizer: Any,
    tables: Sequence[Table],
    entry: Entry,
    keys: set[str],
    is_partial: bool,
) -> dict[str, Any]:
    """Returns state dicts with a place for each saved state of the optimizer. Collective.

    torch's optimizers make their state in the first step, and DCP reads only what has a place. So an
    optimizer without state takes a step of zeros, whose results the load replaces.

    Raises:
        MisfitError: on every rank, if saved state has no place on any rank: it is of another optimizer. If
            `is_partial`, this state is left out.
    """

    def state_to_load() -> dict[str, Any]:
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
    if left and not is_partial:
        raise MisfitError(
            f"{entry.path}: expected an optimizer with state for {_STATE}{left[0]}, got one without. Restore "
            f"with the optimizers and parameters that were saved. {PARTIAL}"
        )
    return state
