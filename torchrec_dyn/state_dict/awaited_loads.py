"""Loads that were read and not taken: `dcp.load` has run, `load_state_dict` has not.

Rows that `dcp.load` reads lie beside the tables, or in the tensors of a state dict. A forward before
`load_state_dict` would read and train tables without them, so it is an error on every rank.

What is awaited is noted with the lock of a collection: every rank has it, with or without rows of a table,
and it stays the same when tables move. Of a sharded table a load is noted once all ranks have planned it,
before any rank reads rows; so it is awaited on all ranks, even if a rank then cannot read its rows, or on
none.

Legend: R and K rows, D columns.
"""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchrec_dyn.name_lists import listed
from torchrec_dyn.state_dict.load_session import TableEntry
from torchrec_dyn.storage import TableLock

_Entries = dict[str, weakref.ref[TableEntry] | None]

# By the lock of a collection: the tables whose rows are awaited, with the entries of sharded tables.
_awaited: weakref.WeakKeyDictionary[TableLock, _Entries] = weakref.WeakKeyDictionary()
# By the tensor "weight" of a state dict of an unsharded table: the lock of its collection, and its name.
_saved: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def note_saved(weight: Tensor, lock: TableLock, name: str) -> None:
    """Notes that a tensor of a state dict stands for an unsharded table: a load may be read into it.

    weight: [R, D], the tensor.
    """
    _saved[weight] = weakref.ref(lock), name


def note_resized(weight: Tensor, resized: Tensor) -> None:
    """Notes that a load is read into another tensor.

    weight: [R, D] as saved; resized: [K, D], the tensor in its place.
    """
    if weight in _saved:
        _saved[resized] = _saved[weight]


def note_read_plain(weight: Tensor) -> None:
    """Notes that a load was read into a tensor, if it stands for an unsharded table.

    weight: [R, D], the tensor.
    """
    reference, name = _saved.get(weight, (None, ""))
    lock = None if reference is None else reference()
    if lock is not None:
        _awaited.setdefault(lock, {})[name] = None


def note_begun(entry: TableEntry) -> None:
    """Notes that the rows of a sharded table are read next, on all ranks."""
    table = entry.table
    _awaited.setdefault(table.lock, {})[table.name] = weakref.ref(entry)


def note_taken_plain(weight: Tensor) -> None:
    """Notes that some table was loaded from a tensor, perhaps not that for which the tensor stands.

    weight: [R, D], the tensor.
    """
    reference, name = _saved.get(weight, (None, ""))
    lock = None if reference is None else reference()
    if lock is not None:
        note_taken(lock, name)


def note_taken(lock: TableLock, name: str) -> None:
    """Notes that a table was loaded."""
    names = _awaited.get(lock)
    if names is not None:
        names.pop(name, None)
        if not names:
            _awaited.pop(lock, None)


def check_taken(lock: TableLock, where: str) -> None:
    """Checks that no load of a collection is awaited; before a forward, with the lock of the collection.

    Raises:
        ValueError: if one is.
    """
    if not _awaited:
        return
    if names := _awaited.get(lock):
        raise ValueError(
            f"{where}: expected load_state_dict after dcp.load with LoadPlanner, got a forward while the "
            f"rows that were read for tables {listed(sorted(names))} are not in these. Call "
            "load_state_dict of the model with the loaded state dict, or drop these rows with "
            "torchrec_dyn.checkpoint.drop_load(model)."
        )


def drop_awaited(lock: TableLock) -> list[str]:
    """Drops the rows of awaited loads of a collection; returns the names of their tables."""
    names = _awaited.pop(lock, {})
    for reference in names.values():
        entry = None if reference is None else reference()
        if entry is not None and entry.session is not None:
            entry.session.drop(lock)
    return sorted(names)
