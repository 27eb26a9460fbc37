"""The commit of a change: Ctrl-C waits for its end, and any other exception in it tears its tables.

Ctrl-C raises KeyboardInterrupt between any two calls; a signal handler may raise any exception there. So a
change is prepared first, which changes nothing that a later call reads and takes all memory, and is then
committed. Python raises nothing inside an op.

Changes outside of training are committed within `commit` (docs/failures.md). A training step still uses
`run_to_end`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

# More than the calls inside each other that a change makes, behind its preparation, or what undoes it. A test
# lets the stack end at every depth.
_CALLS_OF_A_CHANGE = 64


class commit:
    """Runs the commit of a change of tables, outside of training, with their locks: it allocates no tensor.

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
            for table in self._tables:
                if kind is not None:
                    table.lock.torn |= {table.name}
                elif self._replaces:
                    table.lock.torn -= {table.name}
        finally:
            if self._signals is not None:
                self._signals.deliver()


class _Signals:
    """Python's signal handlers, replaced by one that notes the signals until `deliver`."""

    are_noted = False

    def __init__(self) -> None:
        self._numbers: list[int] = []
        # Not the system's handlers, nor those that were set outside of Python.
        self._handlers: dict[int, Any] = {
            number: handler
            for number in signal.valid_signals()
            if callable(handler := signal.getsignal(number))
        }

    def note(self) -> None:
        """Replaces the handlers; if one of them raises here, all are as before."""
        _Signals.are_noted = True
        try:
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
            signal.signal(number, handler_of(number))


def torn_error(tables: str) -> RuntimeError:
    """Returns the error of all calls on torn tables but loads and copies."""
    return RuntimeError(
        f"torchrec_dyn: expected whole tables, got {tables} torn by an exception within a change. Load a "
        "checkpoint."
    )


def run_to_end(*actions: Callable[[bool], object]) -> None:
    """Runs actions in order. An exception in between is raised after all of them have run.

    Their argument `again` is True if the action may have run up to any of its parts: twice is as once.
    """
    coming = iter(actions)
    action: Callable[[bool], object] = bool  # does nothing
    try:
        for action in coming:
            action(False)
    except BaseException:
        # The only place that waits: the exception is raised again below. A second one is not held back.
        action(True)
        for action in coming:
            action(False)
        raise


def check_stack(calls: int = _CALLS_OF_A_CHANGE) -> None:
    """Raises RecursionError unless so many calls can be made inside each other.

    Called before a change: a stack that ends within the change, or within what undoes it, would end both.
    """
    if calls:
        check_stack(calls - 1)
