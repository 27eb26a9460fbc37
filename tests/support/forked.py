"""Runs functions in fresh processes, each within a time limit.

The processes are forked from a server that has imported torch, TorchRec and torchrec_dyn (workers.py). They
start at once and share no state with the session or with one another.
"""

from __future__ import annotations

import faulthandler
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import workers

LOST = 3.0  # seconds that other processes get to fail, too, once one has


def run(
    function: Callable[..., None], arguments: Sequence[tuple[Any, ...]], time_limit: float
) -> None:
    """Calls a function in one process for each tuple of arguments, at the same time.

    Args:
        function: importable by name. It runs in a folder that all processes share and that is removed later.
        arguments: pickled.
        time_limit: seconds until processes that have not ended are killed.

    Raises:
        AssertionError: with the traceback of every process that failed, and the stack of every one that hung.
    """
    context = workers.forkserver()
    with tempfile.TemporaryDirectory(prefix="torchrec_dyn_forked_") as folder:
        processes, pipes = [], []
        for number, args in enumerate(arguments):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_call, args=(theirs, number, folder, time_limit, function, args), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            errors = _collect(pipes, time_limit)
        finally:
            for process in processes:
                process.join(1.0)
                process.kill()
                process.join()
        failures = [
            f"process {number}:\n{errors[number] or _stack(folder, number)}"
            for number in range(len(pipes))
            if errors[number] != ""
        ]
        assert not failures, "\n".join(failures)


def _collect(
    pipes: Sequence[multiprocessing.connection.Connection], time_limit: float
) -> list[str | None]:
    """Returns the error of each process, "" without one, None of a process that did not end in time."""
    errors: list[str | None] = [None] * len(pipes)
    deadline = time.monotonic() + time_limit + 1
    while None in errors and (left := deadline - time.monotonic()) > 0:
        waiting = {pipe: number for number, pipe in enumerate(pipes) if errors[number] is None}
        for pipe in multiprocessing.connection.wait(list(waiting), left):
            number = waiting[pipe]  # type: ignore[index]
            try:
                errors[number] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                errors[number] = "the process died"
            if errors[number]:
                deadline = min(deadline, time.monotonic() + LOST)
    return errors


def _stack(folder: str, number: int) -> str:
    path = Path(folder, f"stack_{number}")
    return f"did not end\n{path.read_text() if path.exists() else '(no stack)'}"


def _call(
    pipe: multiprocessing.connection.Connection,
    number: int,
    folder: str,
    time_limit: float,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    os.chdir(folder)
    with open(f"stack_{number}", "w") as stack:
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(time_limit, file=stack)
        error = ""
        try:
            function(*args)
        except BaseException:
            error = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(error)
