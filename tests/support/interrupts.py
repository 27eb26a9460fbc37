"""A signal at one chosen place of the package: Ctrl-C, or one with a handler.

A place is a line that is about to run, or a function that is about to return: then the work of a call is
done and its result is lost. Clean-up is left out: bodies of `except` and `finally`, `__exit__`, and the end
of a `with`, where Python itself offers no protection. (From Python 3.12 on, the end of a `with` after a
comprehension in its last line is not recognised: a lock stays held.)
"""

from __future__ import annotations

import ast
import dis
import functools
import gc
import pathlib
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torchrec_dyn

_PACKAGE = str(pathlib.Path(torchrec_dyn.__file__).parent)


def interrupted(call: Callable[[], Any], at: int, handler: Callable[[], Any] | None = None) -> bool:
    """Runs a call and raises SIGINT, or a signal with the handler, at its place number `at`, from 1 on."""
    seen, number = 0, signal.SIGINT if handler is None else signal.SIGUSR1
    former = {
        signal.SIGUSR1: signal.signal(
            signal.SIGUSR1, lambda *_: None if handler is None else handler()
        ),
        # A job in the background ignores it.
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }

    def places(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if event in ("line", "return") and not _is_clean_up(frame):
            seen += 1
            if seen == at:
                signal.raise_signal(number)  # an exception also ends tracing
        return places

    def calls(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_code.co_name == "__exit__":
            return None
        caller = frame.f_back
        while caller is not None:
            if caller.f_code.co_filename.startswith(_PACKAGE) and _is_clean_up(caller):
                return None
            caller = caller.f_back
        return places

    before = sys.gettrace()
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # an interrupt inside a `__del__`
    gc.disable()  # so that the places do not depend on the time of a collection
    sys.settrace(calls)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
        for one, its_handler in former.items():
            signal.signal(one, its_handler)
        gc.enable()
        sys.unraisablehook = hook
    return seen >= at


def _is_clean_up(frame: FrameType) -> bool:
    lines, withs = _clean_up_of(frame.f_code.co_filename)
    if frame.f_lineno in withs:
        return frame.f_lasti > _first_place(frame.f_code, frame.f_lineno)
    return frame.f_lineno in lines or frame.f_code.co_name == "__exit__"


@functools.cache
def _clean_up_of(path: str) -> tuple[frozenset[int], frozenset[int]]:
    """Returns the lines of clean-up in a file, and the first lines of its `with` statements."""
    lines: set[int] = set()
    withs: set[int] = set()
    for node in ast.walk(ast.parse(pathlib.Path(path).read_text())):
        if isinstance(node, ast.Try):
            for body in (*(handler.body for handler in node.handlers), node.finalbody):
                for statement in body:
                    lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
            lines.update(handler.lineno for handler in node.handlers)
        if isinstance(node, ast.With):
            withs.add(node.lineno)
    return frozenset(lines), frozenset(withs)


@functools.cache
def _first_place(code: CodeType, line: int) -> int:
    places = [at for at, number in dis.findlinestarts(code) if number == line]
    return min(places)
