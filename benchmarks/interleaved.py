"""Measures contestants in turn within one run, so that a noisy machine slows all of them alike."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import torchrec_dyn

RESULTS = Path(__file__).parent / "results"


class Moment:
    """A moment of a GPU's stream. The difference of two is the seconds from the second to the first."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, begin: Moment) -> float:
        self._event.synchronize()
        return begin._event.elapsed_time(self._event) / 1e3


# "cpu" is the CPU time of this process, "thread" that of this thread: for one thread on a busy machine.
CLOCKS: dict[str, Callable[[], Any]] = {
    "wall": time.perf_counter, "cpu": time.process_time, "thread": time.thread_time, "cuda": Moment,
}  # fmt: skip


def options(description: str | None, threads: Sequence[int]) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark; `description` is cut to its first line."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds of each contestant")
    parser.add_argument("--threads", type=int, nargs="+", default=list(threads))
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: 1 thread only")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test that it runs")
    parser.add_argument("--results", type=Path, help="folder of the JSON file")
    return parser


def measure(
    contestants: Mapping[str, Callable[[int], object]],
    rounds: int,
    warm_up: int = 2,
    clock: str = "wall",
    before: Callable[[int], None] | None = None,
    collects: bool = False,
) -> dict[str, list[float]]:
    """Runs every contestant once per round and returns their seconds by name.

    Each round begins with the next contestant, so that each contestant is first in turn.

    Args:
        contestants: name -> function of the round's number. One that runs in another process returns its own
            seconds, as a float.
        rounds: measured rounds.
        warm_up: earlier rounds, not measured.
        clock: a name of CLOCKS.
        before: runs before each contestant's turn, not measured.
        collects: False if Python collects no garbage, as in `timeit`: to go through all objects takes 100
            to 200 ms beside torch and torchrec, and falls on the step that makes one object too many.
    """
    now = CLOCKS[clock]
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    gc.collect()
    if not collects:
        gc.disable()
    try:
        for turn in range(warm_up + rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                if before:
                    before(turn)
                begin = now()
                own = contestants[name](turn)
                elapsed = own if isinstance(own, float) else now() - begin
                if turn >= warm_up:
                    seconds[name].append(elapsed)
    finally:
        gc.enable()
    return seconds


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median and the lower and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, low, high


def summary(seconds: Mapping[str, Sequence[float]], per: int) -> dict[str, dict[str, float]]:
    """Returns the median and the quartiles of the nanoseconds per unit, for each contestant.

    Args:
        seconds: as `measure` returns them.
        per: units of work in one round.
    """
    table = {}
    for name, values in seconds.items():
        median, low, high = (value / per * 1e9 for value in quartiles(values))
        table[name] = {"median_ns": median, "low_ns": low, "high_ns": high}
    return table


def ratio(
    seconds: Mapping[str, Sequence[float]], above: str, below: str
) -> tuple[float, float, float]:
    """Returns the median and quartiles of above / below, taken round by round."""
    return quartiles([a / b for a, b in zip(seconds[above], seconds[below], strict=True)])


def result(
    workload: str,
    threads: int,
    what: str,
    against: str,
    seen: tuple[float, float, float],
    **more: Any,
) -> dict[str, Any]:
    """Returns one line of results, in the form that summary.py reads.

    Args:
        workload: name of the workload.
        threads: threads of torch.
        what: the measured quantity, for example "forward".
        against: the other side of the ratio.
        seen: median of the ratio and its quartiles.
        more: further entries.
    """
    return {
        "workload": workload, "threads": threads, "what": what, "against": against,
        "ratio": seen[0], "ratio_quartiles": [seen[1], seen[2]], **more,
    }  # fmt: skip


def spread(seen: tuple[float, float, float]) -> str:
    """Returns a ratio with its quartiles as text."""
    return f"{seen[0]:.2f}x [{seen[1]:.2f}, {seen[2]:.2f}]"


def _first(path: str, start: str, otherwise: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return otherwise
    return next(
        (line.split(":")[-1].strip() for line in lines if line.startswith(start)), otherwise
    )


def _version(package: str) -> str:
    return next(
        (f"{one} {metadata.version(one)}" for one in (package, f"{package}-cpu")
         if any(metadata.distributions(name=one))),
        "none",
    )  # fmt: skip


def commit() -> str:
    """Returns the commit of the imported package; make bench-ab writes the commit of its base to a file."""
    tree = Path(torchrec_dyn.__file__).parent.parent
    noted = tree / "COMMIT"
    if noted.exists():
        return noted.read_text().strip()
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> dict[str, Any]:
    """Returns the date, the commit, the machine and the versions, as the header of the results."""
    pages = _first("/sys/kernel/mm/transparent_hugepage/enabled", "", "none")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "cpu": _first("/proc/cpuinfo", "model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "huge_pages": pages[pages.find("[") + 1 : pages.find("]")] if "[" in pages else pages,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "fbgemm": _version("fbgemm-gpu"),
    }


def write_results(
    name: str, rows: list[dict[str, Any]], folder: Path = RESULTS, **more: Any
) -> Path:
    """Writes rows with date, commit and machine to <folder>/<name>.json; returns the path.

    Args:
        name: name of the file, without .json.
        rows: lines to write.
        folder: folder to write to.
        more: further entries of the header.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**machine(), **more, "rows": rows}, indent=1) + "\n")
    return path


def finish(name: str, rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Writes the results and prints the last line: one geometric mean of the ratios.

    Args:
        name: name of the file, without .json.
        rows: lines of `result`, and others. Lines with in_mean=False are not in the mean.
        arguments: the parsed `options`.
    """
    folder = arguments.results or (RESULTS / "tmp" / "quick" if arguments.quick else RESULTS)
    more = {"clock": arguments.clock, "rounds": arguments.rounds}
    print(f"written: {write_results(name, rows, folder, **more)}")
    ratios = [row["ratio"] for row in rows if "ratio" in row and row.get("in_mean", True)]
    if ratios:
        print(
            f"{name}: geometric mean of {len(ratios)} ratios {statistics.geometric_mean(ratios):.3f}"
        )
