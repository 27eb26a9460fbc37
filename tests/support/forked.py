"""Runs a function or a script on several ranks, in processes of their own that start in 0.1 s.

The processes are forked from a server that has imported torch, TorchRec and torchrec_dyn; a fresh interpreter
would spend 2.5 s on these. Each has the environment that torchrun gives (RANK, WORLD_SIZE, MASTER_PORT, ...)
and its output goes to files, so what it prints is read as a user would see it. As under torchrun a rank that
fails ends the others.
"""

from __future__ import annotations

import faulthandler
import multiprocessing.connection
import multiprocessing.context
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_GRACE = 3.0  # seconds that the other ranks have to end by themselves once one has failed


class Ended(NamedTuple):
    """Exit status by rank (negative: a signal), and what all ranks wrote, one after the other."""

    codes: list[int]
    stdout: str
    stderr: str


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Returns the context of the one server of this process. Whoever starts it first chooses its imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torchrec", "torchrec.distributed", "torchrec_dyn", "pytest", "hypothesis"]
    )
    return context


def run_ranks(
    function: Callable[..., Any], *args: Any, ranks: int = 1, time_limit: float = 120.0
) -> Ended:
    """Calls a function on every rank, as torchrun would start a program.

    Args:
        function: importable by name. An exception ends its rank with status 1 and a traceback.
        *args: pickled.
        ranks: number of processes.
        time_limit: seconds; a rank that runs longer is killed, and stderr has the stack it was in.
    """
    import torch.distributed as dist

    # torchrun's store, too, is up before a rank asks for it: no port is chosen twice.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="torchrec_dyn_ranks_") as folder:
        processes = [
            forkserver().Process(
                target=_run_rank,
                args=(function, args, rank, ranks, store.port, folder, time_limit),
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        _wait(processes, time_limit)
        for process in processes:
            process.kill()
            process.join()
        shown, errors = (
            "".join(Path(folder, f"{name}_{rank}").read_text() for rank in range(ranks))
            for name in ("stdout", "stderr")
        )
    return Ended([process.exitcode for process in processes], shown, errors)


def run_script(script: Path | str, *arguments: str, ranks: int = 1, **options: Any) -> Ended:
    """Runs `python script arguments...` on every rank."""
    return run_ranks(_run_script, str(script), arguments, ranks=ranks, **options)


def _wait(processes: list[Any], time_limit: float) -> None:
    """Waits until all have ended, or until time is up: sooner where one has failed."""
    deadline = time.monotonic() + time_limit + 1.0
    running = {process.sentinel: process for process in processes}
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in multiprocessing.connection.wait(list(running), left):
            if running.pop(sentinel).exitcode:  # type: ignore[arg-type]
                deadline = min(deadline, time.monotonic() + _GRACE)


def _run_rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    ranks: int,
    port: int,
    folder: str,
    time_limit: float,
) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{name}_{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(time_limit, exit=True, file=sys.stderr)
    function(*args)


def _run_script(script: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
