"""TableLock: lets one thread at a time use the tables of a collection.

A forward, the update of rows in a backward, and each call that reads or edits a table hold the lock of the
collection. No code holds the lock while it waits for another rank or for another thread, or takes a second
lock: so threads cannot wait for each other in a circle (docs/dev/decisions/0026).
"""

from __future__ import annotations

import os
import weakref
from _thread import RLock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torchrec_dyn.storage.host_reads import StreamOrder
from torchrec_dyn.storage.interrupts import torn_error

_P = ParamSpec("_P")
_T = TypeVar("_T")


class TableLock(RLock):  # type: ignore[misc]  # typeshed: final; CPython: a base class
    """A reentrant lock. A copy and an unpickled lock are new; copies of its tables share the new lock.

    Attributes:
        is_changing: True while the thread that holds the lock is within a change of the tables (`changes`).
        torn: names of the tables that an exception within a commit has torn (`commit`).
        passes_torn: True while the thread that holds the lock may use torn tables.
        awaited: the loads of tables whose rows were read, and which no call has taken yet, by table.
    """

    def __init__(self, torn: frozenset[str] = frozenset()) -> None:
        self.is_changing = False
        self.torn = torn
        self.passes_torn = False
        self.awaited: dict[str, weakref.ref[Any]] = {}
        self.streams = StreamOrder()
        _every_lock[id(self)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return TableLock, (self.torn,)

    def check_at_rest(self, also_torn: bool = False) -> None:
        """Raises RuntimeError if a table is torn, or if a signal handler has interrupted a change.

        The lock is reentrant, so it does not keep a handler from tables that are half changed.
        """
        also_torn = also_torn or (self.passes_torn and self._is_owned())  # type: ignore[attr-defined]
        if self.torn and not also_torn:
            raise torn_error(", ".join(map(repr, sorted(self.torn))))
        if not self.is_changing:
            return
        if self._is_owned():  # type: ignore[attr-defined]  # threading.Condition calls it, too
            raise RuntimeError(
                "torchrec_dyn: expected tables between two changes, got a call in the middle of one, as by a "
                "signal handler. Set a flag in the handler, and make the call after the step."
            )
        with self:  # after a change of another thread; or an interrupted change has left the mark
            self.is_changing = False


class _Locked(Protocol):
    @property
    def lock(self) -> TableLock: ...


_Owner = TypeVar("_Owner", bound=_Locked)


def locked(
    method: Callable[Concatenate[_Owner, _P], _T],
) -> Callable[Concatenate[_Owner, _P], _T]:
    """Returns a method that holds `self.lock` while it runs, and uses `self.device`, if any, in its turn."""

    @wraps(method)
    def with_lock(self: _Owner, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self.lock.check_at_rest()
        with self.lock:
            device = getattr(self, "device", None)
            if device is None or device.type == "cpu":
                return method(self, *args, **kwargs)
            with self.lock.streams.turn(device):
                return method(self, *args, **kwargs)

    return with_lock


def changes(
    method: Callable[Concatenate[_Owner, _P], _T],
) -> Callable[Concatenate[_Owner, _P], _T]:
    """Returns a method, called with `self.lock` held, within which a call of the same thread is refused."""

    @wraps(method)
    def marked(self: _Owner, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        lock = self.lock
        try:
            lock.is_changing = True
            return method(self, *args, **kwargs)
        finally:
            lock.is_changing = False

    return marked


@contextmanager
def turn_of(owner: Any, also_torn: bool = False) -> Iterator[None]:
    """Runs code as a method of an object that is `locked`; loads and copies may use torn tables, too."""
    lock: TableLock = owner.lock
    lock.check_at_rest(also_torn)
    with lock, lock.streams.turn(owner.device):
        passes_torn = lock.passes_torn
        try:
            lock.passes_torn = passes_torn or also_torn
            yield
        finally:
            lock.passes_torn = passes_torn


# A child process has only the thread that forked. If another thread held a lock at the fork, the child would
# wait for the lock for ever, and a table would be half changed. So a fork waits until all tables are at rest.
# A thread that forks within a change of its own, in a signal handler, holds its lock already: the child gets
# the mark `is_changing` too, and both processes go on with the change.
_fork_lock = RLock()  # one thread forks at a time
_every_lock: weakref.WeakValueDictionary[int, TableLock] = weakref.WeakValueDictionary()
_held: list[TableLock] = []


def _before_fork() -> None:
    _fork_lock.acquire()
    for reference in _every_lock.valuerefs():  # a list: another thread may make a lock now
        lock = reference()
        if lock is not None:
            lock.acquire()
            _held.append(lock)


def _after_fork() -> None:
    while _held:
        _held.pop().release()
    _fork_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
