"""Real gloo process groups that are kept for the whole pytest session.

A test sends an importable function (defined at the top level of a test module) and its
arguments to a pool. The function runs on every rank at once, with the default process
group initialized, and the results are returned in a list by rank:

    def count_ranks(offset):                   # in the test module, top level
        return dist.get_rank() + offset

    def test_count():
        assert workers.run(count_ranks, 10, world_size=2) == [10, 11]

- `workers.run(function, *args, world_size=W)` starts the pool of that world size at its
  first use and keeps it. `local_size=2` emulates nodes of two ranks (LOCAL_WORLD_SIZE).
- Arguments and results are pickled: send plain data and tensors, not modules with hooks.
- An error on any rank is raised here as `WorkerError`, with the traceback of every failed
  rank. A rank that does not answer for `timeout` seconds counts as failed, with its stack.
  In both cases the pool is killed, and the next run starts a new pool.
- A function that expects an error catches it itself (`pytest.raises` works there). If other
  ranks then wait in a collective, set `group_timeout`: it starts a separate pool for this
  call, whose collectives time out after this number of seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing.connection
import os
import pathlib
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import forked

_GROUP_TIMEOUT = 60.0


class WorkerError(AssertionError):
    """The errors of the ranks, or the stacks of ranks that hung."""


class _Pool:
    def __init__(self, world_size: int, local_size: int, group_timeout: float) -> None:
        context = forked.forkserver()
        self._folder = tempfile.TemporaryDirectory(prefix="torchrec_dyn_workers_")
        self._pipes = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, world_size, local_size, group_timeout, self._folder.name),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args, timeout))
        answers = self._collect(timeout)
        failures = [
            f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok
        ]
        missing = [rank for rank in range(len(self._pipes)) if rank not in answers]
        if failures or missing:
            stacks = [f"rank {rank} hung:\n{self._stack(rank)}" for rank in missing]
            self.kill()
            raise WorkerError("\n".join([f"{function.__name__} failed", *failures, *stacks]))
        return [answers[rank][1] for rank in range(len(self._pipes))]

    def _collect(self, timeout: float) -> dict[int, tuple[bool, Any]]:
        """Returns the answers by rank, after all ranks have answered or the time is up."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout + 5
        while len(answers) < len(self._pipes) and (left := deadline - time.monotonic()) > 0:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            for pipe in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, f"the process died\n{self._stack(rank)}")
                if not answers[rank][0]:
                    # Other ranks may wait for this rank: give them 2 s to fail too.
                    deadline = min(deadline, time.monotonic() + 2)
        return answers

    def _stack(self, rank: int) -> str:
        path = pathlib.Path(self._folder.name, f"stack_{rank}")
        return path.read_text() if path.exists() else "(no stack)"

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for key in [key for key, pool in _pools.items() if pool is self]:
            del _pools[key]
        self._folder.cleanup()


_pools: dict[tuple[int, int], _Pool] = {}


def run(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    local_size: int | None = None,
    timeout: float = 60.0,
    group_timeout: float | None = None,
) -> list[Any]:
    """Runs a function on every rank."""
    local_size = local_size or world_size
    if group_timeout is not None:
        pool = _Pool(world_size, local_size, group_timeout)
        try:
            return pool.run(function, args, timeout)
        finally:
            pool.kill()
    key = (world_size, local_size)
    if key not in _pools:
        _pools[key] = _Pool(world_size, local_size, _GROUP_TIMEOUT)
    return _pools[key].run(function, args, timeout)


@atexit.register
def _kill_all() -> None:
    for pool in list(_pools.values()):
        pool.kill()


def _serve(
    pipe: multiprocessing.connection.Connection,
    rank: int,
    world_size: int,
    local_size: int,
    group_timeout: float,
    folder: str,
) -> None:
    """Joins the process group and answers calls until the test session ends."""
    forked.keep_imports()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % local_size),
        LOCAL_WORLD_SIZE=str(local_size),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    import logging

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    for chatty in ("torchrec", "torch.fx"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout),
    )
    with (
        open(os.path.join(folder, f"stack_{rank}"), "w") as stack,
        contextlib.suppress(EOFError, KeyboardInterrupt),
    ):
        faulthandler.enable(stack)
        while True:
            function, args, timeout = pipe.recv()
            faulthandler.dump_traceback_later(timeout, file=stack)
            try:
                answer = (True, function(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            faulthandler.cancel_dump_traceback_later()
            try:
                pipe.send(answer)
            except Exception:
                pipe.send((False, f"cannot send the result\n{traceback.format_exc()}"))
