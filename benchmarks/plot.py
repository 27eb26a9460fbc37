"""Draws results/sweep.json: nanoseconds per id along four axes, dynamic and static tables and the floor.

python benchmarks/plot.py [--results benchmarks/results] [--picture docs/dev/performance.png]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interleaved import RESULTS

PICTURE = Path(__file__).parent.parent / "docs" / "performance.png"
PANELS = {
    "rows": "rows of each of 8 tables",
    "skew": "Zipf exponent of the ids",
    "bag": "ids of a bag",
    "threads": "threads",
}
# Name -> label, colour, mark. Colour-blind readers can distinguish the colours, all readers the marks.
# Source: Okabe and Ito, "Color Universal Design", 2008.
SIDES = {
    "dynamic": ("dynamic (ours, with the probe)", "#0072B2", "o"),
    "static": ("FBGEMM static, ids mapped", "#D55E00", "s"),
    "read floor": ("bare gather in C++", "#555555", "^"),
}
LINES = {"step": "--", "forward": "-"}


def series(rows: list[dict[str, Any]], axis: str, what: str, side: str) -> list[tuple[float, ...]]:
    """Returns the points of one curve: value on the axis, median and quartiles."""
    return [
        (row["value"], *(row["ns_per_id"][side][key] for key in ("median_ns", "low_ns", "high_ns")))
        for row in rows
        if row["axis"] == axis and row["what"] == what and side in row["ns_per_id"]
    ]


def draw(sweep: dict[str, Any], picture: Path) -> None:
    """Draws the four panels into a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    threads = max(row["threads"] for row in sweep["rows"])
    figure, panels = pyplot.subplots(2, 2, figsize=(9, 6.6), sharey=True, layout="constrained")
    for panel, (axis, label) in zip(panels.flat, PANELS.items(), strict=True):
        for side, (name, colour, mark) in SIDES.items():
            for what, line in LINES.items():
                curve = series(sweep["rows"], axis, what, side)
                if not curve:
                    continue
                values, median, low, high = zip(*curve, strict=True)
                panel.plot(values, median, line, color=colour, marker=mark, markersize=4,
                           linewidth=1.4, label=f"{name}: {what}")  # fmt: skip
                panel.fill_between(values, low, high, color=colour, alpha=0.15, linewidth=0)
        panel.set_yscale("log")
        if axis in ("rows", "bag"):
            panel.set_xscale("log")
        if axis == "threads":
            panel.set_xticks(sorted({row["value"] for row in sweep["rows"] if row["axis"] == axis}))
        panel.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
        panel.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
    for panel in panels[:, 0]:
        panel.set_ylabel("ns an id")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(
        "Pooled lookup, dim 64, float32, row-wise Adagrad; unless an axis says otherwise: uniform ids,\n"
        f"8 x 1M rows, 10 ids a bag, {threads} threads. {sweep['cpu']}, {sweep['simd']}, {sweep['date']}",
        fontsize=9,
    )
    figure.savefig(picture, dpi=96, pil_kwargs={"optimize": True})


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the sweep and writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    arguments = parser.parse_args(argv)
    source = arguments.results / "sweep.json"
    if not source.exists():
        sys.exit(f"plot: expected {source}, got none. Run python benchmarks/bench_sweep.py.")
    try:
        draw(json.loads(source.read_text()), arguments.picture)
    except ModuleNotFoundError as error:
        sys.exit(
            f"plot: expected matplotlib, got none ({error}). Run make build, which installs it."
        )
    print(f"written: {arguments.picture} ({arguments.picture.stat().st_size // 1024} KB)")


if __name__ == "__main__":
    main()
