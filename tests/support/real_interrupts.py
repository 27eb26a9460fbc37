"""Exceptions that come from outside, at a moment of a call: by signals, and by another thread.

`interrupts.py` chooses the place; here the place is where Python finds the signal.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


class Interrupt(Exception):
    """An exception that a user's handler raises, e.g. at a time limit."""


RAISED = (Interrupt, KeyboardInterrupt, SystemExit, MemoryError, RecursionError)


def at_alarm(call: Callable[[], Any], delay: float, handler: Callable[[], Any]) -> type | None:
    """Runs a call and, after a delay in seconds, a signal handler; returns what the call has raised."""
    former = signal.signal(signal.SIGALRM, lambda *_: handler())
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # an interrupt inside a `__del__`
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except RAISED as error:
        return type(error)
    finally:
        signal.signal(signal.SIGALRM, former)
        sys.unraisablehook = hook
    return None


def by_sigint(call: Callable[[], Any], delay: float) -> type | None:
    """Ctrl-C."""
    return at_alarm(call, delay, lambda: signal.raise_signal(signal.SIGINT))


def by_sigterm(call: Callable[[], Any], delay: float) -> type | None:
    """The end of a job, as a scheduler asks for it; its handler is the usual one, sys.exit."""
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return at_alarm(call, delay, lambda: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, former)


def by_handler(call: Callable[[], Any], delay: float) -> type | None:
    """A user's handler that raises an error."""

    def handler() -> None:
        raise Interrupt

    return at_alarm(call, delay, handler)


def by_thread(call: Callable[[], Any], delay: float, kind: type = Interrupt) -> type | None:
    """An exception that another thread sends to this thread, as notebooks and time limits do."""
    receiver = ctypes.c_ulong(threading.get_ident())

    over = _thread.allocate_lock()
    over.acquire()

    def send() -> None:
        time.sleep(delay)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(receiver, ctypes.py_object(kind))
        over.release()

    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        try:
            _thread.start_new_thread(
                send, ()
            )  # an exception would leave a half-started Thread behind
            call()
        finally:
            over.acquire()
    except RAISED as error:
        return type(error)
    finally:
        sys.unraisablehook = hook
    return None


INTERRUPTS: dict[str, Callable[[Callable[[], Any], float], type | None]] = {
    "sigint": by_sigint,
    "sigterm": by_sigterm,
    "handler": by_handler,
    "thread": by_thread,
    "MemoryError": lambda call, delay: by_thread(call, delay, MemoryError),
    "RecursionError": lambda call, delay: by_thread(call, delay, RecursionError),
}
