"""One axis at a time: rows of a table, Zipf exponent, bag length, threads; plot.py draws the result.

    python benchmarks/bench_sweep.py [--rounds 7] [--axis skew] && python benchmarks/plot.py

All axes cross at the pooled-uniform workload of axes.py. Along an axis, each step has about the same number
of ids; the tables change only along the axis "rows". The dynamic tables, the static tables and the floor
("read") take turns.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from axes import (
    POOLED,
    SWEEP_BAG,
    SWEEP_ROWS,
    SWEEP_ZIPF,
    THREADS,
    Workload,
    counts,
    offsets,
    ranks,
    raw_ids,
    tiny,
)
from contestants import dynamic_tables, forward_of, output_grad, static_tables, step_of
from floor import floors
from interleaved import finish, measure, options, ratio, result, spread, summary

BATCHES = 4


class Sides:
    """The tables of both sides; measures them under a workload."""

    def __init__(self, workload: Workload, arguments: argparse.Namespace) -> None:
        self._static, self._dynamic = static_tables(workload), dynamic_tables(workload)
        self._arguments = arguments

    def measure(self, axis: str, value: float, workload: Workload) -> Iterator[dict[str, Any]]:
        """Measures forward and step, prints them and yields them as results.

        Args:
            axis: name of the axis.
            value: value on the axis.
            workload: workload over the same tables.
        """
        mapped = ranks(workload, BATCHES, seed=0)
        raw = [raw_ids(batch) for batch in mapped]
        bags, id_counts = offsets(workload), counts(workload)
        grad = output_grad(workload)
        lookups = {
            "dynamic": lambda i: self._dynamic(raw[i], bags, training=True, counts=id_counts),
            "static": lambda i: self._static(mapped[i], bags),
        }
        floors_here = floors(self._dynamic.tables, raw, workload.bag, grad)
        floor = {name: run for name, run in floors_here.items() if name == "read floor"}
        forward = {name: forward_of(lookup, BATCHES) for name, lookup in lookups.items()}
        steps = {name: step_of(lookup, BATCHES, grad) for name, lookup in lookups.items()}
        for what, sides in (("forward", {**forward, **floor}), ("step", steps)):
            seconds = measure(sides, self._arguments.rounds, clock=self._arguments.clock)
            numbers = summary(seconds, workload.ids_per_step)
            seen = ratio(seconds, "static", "dynamic")
            line = "".join(
                f" {name} {number['median_ns']:6.1f}" for name, number in numbers.items()
            )
            print(f"{axis:8} {value:10,} {what:8}{line}  {spread(seen)}")
            threads = torch.get_num_threads()
            more = {"axis": axis, "value": value, "ns_per_id": numbers}
            yield result(workload.name, threads, what, "static", seen, **more)


def points(axis: str, middle: Workload) -> list[tuple[float, Workload]]:
    """Returns the values of the axis "skew" or "bag", each with its workload over the tables of `middle`."""
    if axis == "skew":
        return [(zipf, replace(middle, zipf=zipf)) for zipf in SWEEP_ZIPF]
    ids = middle.batch * middle.bag
    return [(bag, replace(middle, bag=bag, batch=max(1, ids // bag))) for bag in SWEEP_BAG]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the axes; axes that share tables run first."""
    parser = options(__doc__, THREADS)
    names = ["skew", "bag", "threads", "rows"]
    parser.add_argument("--axis", nargs="+", choices=names, default=names)
    parser.set_defaults(rounds=7)
    arguments = parser.parse_args(argv)
    middle = tiny(POOLED[0]) if arguments.quick else POOLED[0]
    sizes = [middle.rows] if arguments.quick else SWEEP_ROWS
    most = max(arguments.threads)
    lines: list[dict[str, Any]] = []
    torch.set_num_threads(most)
    if {"skew", "bag", "threads"} & set(arguments.axis):
        sides = Sides(middle, arguments)
        for axis in ("skew", "bag"):
            for value, workload in points(axis, middle) if axis in arguments.axis else ():
                lines.extend(sides.measure(axis, value, workload))
        for threads in sorted(arguments.threads) if "threads" in arguments.axis else ():
            torch.set_num_threads(threads)
            lines.extend(sides.measure("threads", threads, middle))
        del sides
    torch.set_num_threads(most)
    for rows in sizes if "rows" in arguments.axis else ():
        gc.collect()  # the next tables need the memory
        workload = replace(middle, rows=rows)
        lines.extend(Sides(workload, arguments).measure("rows", rows, workload))
    finish("sweep", lines, arguments)


if __name__ == "__main__":
    main()
