"""The training job of the soak: it restores, trains and saves until a file asks it to stop."""

from __future__ import annotations

import gc
import logging
import multiprocessing.process
import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import forkserver
from soak_model import Stream, event_time, sharded
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_dyn.checkpoint import Checkpoints, Positions

KEEP, FULL_EVERY = 2, 6


@dataclass(frozen=True)
class Job:
    """The arguments of one start of the training job.

    Attributes:
        folder: where the ranks write what they say, and the file of the process group is.
        path: of the Checkpoints.
        stop: a file that asks the job to save once more and to end.
        every: batches from save to save.
        in_background: saves are written while training goes on.
        rate: most batches a second.
    """

    ranks: int
    folder: Path
    path: Path
    stop: Path
    seed: int
    plan: int
    every: int
    in_background: bool
    rate: float


def _train(job: Job) -> None:
    model, optimizer = sharded(job.plan)
    kept = Checkpoints(job.path, keep=KEEP, full_every=FULL_EVERY)
    positions = Positions(Stream(job.seed, dist.get_rank(), job.ranks), is_global=True)
    extra = {"position": positions}
    restored = kept.restore(model, optimizer, extra=extra)
    assert positions.batches == (0 if restored is None else restored.step)
    pipeline = TrainPipelineSparseDist(
        model, optimizer, torch.device("cpu"), execute_all_batches=True
    )
    batches, must_stop = iter(positions), False
    while not must_stop:
        model.module.sparse.set_time(event_time(positions.batches))
        pipeline.progress(batches)
        positions.step()
        time.sleep(1 / job.rate)
        if positions.batches % job.every == 0:
            asked = [job.stop.exists()]
            dist.broadcast_object_list(asked)
            must_stop = asked[0]
            save: Any = kept.async_save if job.in_background and not must_stop else kept.save
            save(model, optimizer, step=positions.batches, extra=extra)
    kept.close()
    if dist.get_rank() == 0:
        job.stop.write_text(str(positions.batches))


def _run(job: Job, rank: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = os.open(job.folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(job.ranks)}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.ranks), GLOO_SOCKET_IFNAME="lo", **local)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/store",
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=60),
    )
    _train(job)
    gc.collect()
    dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = multiprocessing.process.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Trainers:
    """One start of the training job, as the process that judges sees it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        job.folder.mkdir()
        self.processes: list[Any] = [
            forkserver().Process(target=_run, args=(job, rank), daemon=True)
            for rank in range(job.ranks)
        ]
        for process in self.processes:
            process.start()

    @property
    def codes(self) -> list[int | None]:
        """Exit status by rank, None of a process that runs."""
        return [process.exitcode for process in self.processes]

    def kill(self, ranks: list[int]) -> None:
        """Kills ranks, as the system does where memory ends."""
        for rank in ranks:
            self.processes[rank].kill()

    def logs(self) -> str:
        """Returns the last words of each rank."""
        texts = [path.read_text(errors="replace") for path in sorted(self.job.folder.glob("log-*"))]
        return "\n".join(text[-4000:] for text in texts)
