"""Runs the changes of a table to their end, whatever interrupts them.

Ctrl-C raises KeyboardInterrupt between any two calls; a signal handler may raise any exception there. So a
change of several parts is prepared first, which changes nothing that a later call reads, and is then run to
its end. Python raises nothing inside an op.
"""

from __future__ import annotations

from collections.abc import Callable

# More than the calls inside each other that a change makes, behind its preparation, or what undoes it. A test
# lets the stack end at every depth.
_CALLS_OF_A_CHANGE = 64


def run_to_end(*actions: Callable[[bool], object]) -> None:
    """Runs actions in order. An exception in between is raised after all of them have run.

    The argument of an action is `again`: True if it may have run already, up to any of its parts. Running
    twice in a row must have the same effect as running once.
    """
    coming = iter(actions)
    action: Callable[[bool], object] = _no_action
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


def _no_action(again: bool) -> None:
    """The action before the first action."""
