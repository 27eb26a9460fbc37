"""The commit of a change: Ctrl-C waits for its end, and any other exception in it tears its tables.

Ctrl-C raises KeyboardInterrupt between any two calls; a signal handler may raise any exception there. So a
change is prepared first, which changes nothing that a later call reads and takes all memory, and is then
committed. Python raises nothing inside an op.

A training step removes expired ids before it finds its own; until its commit an exception brings them back
(`change`). The rules: docs/failures.md.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enums: 100 microseconds a commit
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any


class commit:
    """Runs the commit of a change of tables, with their locks: it allocates no tensor.

    In the main thread signals wait for the end of the outermost commit. After an exception in it the tables
    are torn: their calls raise `torn_error` until they are loaded, a commit that `replaces` all contents.
    """

    def __init__(self, *tables: Any, replaces: bool = False) -> None:
        self._tables, self._replaces = tables, replaces
        self._signals: _Signals | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread() and not _Signals.are_noted:
            self._signals = _Signals()
            self._signals.note()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for table in self._tables if kind is not None or self._replaces else ():
                if kind is None:
                    table.lock.torn -= {table.name}
                else:
                    table.lock.torn |= {table.name}
        finally:
            if self._signals is not None:
                self._signals.deliver()


class change(commit):
    """Runs a change of tables that writes before its commit; signals wait for its end.

    Until `commit` is called an exception undoes what was written; if that fails, too, the tables are torn.
    """

    def __init__(self, *tables: Any) -> None:
        super().__init__(*tables)
        self._undo: list[Callable[[], object]] | None = []

    def __enter__(self) -> change:  # type: ignore[override]
        super().__enter__()
        return self

    def on_error(self, undo: Callable[[], object]) -> None:
        """Has what is written next undone by a call, if an exception comes before the commit."""
        assert self._undo is not None
        self._undo.append(undo)

    def commit(self) -> None:
        """Begins the commit."""
        self._undo = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        undone = kind is not None and self._undo is not None
        try:
            while undone and self._undo:
                self._undo.pop()()
        except BaseException:
            undone = False
            raise
        finally:
            super().__exit__(None if undone else kind, error, trace)


class _Signals:
    """Python's signal handlers, replaced by one that notes the signals until `deliver`."""

    are_noted = False

    def __init__(self) -> None:
        self._numbers: list[int] = []
        # Not the system's handlers, nor those that were set outside of Python.
        self._handlers: dict[int, Any] = {
            number: handler
            for number in range(1, signal.NSIG)
            if callable(handler := _signal.getsignal(number))
        }

    def note(self) -> None:
        """Replaces the handlers; if one of them raises here, all are as before."""
        try:
            _Signals.are_noted = True
            self._set(lambda _: self._add)
        except BaseException:
            self.deliver()
            raise

    def deliver(self) -> None:
        """Puts the handlers back and runs those of the signals that came, each once."""
        try:
            self._set(self._handlers.__getitem__)
        except BaseException:
            self._set(self._handlers.__getitem__)  # a handler that was back has raised
            raise
        finally:
            _Signals.are_noted = False
            self._raise_noted()

    def _raise_noted(self) -> None:
        try:
            if self._numbers:
                signal.raise_signal(self._numbers.pop(0))
        finally:
            if self._numbers:
                self._raise_noted()

    def _add(self, number: int, _: object) -> None:
        if number not in self._numbers:
            self._numbers.append(number)

    def _set(self, handler_of: Callable[[int], Any]) -> None:
        for number in self._handlers:
            _signal.signal(number, handler_of(number))


def torn_error(tables: str) -> RuntimeError:
    """Returns the error of all calls on torn tables but loads and copies."""
    return RuntimeError(
        f"torchrec_dyn: expected whole tables, got {tables} torn by an exception within a change. Load a "
        "checkpoint."
    )
