"""A program, or a function, in a separate process."""

from __future__ import annotations

import multiprocessing.connection
import multiprocessing.process
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import workers
from forked import forkserver, keep_imports

# fbgemm 1.7 warns at import: its table of the versions of torch ends before its own.
_OF_FBGEMM = r"(?s)WARNING:root:\s+\S+\s+_fbgemm_torch_compat_table.*?\033\[0m\s+"


def without_fbgemm_warning(text: str) -> str:
    """Returns what a program has written without the warning that is fbgemm's own."""
    return re.sub(_OF_FBGEMM, "", text)


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a process that can import what this process can, tests included."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def run_program(
    *arguments: object, time_limit: float = 240.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs `python arguments...` as a user would, outside torchrun, on one thread a process."""
    outside = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=outside | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=time_limit,
        **options,
    )


def start(function: Callable[..., Any], *args: Any) -> multiprocessing.process.BaseProcess:
    """Starts a function, importable by name, in a new process; returns it. Arguments are pickled."""
    process = forkserver().Process(target=function, args=args, daemon=True)
    process.start()
    return process


def call(function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> Any:
    """Calls a function in a new process and returns its result."""
    ours, theirs = forkserver().Pipe()
    process = start(_answer, theirs, function, args)
    theirs.close()
    try:
        answered = ours.poll(timeout)
        ok, answer = ours.recv() if answered else (False, "the process hung")
    except EOFError:
        ok, answer = False, "the process died"
    finally:
        process.kill()
        process.join()
    if not ok:
        raise workers.WorkerError(f"{function.__name__} failed: {answer}")
    return answer


def _answer(
    pipe: multiprocessing.connection.Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    keep_imports()
    torch.set_num_threads(1)
    try:
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
