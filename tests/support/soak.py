"""Trains, saves, kills, replans, follows and serves, beside a model without faults.

    make soak ARGS="--seconds 1200 --seed 3"

One or two ranks train a drifting stream with event time, admission, expiry and eviction, and save full
checkpoints and deltas. A follower serves them. What is killed when is drawn from the seed; each start has
another plan, often another number of ranks. Each generation that is served must have the rows that an
unsharded model has at its step. Exit status: 1 if anything was lost, came twice or is left over.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from another_process import environment
from soak_model import IDS_A_SAMPLE, TABLES, Stream, event_time, unsharded
from soak_trainer import Job, Trainers
from torch import Tensor
from torchrec import KeyedJaggedTensor

from torchrec_dyn import serving

_GRACE = 20.0  # seconds for a rank to end by itself after another one was killed
_PATIENCE = 240.0  # seconds without a new generation after which the soak is taken to hang
_AHEAD = 12  # saves that may be served between the follower's line and the read
# What `python -m torchrec_dyn follow` prints of a generation.
_FOLLOWED = re.compile(r"\S+ \(step (\d+)\): generation (\S+), .* rows, ([\d.]+) s after")


class Unfaulted:
    """The model without faults: unsharded, trained on the whole stream in this process.

    Attributes:
        rows: ids [N] int64 and rows [N, columns] of each table at each step that may be saved.
    """

    def __init__(self, seed: int, every: int) -> None:
        self._model, self._optimizer = unsharded()
        self._batches, self._every = iter(Stream(seed)), every
        self._step = 0
        self.rows: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}

    def at(self, step: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the tables at a step; trains up to it."""
        while self._step < step:
            self._model.sparse.set_time(event_time(self._step))
            self._optimizer.zero_grad()
            self._model(next(self._batches))[0].backward()
            self._optimizer.step()
            self._step += 1
            if self._step % self._every == 0:
                tables = {name: self._model.sparse.table(name) for name in IDS_A_SAMPLE}
                self.rows[self._step] = {
                    name: (table.ids(), table.lookup(table.ids())[0])
                    for name, table in tables.items()
                }
                self.rows.pop(self._step - 40 * self._every, None)
        return self.rows[step]


class Follower:
    """`python -m torchrec_dyn follow` in a process of its own."""

    def __init__(self, path: Path, served: Path, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "torchrec_dyn", "follow", path, "--to", served]
        with open(log, "ab") as errors:
            self.process = subprocess.Popen(
                [*map(str, command), "--every", "0.3"],
                stdout=subprocess.PIPE, stderr=errors, text=True,
                env=environment(OMP_NUM_THREADS="1"),
            )  # fmt: skip
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # it was not killed in the middle
                self._lines.put(line.rstrip("\n"))

    def lines(self) -> list[str]:
        """Returns the lines since the last call."""
        lines = []
        with suppress(Empty):
            while True:
                lines.append(self._lines.get_nowait())
        return lines

    def end(self, number: int) -> None:
        """Ends the process by a signal."""
        self.process.send_signal(number)
        self.process.wait()
        self._thread.join()


class Soak:
    """All processes of a soak, what is done to them, and what is wrong."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options, self._scratch = options, scratch
        self._draw = random.Random(options.seed)
        self._path, self._served = scratch / "checkpoints", scratch / "served"
        self._model = Unfaulted(options.seed, options.every)
        self._collection: serving.ServingEmbeddingBagCollection | None = None
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._step, self._stepped_at = 0, time.time()  # of the latest generation that was compared
        self._ranks, self._killed_at = 2, 0.0
        self._job = self._new_job()
        self._follower = self._new_follower()

    def _new_follower(self) -> Follower:
        return Follower(self._path, self._served, self._scratch / "follower.log")

    def _new_job(self) -> Trainers:
        options, number = self._options, self.counts["starts of training"]
        self.counts["starts of training"] += 1
        self._stop = self._scratch / f"stop-{number}"
        self._killed_at = 0.0
        return Trainers(
            Job(
                ranks=self._ranks,
                folder=self._scratch / f"job-{number}",
                path=self._path,
                stop=self._stop,
                seed=options.seed,
                plan=self._draw.randrange(1000),
                every=options.every,
                in_background=self._draw.random() < 0.5,
                rate=options.rate,
            )
        )

    def fault(self, text: str) -> None:
        """Notes a fault."""
        self.faults.append(text)
        print(f"FAULT: {text}", flush=True)

    def run(self) -> None:
        """Runs for the time that was asked for, then ends all."""
        end, next_act = time.time() + self._options.seconds, time.time() + 10
        while time.time() < end and not self.faults:
            self._look(restart=True)
            if time.time() > next_act and not self._killed_at and not self._stop.exists():
                next_act = time.time() + self._draw.uniform(4, 14)
                self._act()
            time.sleep(0.1)
        self._stop.touch()
        while not self.faults and (None in self._job.codes or self._step < self._last_step()):
            self._look(restart=False)
            time.sleep(0.1)
        self._follower.end(signal.SIGTERM)
        if left := sorted(path.name for path in (self._scratch / "temporary").iterdir()):
            self.fault(f"left in the temporary folder: {left}")

    def _last_step(self) -> int:
        return int(self._stop.read_text() or 0)

    def _act(self) -> None:
        """Kills a rank, all ranks or the follower, or asks for a start with another number of ranks."""
        act = self._draw.choice(
            ["kill of a rank", "kill of all ranks", "kill of the follower", "stop"]
        )
        self.counts[act] += 1
        ranks = list(range(self._job.job.ranks))
        if act == "kill of the follower":
            self._follower.end(signal.SIGKILL)
            self._follower = self._new_follower()
        elif act == "stop":
            self._stop.touch()
        else:
            self._job.kill(ranks if act == "kill of all ranks" else [self._draw.choice(ranks)])
            self._killed_at = time.time()
        self._ranks = self._draw.choice([1, 2])  # of the next start

    def _look(self, restart: bool) -> None:
        """Compares what is served, and judges the end of processes."""
        for line in self._follower.lines():
            if found := _FOLLOWED.match(line):
                self._compare(int(found[1]))
            elif not line.startswith("  skipped"):
                self.fault(f"python -m torchrec_dyn follow: {line}")
        if self._follower.process.poll() is not None:
            self.fault(f"the follower has ended:\n{self._follower.log.read_text()[-3000:]}")
        if time.time() > self._stepped_at + _PATIENCE:
            self.fault(f"no generation for {_PATIENCE:.0f} s:\n{self._job.logs()}")
        codes = self._job.codes
        if self._killed_at and time.time() > self._killed_at + _GRACE:
            self._job.kill([rank for rank, code in enumerate(codes) if code is None])
        if None not in codes:
            if not self._killed_at and any(codes):
                self.fault(f"the training job ended with {codes}:\n{self._job.logs()}")
            if restart or self._killed_at:
                self._job = self._new_job()
                if not restart:
                    self._stop.touch()

    def _compare(self, step: int) -> None:
        """Reads all rows of the generation served now: of `step`, or of a later save."""
        if self._collection is None:
            self._collection = serving.ServingEmbeddingBagCollection(self._served, TABLES)
        self._collection.refresh()
        for later in range(step, step + _AHEAD * self._options.every, self._options.every):
            if later >= self._step and self._has_rows(self._model.at(later)):
                self.counts["generations compared"] += 1
                self._step, self._stepped_at = later, time.time()
                return
        self.fault(
            f"expected the rows of step {step} or of a save after it, and after {self._step}"
        )

    def _has_rows(self, tables: dict[str, tuple[Tensor, Tensor]]) -> bool:
        assert self._collection is not None
        most = max(len(ids) for ids, _ in tables.values())
        known = {name: set(ids.tolist()) for name, (ids, _) in tables.items()}
        ids, expected = [], []
        for name, (own, rows) in tables.items():
            others = torch.arange(most - len(own))  # ids that the stream does not have, but for few
            others[[number in known[name] for number in others.tolist()]] = -1
            ids.append(torch.cat([own, others]))
            expected.append(torch.cat([rows, rows.new_zeros(len(others), rows.shape[1])]))
        lengths = torch.ones(most * len(ids), dtype=torch.int64)
        features = KeyedJaggedTensor(list(tables), torch.cat(ids), lengths=lengths)
        with torch.no_grad():
            return torch.equal(self._collection(features).values(), torch.cat(expected, dim=1))

    def close(self) -> None:
        """Kills what still runs."""
        self._job.kill(list(range(self._job.job.ranks)))
        self._follower.process.kill()


def main() -> int:
    """Runs the soak; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200.0, help="default: 1200")
    parser.add_argument("--seed", type=int, default=0, help="of the stream and of what happens")
    parser.add_argument("--every", type=int, default=10, help="batches from save to save")
    parser.add_argument("--rate", type=float, default=20.0, help="most batches a second")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="torchrec_dyn_soak_"))
    (scratch / "temporary").mkdir()
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    multiprocessing.util.get_temp_dir()  # it goes at the very end, from another place
    # Of all processes: what is left here is the soak's own.
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch / "temporary")
    os.environ["OMP_NUM_THREADS"] = "1"
    soak = Soak(options, scratch)
    try:
        soak.run()
        for name, count in sorted(soak.counts.items()):
            print(f"{name}: {count}", flush=True)
        return 1 if soak.faults else 0
    finally:
        soak.close()
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
