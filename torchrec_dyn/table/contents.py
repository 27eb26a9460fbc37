"""The saved form of a table: its contents in canonical order, whatever their history.

Legend: R rows, D columns of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchrec_dyn.life import BY_ROW, RowLife, last_step
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.storage import ChangeLog, IdMap, RowNumbers, RowStore
from torchrec_dyn.table.changes import note_replaced


class NamedState(NamedTuple):
    """One optimizer state of a table.

    Attributes:
        name: FBGEMM's name of it.
        store: its rows.
        is_rowwise: whether a row has one number of it.
    """

    name: str
    store: RowStore
    is_rowwise: bool


class SavedTable(Protocol):
    """What the saved form is read from and written to (table/table.py)."""

    step: int
    generation: int
    edits: int
    row_limit: int
    changes: ChangeLog | None
    optimizer: RowOptimizer
    id_map: IdMap
    row_numbers: RowNumbers
    weights: RowStore
    states: tuple[RowStore, ...]
    life: RowLife | None

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        ...

    def reserve(self, additional: int) -> None:
        """Makes room for `additional` more ids and rows."""

    def reset(self, dtype: torch.dtype, device: torch.device) -> None:
        """Makes an empty table of it, out of new objects."""


def named_states(table: SavedTable) -> list[NamedState]:
    """Names the stores of a table's optimizer states."""
    optimizer = table.optimizer
    named = zip(optimizer.state_names, table.states, optimizer.state_is_rowwise, strict=True)
    return [NamedState(*one) for one in named]


def stamp_of(table: SavedTable) -> tuple[int, ...]:
    """Returns numbers that change when ids or rows come, go or are written."""
    return (table.generation, table.edits, table.step, table.id_map.num_ids)


def read_tensor(table: SavedTable, name: str, rows: Tensor) -> Tensor:
    """Reads one tensor of the saved form at some rows.

    Args:
        table: any.
        name: "weight", "last_seen", "count" or that of an optimizer state.
        rows: [M] int64.

    Returns:
        [M, columns], or [M] of scores.
    """
    if name == "weight":
        return table.weights.read(rows)
    if table.life is not None and name in ("last_seen", "count"):
        return table.life.scores.read(rows)[0 if name == "last_seen" else 1]
    (store,) = (one.store for one in named_states(table) if one.name == name)
    return store.read(rows)


def read_state(table: SavedTable) -> dict[str, Tensor]:
    """Copies the contents out in canonical order.

    Returns:
        "ids" [R] int64, "weight" [R, D], each optimizer state, [R, D] or [R], float32, "step" [],
        and of a table with a life what `RowLife.export` gives.
    """
    ids, rows = table.id_map.contents()
    state = {"ids": ids, "weight": table.weights.read(rows)}
    for one in named_states(table):
        values = one.store.read(rows)
        state[one.name] = values.flatten() if one.is_rowwise else values
    state["step"] = torch.tensor(table.step)
    return state if table.life is None else {**state, **table.life.export(rows)}


def state_for_copy(table: SavedTable) -> dict[str, Tensor]:
    """Copies the contents out for a table that goes on as this one would.

    Scores that only stand in for missing ones are left out, so that they are missing there too.
    """
    state = read_state(table)
    if table.life is not None and table.life.is_unscored:
        return {name: one for name, one in state.items() if name not in BY_ROW}
    return state


def write_state(table: SavedTable, state: Mapping[str, Tensor]) -> None:
    """Fills an empty table; what is missing starts afresh.

    Args:
        table: without rows.
        state: as `read_state` gives it, in any order of ids.
    """
    ids = state["ids"].contiguous()
    table.step = max(int(state["step"]) if "step" in state else 0, last_step(state))
    table.reserve(ids.numel())
    rows = table.row_numbers.take(ids.numel())
    table.id_map.insert(ids, rows)
    table.weights.write(rows, state["weight"])
    for one in named_states(table):
        if one.name in state:
            one.store.write(rows, state[one.name].reshape(ids.numel(), one.store.columns))
        else:
            one.store.zero(rows)
    if table.life is not None:
        table.life.load(state, rows, table.step)


def without_optimizer(state: Mapping[str, Tensor], optimizer: RowOptimizer) -> dict[str, Tensor]:
    """Returns what of a saved form is good for another kind of optimizer.

    Its steps would start anew, but scores refer to them: where there are scores they go on.

    Args:
        state: as `read_state` gives it.
        optimizer: of the saved table.
    """
    left_out = {*optimizer.state_names, *(() if "last_seen" in state else ("step",))}
    return {name: saved for name, saved in state.items() if name not in left_out}


def replace_contents(
    table: SavedTable, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Puts a saved form in place of a table's contents; if that fails the table is as it was.

    Args:
        table: any.
        state: as `read_state` gives it, checked.
        dtype: of the rows from now on.
        device: of the rows from now on.
    """
    before = dict(table.__dict__)  # what follows makes new objects and changes none of these
    try:
        table.reset(dtype, device)
        write_state(table, state)
        note_replaced(table, before["id_map"])
    except BaseException:  # out of memory, mostly
        table.__dict__.update(before)
        raise
