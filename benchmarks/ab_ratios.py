"""Compares two versions of the package, run in turn by make bench-ab: nanoseconds of each, and old / new.

    python benchmarks/ab_ratios.py benchmarks/results/tmp/base benchmarks/results/tmp/checkout

Each folder holds one folder per run. A ratio compares the medians over the runs; its quartiles are over the
pairs of runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interleaved import quartiles, spread

# The entries that identify a measurement.
NAMED_BY = ("workload", "axis", "value", "ranks", "plan", "threads", "what")
OURS = ("dynamic", "float16", "bfloat16", "new", "known", "erase", "growth", "load 0.625")


def times(folder: Path) -> dict[tuple[Any, ...], float]:
    """Returns measurement -> median nanoseconds of the dynamic side in one run."""
    found: dict[tuple[Any, ...], float] = {}
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            name = (path.stem, *(row[key] for key in NAMED_BY if key in row))
            numbers = row.get("ns_per_id", row.get("ns_per_step", {}))
            for side in OURS:
                if side in numbers:
                    found[(*name, side)] = numbers[side]["median_ns"]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one line per measurement, and the geometric mean of old / new."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("checkout", type=Path)
    arguments = parser.parse_args(argv)
    base, checkout = (
        [times(run) for run in sorted(folder.iterdir())]
        for folder in (arguments.base, arguments.checkout)
    )
    print(f"{'measurement':64} {'base ns':>9} {'checkout':>9}  base / checkout [quartiles]")
    ratios = []
    for name in base[0]:
        if not all(name in run for run in (*base, *checkout)):
            continue
        old, new = [run[name] for run in base], [run[name] for run in checkout]
        _, low, high = quartiles([a / b for a, b in zip(old, new, strict=True)])
        ratios.append(statistics.median(old) / statistics.median(new))
        print(
            f"{' '.join(map(str, name)):64} {statistics.median(old):9.1f} "
            f"{statistics.median(new):9.1f}  {spread((ratios[-1], low, high))}"
        )
    if not ratios:
        raise SystemExit("compare: expected the same measurements on both sides, got none.")
    print(
        f"compare: geometric mean of {len(ratios)} ratios {statistics.geometric_mean(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
