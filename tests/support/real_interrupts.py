"""Exceptions that signals raise at a moment of a call.

`interrupts.py` chooses the place; here the place is where Python finds the signal.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any


class Interrupt(Exception):
    """An exception that a user's handler raises, e.g. at a time limit."""


RAISED = (Interrupt, KeyboardInterrupt, SystemExit)


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


INTERRUPTS: dict[str, Callable[[Callable[[], Any], float], type | None]] = {
    "sigint": by_sigint,
    "sigterm": by_sigterm,
    "handler": by_handler,
}
