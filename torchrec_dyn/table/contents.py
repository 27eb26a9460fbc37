"""The saved form of a table: its contents in canonical order, independent of their history.

Legend: R rows, D columns of the table.
"""

from __future__ import annotations

import io
import multiprocessing.context
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.life import BY_ROW, LIFE
from torchrec_dyn.storage import RowStore, locked
from torchrec_dyn.table.arrays import TableArrays


class NamedState(NamedTuple):
    """One optimizer state of a table."""

    name: str  # FBGEMM's
    store: RowStore  # of its numbers, by row
    is_rowwise: bool  # True if it has one number per row
    initial: float  # the number that a new row has in each column


def named_states(table: TableArrays) -> list[NamedState]:
    """Returns the optimizer states of a table with their names."""
    optimizer = table.optimizer
    named = zip(
        optimizer.state_names,
        table.states,
        optimizer.state_is_rowwise,
        optimizer.initial_states,
        strict=True,
    )
    return [NamedState(*fields) for fields in named]


def state_shapes(table: TableArrays) -> dict[str, tuple[int, ...]]:
    """Returns the shape of one row of each optimizer state of a table."""
    named = named_states(table)
    return {one.name: () if one.is_rowwise else (one.store.columns,) for one in named}


def stamp_of(table: TableArrays) -> tuple[int, ...]:
    """Returns numbers that change when ids are added or removed and when rows are written."""
    return (table.generation, table.edits, table.step, table.id_map.num_ids)


def read_tensor(table: TableArrays, name: str, rows: Tensor, are_ascending: bool = False) -> Tensor:
    """Returns rows of one tensor of the saved form: [M, columns], or [M] for scores.

    `name` is "weight", "last_seen", "count" or the name of an optimizer state; rows [M] int64. If the rows
    are distinct and ascend, the result may be a view.
    """
    read = RowStore.read_ascending if are_ascending else RowStore.read
    if name == "weight":
        return read(table.weights, rows)
    if table.life is not None and name in ("last_seen", "count"):
        return table.life.scores.read(rows)[0 if name == "last_seen" else 1]
    (store,) = (state.store for state in named_states(table) if state.name == name)
    return read(store, rows)


def read_state(table: TableArrays) -> dict[str, Tensor]:
    """Returns a copy of the contents in canonical order, on the device of the table or of its rows.

    "ids" [R] int64, "weight" [R, D], each optimizer state [R, D] or [R] float32, "step" [], and the tensors
    of `RowLife.export` for a table with a life.
    """
    ids, rows = table.id_map.contents()
    state = {"ids": ids, "weight": _whole(table.weights, rows)}
    for named in named_states(table):
        values = _whole(named.store, rows)
        state[named.name] = values.flatten() if named.is_rowwise else values
    state["step"] = torch.tensor(table.step, device="cpu")
    return state if table.life is None else state | table.life.export(rows)


def _whole(store: RowStore, rows: Tensor) -> Tensor:
    """Returns rows [R] int64, [R, columns]: on the host, in pieces, if a GPU may have no memory for all."""
    if not store.on_host:
        return store.read(rows)
    whole = torch.empty(len(rows), store.columns, dtype=store.dtype, device="cpu")
    most = max(1, knobs.CROSSING_BYTES // store.row_bytes)
    for some, own in zip(rows.split(most), whole.split(most), strict=True):
        own.copy_(store.read(some))
    return whole


@locked
def state_for_copy(table: TableArrays) -> dict[str, Tensor]:
    """Returns `read_state`; if the rows were loaded without scores, without their scores.

    So the copy treats these scores as missing, as this table does.
    """
    return _loaded_parts(table, read_state(table))


def _loaded_parts(table: TableArrays, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a table's state without the scores, if its rows were loaded without them."""
    if table.life is None or not table.life.is_unscored:
        return state
    return {name: tensor for name, tensor in state.items() if name not in BY_ROW}


def given_rows(state: Mapping[str, Tensor], row_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yields the rows of a saved form in chunks, by tensor; scores are not among them."""
    names = [name for name in state if name not in ("step", *LIFE)]
    most = max(1, knobs.CROSSING_BYTES // row_bytes)
    for start in range(0, len(state["ids"]), most):
        yield {name: state[name][start : start + most] for name in names}


def stored_rows(table: TableArrays, with_optimizer: bool) -> Iterator[dict[str, Tensor]]:
    """Yields the rows of a table in canonical order, as `given_rows`; they are read when asked for."""
    stores = {"weight": table.weights}
    if with_optimizer:
        stores |= {named.name: named.store for named in named_states(table)}
    most = max(1, knobs.CROSSING_BYTES // sum(store.row_bytes for store in stores.values()))
    ids, rows = table.id_map.contents()
    for some_ids, some in zip(ids.split(most), rows.split(most), strict=True):
        yield {"ids": some_ids, **{name: store.read(some) for name, store in stores.items()}}


def stored_life(table: TableArrays) -> dict[str, Tensor]:
    """Returns the life of a table as `state_for_copy` has it."""
    if table.life is None:
        return {}
    return _loaded_parts(table, table.life.export(table.id_map.contents()[1]))


def is_spawning() -> bool:
    """Returns True while this thread pickles what a new process gets, by spawn or forkserver.

    torch gives a new process the memory of pickled tensors, by file descriptors or by files: it must still
    exist when the process starts. A table is pickled as a copy of its contents, which is gone by then. So
    this copy is sent as bytes.
    """
    return multiprocessing.context.get_spawning_popen() is not None


def to_saved_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Returns tensors as bytes; state: the tensors by name."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def from_saved_bytes(saved: bytes) -> dict[str, Tensor]:
    """Returns the tensors of `to_saved_bytes`, on their devices."""
    state: dict[str, Tensor] = torch.load(io.BytesIO(saved), weights_only=True)
    return state
