"""Measures contestants side by side: in turn within one run, so that a noisy machine hurts all alike."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def measure(
    contestants: Mapping[str, Callable[[int], None]], rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Runs every contestant once a round and returns their seconds by name.

    Args:
        contestants: name -> function of the round's number.
        rounds: measured rounds.
        warm_up: rounds before them, not measured.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warm_up + rounds):
        for name, run in contestants.items():
            begin = time.perf_counter()
            run(turn)
            elapsed = time.perf_counter() - begin
            if turn >= warm_up:
                seconds[name].append(elapsed)
    return seconds


def summary(seconds: Mapping[str, list[float]], per: int) -> dict[str, dict[str, float]]:
    """Returns the median nanoseconds a unit and the quartiles of each contestant.

    Args:
        seconds: as `measure` returns them.
        per: units of work in one round.
    """
    table = {}
    for name, values in seconds.items():
        low, median, high = statistics.quantiles(values, n=4)
        table[name] = {
            "median_ns": median / per * 1e9,
            "low_ns": low / per * 1e9,
            "high_ns": high / per * 1e9,
        }
    return table


def ratio(seconds: Mapping[str, list[float]], slow: str, fast: str) -> tuple[float, float, float]:
    """Returns the median and quartiles of slow / fast, taken round by round."""
    ratios = [a / b for a, b in zip(seconds[slow], seconds[fast], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return median, low, high


def write_results(name: str, rows: list[dict[str, Any]]) -> Path:
    """Writes rows with date, commit and machine to benchmarks/results/<name>.json."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")),
        platform.processor(),
    )  # fmt: skip
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    header = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "cpu": cpu,
        "torch": torch.__version__,
    }
    path.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")
    return path
