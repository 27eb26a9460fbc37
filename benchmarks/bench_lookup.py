"""Dynamic tables against FBGEMM's static CPU TBE: the same rows; the static side gets row numbers.

    python benchmarks/bench_lookup.py [--rounds 9] [--threads 1 2] [--only pooled-uniform]

Measures the forward, and the whole step (forward, backward, row-wise Adagrad), in nanoseconds per id. Dynamic
tables include the hash probe. The forward is also compared with the floors: a bare gather in C++ of the same
rows (floor.py). float16 and bfloat16 rows are compared with dynamic tables in float32.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from axes import (
    HALF,
    ONE_HOT,
    POOLED,
    SEQUENCE,
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
from torch import Tensor

Sides = dict[str, Callable[[int], object]]
HALF_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BATCHES = 8


def against_static(workload: Workload, huge_pages: bool) -> tuple[Sides, Sides]:
    """Returns the forwards (with the floors) and the whole steps of dynamic and static tables, by name."""
    mapped = ranks(workload, BATCHES, seed=0)
    raw = [raw_ids(batch) for batch in mapped]
    bag_offsets, id_counts = offsets(workload), counts(workload)
    static, dynamic = static_tables(workload, huge_pages), dynamic_tables(workload)
    grad = output_grad(workload)

    def dynamic_lookup(i: int) -> Tensor:
        return dynamic(raw[i], bag_offsets, training=True, counts=id_counts)

    def static_lookup(i: int) -> Tensor:
        return static(mapped[i], bag_offsets)

    forward = {
        "dynamic": forward_of(dynamic_lookup, BATCHES),
        "static": forward_of(static_lookup, BATCHES),
        **floors(dynamic.tables, raw),
    }
    return forward, {
        "dynamic": step_of(dynamic_lookup, BATCHES, grad),
        "static": step_of(static_lookup, BATCHES, grad),
    }


def half_against_float32(workload: Workload) -> tuple[Sides, Sides]:
    """Returns the forwards and the whole steps of dynamic tables by the dtype of their rows."""
    raw = [raw_ids(batch) for batch in ranks(workload, BATCHES, seed=0)]
    bag_offsets, id_counts = offsets(workload), counts(workload)
    grad = output_grad(workload)
    forward: Sides = {}
    step: Sides = {}
    for name, dtype in {"float32": torch.float32, **HALF_DTYPES}.items():
        group = dynamic_tables(workload, dtype)

        def ours(i: int, group: Any = group) -> Tensor:
            return group(raw[i], bag_offsets, training=True, counts=id_counts)

        forward[name] = forward_of(ours, BATCHES)
        step[name] = step_of(ours, BATCHES, grad)
    return forward, step


def measured(
    workload: Workload, sides: tuple[Sides, Sides], arguments: argparse.Namespace
) -> Iterator[tuple[int, str, dict[str, list[float]], dict[str, dict[str, float]]]]:
    """Yields threads, "forward" or "step", seconds and nanoseconds per id of every measurement."""
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for what, contestants in zip(("forward", "step"), sides, strict=True):
            seconds = measure(contestants, arguments.rounds, clock=arguments.clock)
            yield threads, what, seconds, summary(seconds, workload.ids_per_step)


def run_static(workload: Workload, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures one workload, prints its lines and yields them as results."""
    sides = against_static(workload, arguments.static_on_huge_pages)
    for threads, what, seconds, numbers in measured(workload, sides, arguments):
        seen = ratio(seconds, "static", "dynamic")
        line = f"{workload.name:18} {threads:7} {what:8}"
        for side in ("dynamic", "static", "read floor", "copy floor"):
            line += f" {numbers[side]['median_ns']:10.1f}" if side in numbers else f" {'-':>10}"
        yield result(workload.name, threads, what, "static", seen, ns_per_id=numbers)
        for name in ("read floor", "copy floor"):
            if name in seconds:
                above = ratio(seconds, "dynamic", name)
                yield result(workload.name, threads, what, name, above, in_mean=False)
        floor = "copy floor" if workload.copies else "read floor"
        slower = (
            f"  {spread(ratio(seconds, 'dynamic', floor))} of {floor}" if floor in seconds else ""
        )
        print(f"{line}  {spread(seen)}{slower}")


def run_half(workload: Workload, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures the dtypes on one workload, prints its lines and yields them as results."""
    sides = half_against_float32(workload)
    for threads, what, seconds, numbers in measured(workload, sides, arguments):
        for name in HALF_DTYPES:
            seen = ratio(seconds, "float32", name)
            print(
                f"{workload.name:18} {threads:7} {what:8} {numbers[name]['median_ns']:10.1f}"
                f"{'':33}  {spread(seen)} {name} against float32 "
                f"({numbers['float32']['median_ns']:.1f} ns/id)"
            )
            yield result(
                f"{workload.name}-{name}", threads, what, "float32", seen,
                in_mean=False, ns_per_id=numbers,
            )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the workloads and prints one table."""
    parser = options(__doc__, THREADS)
    parser.add_argument("--only", nargs="+", help="names of workloads")
    parser.add_argument(
        "--static-on-huge-pages",
        action="store_true",
        help="as dynamic tables; FBGEMM's default: no",
    )
    arguments = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    print(
        f"{'workload':18} {'threads':>7} {'what':8} {'ours ns/id':>10} {'static':>10} {'read floor':>10}"
        f" {'copy floor':>10}  ratio [quartiles]"
    )
    for workloads, run in (((*POOLED, *ONE_HOT, *SEQUENCE), run_static), (HALF, run_half)):
        for workload in workloads:
            if arguments.only and workload.name not in arguments.only:
                continue
            rows.extend(run(tiny(workload) if arguments.quick else workload, arguments))
            gc.collect()  # the next tables need the memory
    finish("lookup", rows, arguments)


if __name__ == "__main__":
    main()
