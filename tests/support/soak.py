"""Trains, saves, kills, fills the disk, replans, follows and serves, beside a model without faults.

    make soak ARGS="--seconds 1200 --seed 3"

One or two ranks train a drifting stream with event time, admission, expiry and eviction, and save full
checkpoints and deltas. Two followers serve them, one by the command, one in a process with threads that read.
What happens when is drawn from the seed. In the last part of the time ranks are not killed and the plan
stays, so that the slope of their memory can be told; with `--storm 0` that is the whole time. Exit status:
1 if anything was lost, came twice, is left over, or grows.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing.util
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from another_process import environment
from soak_disk import Disk
from soak_judge import Judge
from soak_memory import Samples, keep_telling_memory
from soak_oracle import Oracle
from soak_readers import Places, start
from soak_trainer import STOP, Job, Trainers

ROOT = Path(__file__).resolve().parents[2]
KILL_ONE, KILL_ALL, FULL_DISK, REPLAN, OTHER_WORLD, KILL_FOLLOWER = (
    "kill of a rank",
    "kill of all ranks",
    "full disk",
    "new plan",
    "other world size",
    "kill of a follower",
)
_ACTS = (KILL_ONE, FULL_DISK, REPLAN, KILL_ALL, OTHER_WORLD, KILL_FOLLOWER, REPLAN, KILL_ONE)
# No new plans: each block has a huge page at least, so the memory of a rank is up to 20 MB more under some.
_CALM_ACTS = (FULL_DISK,)
_GRACE = 20.0  # seconds for a rank to end by itself after another one was killed
_LONGEST_SPELL = 30.0  # more seconds for a save to fail on a full disk
_SILENCE = 240.0  # seconds without an event after which the job is taken to hang
_WARM = 60.0  # seconds of a process before its memory is told
_SLOPES = {
    "MB in use": 1.0,
    "MB in malloc": 1.0,
    "MB resident": math.inf,  # free pieces between others come and go: told only
    "maps": 2.0,
    "files": 1.0,
}  # most of each a minute, above three standard errors
_LEAST_MINUTES = 4.0  # of samples, for a slope to be judged
_MOST_FAULTS = 5


# `python -m torchrec_dyn`, which tells its memory.
_COMMAND = """
import pathlib, runpy, sys, soak_memory
soak_memory.keep_telling_memory(pathlib.Path(sys.argv.pop(1)))
runpy.run_module("torchrec_dyn", run_name="__main__", alter_sys=True)
"""


class _Command:
    """`python -m torchrec_dyn follow` in a process of its own."""

    def __init__(self, path: Path, to: Path, log: Path, told: Path) -> None:
        self.began: float | None = None  # when it served the first entry
        self._log = open(log, "ab")  # noqa: SIM115  as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, told, "follow", path, "--to", to, "--every", "0.3"],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=environment(OMP_NUM_THREADS="1"),
        )
        self.lines: SimpleQueue[str] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # it was not killed in the middle
                self.lines.put(line.rstrip("\n"))

    def taken(self) -> list[str]:
        """Returns the lines since the last call."""
        found = []
        with suppress(Empty):
            while True:
                found.append(self.lines.get_nowait())
        return found

    def end(self, number: int) -> None:
        """Ends the process by a signal."""
        self.process.send_signal(number)
        self.process.wait()
        self._thread.join()
        self._log.close()


class Soak:
    """All processes of a soak, and what is done to them."""

    def __init__(self, chosen: argparse.Namespace, scratch: Path) -> None:
        self._chosen, self._scratch = chosen, scratch
        self._draw = random.Random(chosen.seed)
        self._disk = Disk(scratch / "disk", self._draw, chosen.mount)
        served = {name: self._disk.folder / f"served-{name}" for name in ("command", "process")}
        self._path, self._served = self._disk.folder / "checkpoints", served
        (scratch / "oracle").mkdir()
        self._oracle = Oracle(chosen.seed, chosen.every, scratch / "oracle")
        self.judge = Judge(self._path, served, self._oracle, self._disk)
        self._told = scratch / "memory"
        self._told.mkdir()
        keep_telling_memory(self._told)
        self._samples = Samples(self._told)
        self.did: Counter[str] = Counter()
        self._began = self._trained = time.time()
        self._deck: list[str] = []
        self._next_act = self._free_at = 0.0
        self._killed_at = self._sampled = 0.0
        self._heard = self._must_hear = self._failed_before = 0
        self._is_stopping = self._is_over = False
        self._ranks = 2
        self._attempted = 0
        self._last_event = time.time()
        self._shm = {one.name for one in Path("/dev/shm").glob("*")}
        self._pids: set[int] = set()
        self._job: Trainers | None = None
        self._start_job()
        places = Places(
            self._path, served["process"], served["command"], scratch / "oracle", self._told
        )
        self._server, self._link = start(places, chosen.seed)
        self._command = self._new_command()

    def _new_command(self) -> _Command:
        self._samples.forget("command")
        return _Command(
            self._path, self._served["command"], self._scratch / "command.log", self._told
        )

    def _start_job(self) -> None:
        self.judge.note_restart()
        number = sum(count for name, count in self.did.items() if name.startswith("start on"))
        job = Job(
            ranks=self._ranks,
            path=self._path,
            store=self._scratch / f"store-{number}",
            log=self._scratch / f"job-{number}",
            told=self._told,
            seed=self._chosen.seed,
            plan=self._draw.randrange(1000),
            every=self._chosen.every,
            in_background=self._draw.random() < 0.5,
            rate=self._chosen.rate,
        )
        self.did[f"start on {self._ranks}"] += 1
        self._samples.forget("rank 0")
        self._samples.forget("rank 1")
        self._job, self._killed_at, self._is_stopping = Trainers(job), 0.0, False
        self._last_event = self._job_began = time.time()
        self._pids |= set(self._job.pids.values())

    # What happens

    def run(self) -> None:
        """Runs for the time that was asked for, then ends all."""
        self._began = time.time()
        told, every = time.monotonic(), min(30.0, self._chosen.seconds / 4)
        self._next_act = time.time() + 8
        while time.time() < self._began + self._chosen.seconds and not self._is_bad:
            self._turn()
            self._act()
            if time.monotonic() - told > every:
                told += every
                print(self.line(), flush=True)
        self._is_over = True
        self._disk.free()
        if self._until("the training job ends after a last save", self._has_stopped, 240):
            self._until("the followers serve the last entry", self.judge.are_served, 120)
        self._end()

    @property
    def _is_bad(self) -> bool:
        return len(self.judge.faults) >= _MOST_FAULTS

    def _until(self, what: str, is_so: Any, seconds: float) -> bool:
        deadline = time.time() + seconds
        while not is_so():
            if time.time() > deadline or self._is_bad:
                self.judge.fault(f"expected that {what}")
                return False
            self._turn()
        return True

    def _has_stopped(self) -> bool:
        if self._job is not None and not self._is_stopping and not self._killed_at:
            self._is_stopping = True
            self._job.send(STOP)
        return self._job is None

    def _act(self) -> None:
        """Does the next thing of the deck, if it is time."""
        now, failed = time.time(), self.judge.counts["failed saves"]
        is_felt = failed > self._failed_before or now > self._free_at + _LONGEST_SPELL
        if self._disk.is_full and now > self._free_at and is_felt:
            self._disk.free()
        if now < self._next_act or self._job is None or self._killed_at or self._is_stopping:
            return
        if self._heard < self._must_hear:
            return
        seconds = self._chosen.seconds
        is_calm = now > self._began + self._chosen.storm * seconds
        self._next_act = now + self._draw.uniform(2, 3 + min(14, seconds / 15) * (1 + is_calm))
        if not self._deck:
            self._deck = list(_CALM_ACTS if is_calm else _ACTS)
            if is_calm or self.did[KILL_ONE]:
                self._draw.shuffle(self._deck)
        # Most things happen to a job that has trained since the last one, whatever the speed of the machine.
        self._heard, self._must_hear = 0, self._draw.choice([0, 1, 2, 2])
        act = self._deck.pop(0)
        if is_calm and self._job.job.ranks == 1:
            act = OTHER_WORLD  # the memory of two ranks is told
        elif is_calm and act not in _CALM_ACTS:
            return
        self.did[act] += 1
        if act in (KILL_ONE, KILL_ALL):
            ranks = list(range(self._job.job.ranks))
            self._job.kill(ranks if act == KILL_ALL else [self._draw.choice(ranks)])
            self._killed_at = now
            self._ranks = self._draw.choice([1, 2, 2])  # of the next start
        elif act == FULL_DISK:
            self._disk.fill()
            self._free_at, self._failed_before = now + self._draw.uniform(3, 10), failed
        elif act == REPLAN:
            self._job.send(self._draw.randrange(1000))
        elif act == OTHER_WORLD:
            self._is_stopping = True
            self._ranks = 3 - self._job.job.ranks
            self._job.send(STOP)
        else:
            self._command.end(signal.SIGKILL)
            self._command = self._new_command()

    def _turn(self) -> None:
        """Looks at everything once."""
        self._disk.keep_full({*self._running().values()} - {os.getpid()})
        if self._job is not None:
            self._hear(self._job)
            self._watch(self._job)
        for line in self._command.taken():
            self._command.began = self._command.began or time.time()
            self.judge.judge_line(line)
        while self._link.poll():
            self.judge.judge_seen(self._link.recv())
        self.judge.look_at_entries()
        self.judge.look_at_generations()
        latest = self.judge.latest
        ahead = max(self._attempted, latest.step if latest else 0) + 2 * self._chosen.every
        if self._oracle.step < ahead:
            self._oracle.advance()
        else:
            time.sleep(0.1)
        self.judge.compare()
        if self._command.process.poll() is not None:
            self.judge.fault(f"the command has ended: {self._log_of_command()}")
            self._command = self._new_command()
        if not self._server.is_alive():
            raise RuntimeError("soak: expected the serving process to run, got its end.")
        if time.time() - self._sampled > 1:
            self._sampled = time.time()
            for name, pid in self._running().items():
                self._samples.take(name, pid, self._sampled)

    def _running(self) -> dict[str, int]:
        of_job = {} if self._job is None else self._job.pids
        return {
            **{f"rank {rank}": pid for rank, pid in of_job.items()},
            "command": self._command.process.pid,
            "process": self._server.pid,
            "model without faults": os.getpid(),
        }

    def _hear(self, job: Trainers) -> None:
        for event in job.events():
            self._last_event = time.time()
            self._heard += 1
            if event.what == "restored":
                self._job_began = time.time()
            self._attempted = max(self._attempted, event.step)
            self.judge.judge_event(event)

    def _watch(self, job: Trainers) -> None:
        """Judges the end of ranks, and starts the job again."""
        codes, now = job.codes, time.time()
        if None not in codes:
            self._hear(job)
            if self._killed_at:
                self.did["rank that ended by itself after a kill"] += sum(
                    code != -signal.SIGKILL for code in codes
                )
            elif any(codes) or not self._is_stopping:
                self.judge.fault(f"the training job ended with {codes}:\n{job.said()}")
            must_go_on = not self._is_over or self._killed_at or any(codes)
            job.close()
            self._job = None
            if must_go_on and not self._is_bad:
                self._start_job()
        elif self._killed_at and now > self._killed_at + _GRACE:
            self.did["rank that was killed after another one"] += codes.count(None)
            job.kill([rank for rank, code in enumerate(codes) if code is None])
        elif not self._killed_at and any(code not in (None, 0) for code in codes):
            self._killed_at = now
            self.judge.fault(f"a rank ended with {codes}:\n{job.said()}")
        elif now > self._last_event + _SILENCE and not self._killed_at:
            job.show_stacks()
            self.judge.fault(f"no event for {_SILENCE} s:\n{job.said()}")
            job.kill(list(range(job.job.ranks)))
            self._killed_at = now

    # The end

    def _end(self) -> None:
        """Ends all processes, and judges what is left."""
        with suppress(OSError):
            self._link.send("end")
        while self._server.is_alive() or self._link.poll():
            try:
                if self._link.poll(0.1):
                    self.judge.judge_seen(self._link.recv())
            except (EOFError, OSError):
                break
        self._server.join()
        self._command.end(signal.SIGTERM)
        for line in self._command.taken():
            self.judge.judge_line(line)
        if self._is_bad:
            return
        self.judge.judge_end(self._scratch / "temporary")
        pids = {str(pid) for pid in {*self._pids, self._server.pid, self._command.process.pid}}
        new = {one.name for one in Path("/dev/shm").glob("*")} - self._shm
        if ours := [name for name in new if pids & set(name.replace("-", "_").split("_"))]:
            self.judge.fault(f"left in /dev/shm: {ours}")
        self._judge_memory()

    def _judge_memory(self) -> None:
        for name in self._names:
            for what, most in _SLOPES.items():
                slope = self._samples.slope(name, what, self._warm(name))
                if slope is None or slope.minutes < _LEAST_MINUTES:
                    continue
                if slope.slope - 3 * slope.error > most:
                    self.judge.fault(f"{name}: {what} grow by {slope.slope:.2f} a minute")

    _names = ("rank 0", "rank 1", "command", "process", "model without faults")

    def _warm(self, name: str) -> float:
        """Returns the time from which samples of a process count."""
        of_command = self._command.began or time.time()
        began = {"rank": self._job_began, "command": of_command}.get(name.split()[0])
        whole = self._began + min(_WARM, 0.2 * self._chosen.seconds)
        return whole if began is None else began + min(_WARM, 0.1 * self._chosen.seconds)

    def _log_of_command(self) -> str:
        log = self._scratch / "command.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""

    def close(self) -> None:
        """Kills what still runs, and unmounts the disk."""
        if self._job is not None:
            self._job.kill(list(range(self._job.job.ranks)))
        with suppress(OSError):
            self._command.process.kill()
        self._server.kill()
        self._server.join()
        self._disk.close()

    # What is told

    def line(self) -> str:
        """Returns what was done so far, in a line."""
        counts, latest = self.judge.counts, self.judge.latest
        kills = self.did[KILL_ONE] + self.did[KILL_ALL]
        return (
            f"{time.time() - self._began:5.0f} s: step {latest.step if latest else 0}, "
            f"{counts['full']} full + {counts['delta']} deltas, "
            f"{counts['generations compared, command']} and "
            f"{counts['generations compared, process']} generations, {kills} kills, "
            f"{len(self._disk.spells)} full disks, {counts['failed saves']} failed saves, "
            f"{counts['replans']} replans, rows {self._oracle.rows()}, "
            f"{counts['rows read and compared']} rows read, {len(self.judge.faults)} faults"
        )

    def table(self) -> str:
        """Returns what was done and found, as a table."""
        latest = self.judge.latest
        lines = [("steps", f"{latest.step if latest else 0}")]
        lines += [("rows, " + name, str(rows)) for name, rows in self._oracle.rows().items()]
        lines += [("disk", "tmpfs" if self._disk.is_mounted else "limit of file lengths")]
        lines += [(name, f"{count}") for name, count in sorted(self.did.items())]
        lines += [(name, f"{count}") for name, count in sorted(self.judge.counts.items())]
        for name, lags in self.judge.lags.items():
            if lags:
                text = f"median {statistics.median(lags):.2f} s, worst {max(lags):.2f} s"
                lines.append((f"lag of the {name}", text))
        for name in self._names:
            for what in _SLOPES:
                slope = self._samples.slope(name, what, self._warm(name))
                if slope is not None:
                    text = (
                        f"{slope.slope:+.3f} +- {slope.error:.3f} a minute, mean {slope.mean:.1f}, "
                        f"over {slope.minutes:.1f} minutes"
                    )
                    lines.append((f"{what}, {name}", text))
        lines.append(("faults", str(len(self.judge.faults))))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {text}" for name, text in lines)


def main() -> int:
    """Runs the soak; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200.0, help="default: 1200")
    parser.add_argument("--seed", type=int, default=0, help="of the stream and of what happens")
    parser.add_argument("--every", type=int, default=10, help="batches from save to save")
    parser.add_argument("--rate", type=float, default=20.0, help="most batches a second")
    parser.add_argument(
        "--storm",
        type=float,
        default=0.6,
        help="share of the time in which ranks are killed and plans change, before they are left alone",
    )
    parser.add_argument(
        "--no-mount", dest="mount", action="store_false", help="limit files; mount no tmpfs"
    )
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what is mounted is unmounted
    scratch = Path(tempfile.mkdtemp(prefix="torchrec_dyn_soak_"))
    (scratch / "temporary").mkdir()
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    multiprocessing.util.get_temp_dir()  # it goes at the very end, from another place
    # Of all processes: what is left here is the soak's own.
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch / "temporary")
    os.environ["OMP_NUM_THREADS"] = "1"
    soak = None
    try:
        soak = Soak(chosen, scratch)
        soak.run()
        print(soak.table(), flush=True)
        return 1 if soak.judge.faults else 0
    finally:
        if soak is not None:
            soak.close()
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
