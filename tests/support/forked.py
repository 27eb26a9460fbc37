"""Runs a function or a script on several ranks, in new processes that start in 0.1 s.

The processes are forked from a server that has imported torch, TorchRec and torchrec_dyn; a new interpreter
would take 2.5 s for these imports. Each process has the environment that torchrun sets (RANK, WORLD_SIZE,
MASTER_PORT, ...). Its output is written to files, so tests read it as a user sees it. As under torchrun, a
rank that fails ends the other ranks. Unlike there, the interpreter is not shut down: what happens at exit is
tested by runs under the real torchrun (tests/repository/test_docs.py, test_example_train.py).
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.process
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_GRACE = 10.0  # seconds for the other ranks to end by themselves after a rank has failed


class Ended(NamedTuple):
    """Exit status by rank (negative: a signal), and the output of all ranks, in the order of the ranks."""

    codes: list[int]
    stdout: str
    stderr: str


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Returns the context of this process's only server.

    The first process starts it; later processes have the imports and the environment of that moment.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            *("torch", "torch.distributed.optim", "torchrec", "torchrec.distributed"),
            *("fsspec", "pytest", "hypothesis"),  # fsspec: DCP imports it at its first save
            *("torchrec_dyn", "torchrec_dyn.planner", "torchrec_dyn.serving"),
        ]
    )
    return context


def keep_imports() -> None:
    """Takes the modules of the server out of this process's garbage collection: 0.2 s for each collection.

    A collection would also write to their memory, which this process shares with the server.
    """
    gc.freeze()


def die_before_commit(sequence: int) -> None:
    """Has this process die at an entry of `Checkpoints`, before its commit file is written."""
    from torchrec_dyn.checkpoint import entry_writing

    commit_entry = entry_writing.commit_entry

    def commit_or_die(entry: Any) -> None:
        if entry.sequence == sequence:
            os.kill(os.getpid(), signal.SIGKILL)
        commit_entry(entry)

    entry_writing.commit_entry = commit_or_die


def run_ranks(
    function: Callable[..., Any], *args: Any, ranks: int = 1, time_limit: float = 120.0
) -> Ended:
    """Calls a function on every rank, in processes like those of torchrun; returns how they ended."""
    import torch.distributed as dist

    # As under torchrun, the store is up before any rank connects to it, so no port is chosen twice.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="torchrec_dyn_ranks_") as folder:
        processes = [
            forkserver().Process(
                target=_run_rank,
                args=(function, args, rank, ranks, store.port, folder, time_limit),
            )
            for rank in range(ranks)
        ]
        files = {
            name: [Path(folder, f"{name}_{rank}") for rank in range(ranks)]
            for name in ("stdout", "stderr")
        }
        for file in [*files["stdout"], *files["stderr"]]:
            file.touch()
        try:
            for process in processes:
                process.start()
            _wait(processes, time_limit)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        shown, errors = (
            "".join(file.read_text(errors="replace") for file in files[name]) for name in files
        )
    return Ended([process.exitcode for process in processes], shown, errors)


def run_script(script: Path | str, *arguments: str, ranks: int = 1, **options: Any) -> Ended:
    """Runs `python script arguments...` on every rank."""
    return run_ranks(_run_script, str(script), arguments, ranks=ranks, **options)


def _wait(processes: list[Any], time_limit: float) -> None:
    """Waits until all processes have ended or the time is up; after a failure only `_GRACE` seconds."""
    deadline = time.monotonic() + time_limit + _GRACE  # a rank ends itself first, with its stack
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
    keep_imports()
    threading.Thread(target=_end_with_parent, daemon=True).start()
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
        TORCHELASTIC_RUN_ID="tests",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(time_limit, exit=True, file=sys.stderr)
    function(*args)


def _end_with_parent() -> None:
    """Ends this process when the process of the tests has ended, killed ones too."""
    parent = multiprocessing.process.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_script(script: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
