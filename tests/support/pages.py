"""Runs the code of a Markdown page in processes of its own, as a reader would who saved it as a file.

All python blocks of a page are one program. A page that calls `init_process_group` runs in two processes with
the environment of `torchrun --nproc-per-node 2`, any other page in one. The processes are forked from a server
that has imported torch, TorchRec and torchrec_dyn (workers.py), so a page pays for its own work only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing.connection
import os
import re
import sys
import tempfile
import time
import traceback
import types
import warnings
from pathlib import Path

import torch.distributed as dist
import workers

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TIME_LIMIT = 120.0  # seconds; a page takes 1 to 5
LOST = 3.0  # seconds that other processes get to fail, too, once one has


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Returns (lines before it, code) of every python block."""
    return [
        (text.count("\n", 0, match.start(2)), match[2])
        for match in BLOCK.finditer(text)
        if match[1] == "python"
    ]


def run(page: Path, time_limit: float = TIME_LIMIT) -> None:
    """Runs the code of a page.

    Raises:
        AssertionError: with the traceback of every process that failed or hung; lines are those of the page.
    """
    ranks = 2 if "init_process_group" in page.read_text() else 1
    # As torchrun does: the store is here, and its port is open before a process asks for it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = workers.forkserver()
    with tempfile.TemporaryDirectory(prefix="torchrec_dyn_page_") as folder:
        processes, pipes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=(theirs, page, rank, ranks, store.port, folder, time_limit),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            answers = _collect(pipes, time_limit)
        finally:
            for process in processes:
                process.join(1.0)
                process.kill()
                process.join()
        failures = []
        for rank in range(ranks):
            stack = Path(folder, f"stack_{rank}")
            hung = stack.read_text() if stack.exists() else ""
            text = answers.get(rank, f"no answer after {time_limit:.0f} s\n{hung}")
            if text:
                failures.append(f"process {rank} of {page.name}:\n{text}")
        assert not failures, "\n".join(failures)


def _collect(
    pipes: list[multiprocessing.connection.Connection], time_limit: float
) -> dict[int, str]:
    """Returns the error of each rank that answers in time, "" without one."""
    answers: dict[int, str] = {}
    deadline = time.monotonic() + time_limit + 1
    while len(answers) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        for pipe in multiprocessing.connection.wait(list(waiting), left):
            rank = waiting[pipe]  # type: ignore[index]
            try:
                answers[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                answers[rank] = "the process died"
            if answers[rank]:
                deadline = min(deadline, time.monotonic() + LOST)
    return answers


def _run_rank(
    pipe: multiprocessing.connection.Connection,
    page: Path,
    rank: int,
    ranks: int,
    port: int,
    folder: str,
    time_limit: float,
) -> None:
    """Runs all blocks in one namespace, as the module `__main__`, in a folder that is removed later."""
    import torch

    torch.set_num_threads(1)
    if ranks > 1:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
            GLOO_SOCKET_IFNAME="lo",
        )
    os.chdir(folder)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    warnings.filterwarnings("error", category=UserWarning, module="torchrec_dyn")
    with open(f"stack_{rank}", "w") as stack:
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(time_limit, file=stack)
        error = ""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                for line, code in python_blocks(page.read_text()):
                    # Empty lines before the code: a traceback names the line of the page.
                    exec(compile("\n" * line + code, str(page), "exec"), main.__dict__)
                assert not dist.is_initialized(), "expected destroy_process_group() at the end"
                main.__dict__.clear()
                gc.collect()
        except BaseException:
            error = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(error)
