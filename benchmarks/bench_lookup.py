"""Dynamic tables against FBGEMM's static CPU TBE: the same rows; the static side gets row numbers.

    python benchmarks/bench_lookup.py [--rounds 9] [--threads 1 2] [--only pooled-uniform]

Measures the forward, the whole step (forward, backward, row-wise Adagrad), and the backward alone ("update"),
in nanoseconds per id. Dynamic tables include the hash probe. All are also compared with the floors: bare
loops in C++ over the same rows and slots (floor.py). float16 and bfloat16 rows are compared with dynamic
tables in float32.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True)
class Quantity:
    """A measured quantity.

    Attributes:
        name: "forward", "step" (forward, backward, update) or "update" (backward and update).
        sides: contestants by name.
        before: runs before each contestant's turn, not measured.
    """

    name: str
    sides: Sides
    before: Callable[[int], None] | None = None


def against_static(workload: Workload, huge_pages: bool) -> list[Quantity]:
    """Returns what is measured of dynamic tables, static tables and the floors."""
    mapped = ranks(workload, BATCHES, seed=0)
    raw = [raw_ids(batch) for batch in mapped]
    bag_offsets, id_counts = offsets(workload), counts(workload)
    static, dynamic = static_tables(workload, huge_pages), dynamic_tables(workload)
    grad = output_grad(workload)
    outputs: list[Tensor] = []

    def dynamic_lookup(i: int) -> Tensor:
        return dynamic(raw[i], bag_offsets, training=True, counts=id_counts)

    def static_lookup(i: int) -> Tensor:
        return static(mapped[i], bag_offsets)

    def look_up(turn: int) -> None:
        outputs[:] = [dynamic_lookup(turn % BATCHES)]

    floor = floors(dynamic.tables, raw, workload.bag if workload.pooled else None, grad)
    update = {name: run for name, run in floor.items() if name == "update floor"}
    # In a round each floor takes another batch than the dynamic tables, whose rows are in the caches.
    reads = {
        name: partial(_later, run, 2 * place)
        for place, (name, run) in enumerate(floor.items(), 1)
        if name not in update
    }
    return [
        Quantity(
            "forward",
            {
                "dynamic": forward_of(dynamic_lookup, BATCHES),
                "static": forward_of(static_lookup, BATCHES),
                **reads,
            },
        ),
        Quantity(
            "step",
            {
                "dynamic": step_of(dynamic_lookup, BATCHES, grad),
                "static": step_of(static_lookup, BATCHES, grad),
                **{name: run for name, run in reads.items() if name == "probe floor"},
            },
        ),
        # Both find the caches as a forward leaves them.
        Quantity("update", {"dynamic": lambda _: outputs.pop().backward(grad), **update}, look_up),
    ]


def _later(run: Callable[[int], object], turns: int, turn: int) -> None:
    run(turn + turns)


def half_against_float32(workload: Workload) -> list[Quantity]:
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
    return [Quantity("forward", forward), Quantity("step", step)]


def measured(
    workload: Workload, quantities: Sequence[Quantity], arguments: argparse.Namespace
) -> Iterator[tuple[int, str, dict[str, list[float]], dict[str, dict[str, float]]]]:
    """Yields threads, the quantity's name, seconds and nanoseconds per id of every measurement."""
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for what in quantities:
            seconds = measure(
                what.sides, arguments.rounds, clock=arguments.clock, before=what.before
            )
            yield threads, what.name, seconds, summary(seconds, workload.ids_per_step)


FLOORS = ("read floor", "copy floor", "probe floor", "update floor")


def run_static(workload: Workload, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures one workload, prints its lines and yields them as results."""
    quantities = against_static(workload, arguments.static_on_huge_pages)
    for threads, what, seconds, numbers in measured(workload, quantities, arguments):
        line = f"{workload.name:18} {threads:7} {what:8}"
        for side in ("dynamic", "static", *FLOORS):
            line += f" {numbers[side]['median_ns']:7.1f}" if side in numbers else f" {'-':>7}"
        if "static" in seconds:
            seen = ratio(seconds, "static", "dynamic")
            line += f"  {spread(seen)}"
            yield result(workload.name, threads, what, "static", seen, ns_per_id=numbers)
        gather = "copy floor" if workload.copies else "read floor"
        for side in (gather, "static"):
            if "probe floor" in seconds and side in seconds:
                together = zip(seconds[side], seconds["probe floor"], strict=True)
                seconds[f"{side} + probe"] = [one + probe for one, probe in together]
        for name in (*FLOORS, f"{gather} + probe", "static + probe"):
            if name not in seconds:
                continue
            above = ratio(seconds, "dynamic", name)
            more = {"ns_per_id": numbers} if "static" not in seconds else {}
            yield result(workload.name, threads, what, name, above, in_mean=False, **more)
            if name in ("update floor", f"{gather} + probe", "static + probe"):
                line += f"  {spread(above)} of {name}"
        print(line)


def run_half(workload: Workload, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures the dtypes on one workload, prints its lines and yields them as results."""
    quantities = half_against_float32(workload)
    for threads, what, seconds, numbers in measured(workload, quantities, arguments):
        for name in HALF_DTYPES:
            seen = ratio(seconds, "float32", name)
            print(
                f"{workload.name:18} {threads:7} {what:8} {numbers[name]['median_ns']:7.1f}"
                f"{'':40}  {spread(seen)} {name} against float32 "
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
    sides = ("ours", "static", *(floor.removesuffix(" floor") for floor in FLOORS))
    print(
        f"{'workload':18} {'threads':>7} {'what':8}" + "".join(f" {side:>7}" for side in sides)
        + "  ns an id; ratios [quartiles]"
    )  # fmt: skip
    for workloads, run in (((*POOLED, *ONE_HOT, *SEQUENCE), run_static), (HALF, run_half)):
        for workload in workloads:
            if arguments.only and workload.name not in arguments.only:
                continue
            rows.extend(run(tiny(workload) if arguments.quick else workload, arguments))
            gc.collect()  # the next tables need the memory
    finish("lookup", rows, arguments)


if __name__ == "__main__":
    main()
