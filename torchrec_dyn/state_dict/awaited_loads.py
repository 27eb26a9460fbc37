"""Loads that were read and not taken: `dcp.load` has run, `load_state_dict` has not.

Rows that `dcp.load` reads lie beside the sharded tables. A forward before `load_state_dict` would read and
train tables without them, so it is an error on every rank.

What is awaited is noted with the lock of a collection: every rank has it, with or without rows of a table,
and it stays the same when tables move. A load is noted once all ranks have planned it, before any rank reads
rows; so it is awaited on all ranks, even if a rank then cannot read its rows, or on none.
"""

from __future__ import annotations

import weakref

from torchrec_dyn.name_lists import listed
from torchrec_dyn.state_dict.loading import TableLoad
from torchrec_dyn.storage import TableLock

# By the lock of a collection: the loads that are awaited, by table.
_awaited: weakref.WeakKeyDictionary[TableLock, dict[str, weakref.ref[TableLoad]]]
_awaited = weakref.WeakKeyDictionary()


def note_begun(load: TableLoad) -> None:
    """Notes that the rows of a table are read next, on all ranks."""
    _awaited.setdefault(load.lock, {})[load.table.name] = weakref.ref(load)


def note_taken(lock: TableLock, name: str) -> None:
    """Notes that a table was loaded."""
    names = _awaited.get(lock)
    if names is not None:
        names.pop(name, None)
        if not names:
            _awaited.pop(lock, None)


def check_taken(lock: TableLock, where: str) -> None:
    """Raises ValueError if a load of a collection is awaited; before a forward, with its lock."""
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
        load = reference()
        if load is not None and load.session is not None:
            load.session.drop(lock)
    return sorted(names)
