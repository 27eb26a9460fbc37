"""The training job of the soak: it restores, trains, saves and replans until it is told to stop.

The process that judges sends commands to rank 0, which hands them to the others after the next save.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from forked import forkserver
from soak_memory import keep_telling_memory
from soak_model import Stream, event_time, plan_of, sharded
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_dyn.checkpoint import Checkpoints, Positions
from torchrec_dyn.checkpoint_format import Entry

KEEP, FULL_EVERY = 2, 6
_GROUP_TIMEOUT = timedelta(seconds=60)
STOP = "stop"  # a command; the others are seeds of plans


@dataclass(frozen=True)
class Job:
    """The arguments of one start of the training job."""

    ranks: int
    path: Path  # of the Checkpoints
    store: Path  # file of the process group, one a start
    log: Path  # what the ranks say, with the rank behind it
    told: Path  # where processes tell their memory
    seed: int
    plan: int  # seed of the first plan
    every: int  # batches from save to save
    in_background: bool  # saves are written while training goes on
    rate: float  # most batches a second


class Event(NamedTuple):
    """A message of rank 0: "restored", "saved", "started", "failed", "replanned" or "ended".

    `began` is the time when it began; of a failure that of the save before, if that was in the background.
    `entry` is what was saved or restored, `text` an error or a report.
    """

    what: str
    step: int
    began: float
    ended: float
    entry: Entry | None = None
    text: str = ""


class _Tap:
    """An iterator of batches that ends when it is closed: so a pipeline is run empty in the middle."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self.is_closed = batches, False

    def __iter__(self) -> _Tap:
        return self

    def __next__(self) -> Any:
        if self.is_closed:
            raise StopIteration
        return next(self._batches)


class _Trainer:
    """The loop of one rank."""

    def __init__(self, job: Job, link: multiprocessing.connection.Connection) -> None:
        self._job, self._link = job, link
        self._rank = dist.get_rank()
        self._model, self._optimizer = sharded(job.plan)
        self._kept = Checkpoints(job.path, keep=KEEP, full_every=FULL_EVERY)
        self._positions = Positions(Stream(job.seed, self._rank, job.ranks), is_global=True)
        self._next_begins = time.monotonic()
        self._began_in_background: float | None = None

    def run(self) -> None:
        began = time.time()
        extra = {"position": self._positions}
        restored = self._kept.restore(self._model, self._optimizer, extra=extra)
        if restored is None:
            self._tell(Event("restored", 0, began, time.time()))
        else:
            assert self._positions.batches == restored.step
            skipped = "; ".join(restored.skipped)
            self._tell(
                Event("restored", restored.step, began, time.time(), restored.entry, skipped)
            )
        batches = iter(self._positions)
        must_stop = is_saved = False
        while not (must_stop and is_saved):
            self._attach(batches)
            commands: list[Any] = []
            while not any(isinstance(one, int) for one in commands):  # until a new plan
                self._train()
                if self._positions.batches % self._job.every == 0:
                    is_saved = self._save(self._job.in_background and not must_stop)
                    commands = self._commands()
                    must_stop = must_stop or STOP in commands
                    if must_stop and is_saved:
                        break
            else:
                self._replan(commands)
                is_saved = False
        self._kept.close()
        self._tell(Event("ended", self._positions.batches, began, time.time()))

    def _attach(self, batches: Iterator[Any]) -> None:
        self._tap = _Tap(batches)
        self._pipeline = TrainPipelineSparseDist(
            self._model, self._optimizer, torch.device("cpu"), execute_all_batches=True
        )

    def _train(self) -> None:
        """Trains one batch; the pipeline reads ahead. Raises StopIteration when a closed tap is empty."""
        self._model.module.sparse.set_time(event_time(self._positions.batches))
        self._pipeline.progress(self._tap)
        self._positions.step()
        if self._rank == 0:  # the others wait for it
            self._next_begins = max(self._next_begins + 1 / self._job.rate, time.monotonic() - 1)
            time.sleep(max(0.0, self._next_begins - time.monotonic()))

    def _save(self, in_background: bool) -> bool:
        """Returns True if an entry is there."""
        step, began = self._positions.batches, time.time()
        before, self._began_in_background = self._began_in_background, None
        save: Any = self._kept.async_save if in_background else self._kept.save
        extra = {"position": self._positions}
        try:
            made = save(self._model, self._optimizer, step=step, extra=extra)
        except OSError as error:  # it trains on, and saves at the next interval
            self._tell(Event("failed", step, before or began, time.time(), text=str(error)))
            return False
        if in_background:
            self._began_in_background = began
            self._tell(Event("started", step, began, time.time()))
            return False
        self._tell(Event("saved", step, began, time.time(), made))
        return True

    def _commands(self) -> list[Any]:
        found: list[Any] = []
        if self._rank == 0:
            while self._link.poll():
                found.append(self._link.recv())
        together = [found]
        dist.broadcast_object_list(together)
        return together[0]

    def _replan(self, commands: list[Any]) -> None:
        began = time.time()
        self._tap.is_closed = True
        with suppress(StopIteration):
            while True:
                self._train()
        seed = next(one for one in commands if isinstance(one, int))
        plan = plan_of(seed, self._job.ranks)
        self._model.reshard({"sparse": (0.0, plan)}, "sparse")
        self._tell(Event("replanned", self._positions.batches, began, time.time()))

    def _tell(self, event: Event) -> None:
        if self._rank == 0:
            self._link.send(event)


def _run(job: Job, rank: int, link: multiprocessing.connection.Connection) -> None:
    """Trains on one rank, in a process of its own."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_telling_memory(job.told)
    log = os.open(f"{job.log}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(job.ranks),
        GLOO_SOCKET_IFNAME="lo",
    )
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=rank,
        world_size=job.ranks,
        timeout=_GROUP_TIMEOUT,
    )
    _Trainer(job, link).run()
    gc.collect()
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """Ends this process when the process that judges has ended."""
    parent = multiprocessing.process.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Trainers:
    """One start of the training job, as the process that judges sees it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.processes = []
        for rank in range(job.ranks):
            ours, theirs = forkserver().Pipe()
            process: Any = forkserver().Process(target=_run, args=(job, rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            if rank == 0:
                self._link = ours
            else:
                ours.close()

    @property
    def pids(self) -> dict[int, int]:
        """The processes that run, by rank."""
        ranks = enumerate(self.processes)
        return {rank: one.pid for rank, one in ranks if one.exitcode is None}

    @property
    def codes(self) -> list[int | None]:
        """Exit status by rank, None of a process that runs."""
        return [one.exitcode for one in self.processes]

    def send(self, command: str | int) -> None:
        """Sends a command to rank 0."""
        with suppress(OSError):
            self._link.send(command)

    def events(self) -> list[Event]:
        """Returns what rank 0 has told since the last call."""
        found = []
        with suppress(EOFError, OSError):  # it was killed, maybe in the middle of a message
            while self._link.poll():
                found.append(self._link.recv())
        return found

    def kill(self, ranks: list[int]) -> None:
        """Kills ranks, as the system does where memory ends."""
        for rank in ranks:
            self.processes[rank].kill()

    def show_stacks(self) -> None:
        """Lets the ranks write where they are; `said` returns it."""
        for pid in self.pids.values():
            os.kill(pid, signal.SIGUSR1)
        time.sleep(2)

    def said(self) -> str:
        """Returns the last words of each rank."""
        texts = [
            f"rank {rank}:\n{Path(f'{self.job.log}-{rank}').read_text(errors='replace')[-4000:]}"
            for rank in range(self.job.ranks)
            if Path(f"{self.job.log}-{rank}").exists()
        ]
        return "\n".join(texts)

    def close(self) -> None:
        """Forgets the processes, which have ended, and their files."""
        self._link.close()
        for process in self.processes:
            process.join()
            process.close()
        for rank in range(self.job.ranks):
            Path(f"{self.job.log}-{rank}").unlink(missing_ok=True)
        self.job.store.unlink(missing_ok=True)
