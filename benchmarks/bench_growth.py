"""Insertion of new ids into one table that grows to many rows, against known ids in the same table.

    python benchmarks/bench_growth.py [--rows 20000000] [--threads 2] [--dim 64]

Steps of 40,960 new ids (a pooled batch of 4,096 bags) take turns with steps of as many ids drawn from the ids
already in the table. Prints the mean nanoseconds per id, forward and whole step, for each tenth of the rows.
Then: the last tenth against the first, the slowest step against the median step, and the bytes of the table
besides weights and optimizer state: pages in memory, of every tensor reachable from the table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from axes import GROWTH_MARKS, GROWTH_ROWS, GROWTH_STEP, THREADS, raw_ids
from contestants import empty_table
from interleaved import CLOCKS, finish, options, quartiles, result
from layouts import DynamicTable, TableGroup
from resident import resident_bytes
from torch import Tensor

from torchrec_dyn.ops import advise_huge_pages

BAG = 10


def touch_memory(size: int) -> None:
    """Writes `size` bytes once and frees them, so that the host of a virtual machine has backed them.

    The first write to memory that no process has used since the machine booted costs ten times as much as
    a later page fault (measured: 289 against 28 ns for 256 bytes). The tables do not cause that cost.
    """
    memory = torch.empty(size, dtype=torch.uint8)
    advise_huge_pages(memory)
    memory.zero_()


def tensors_of(thing: Any, seen: set[int]) -> list[Tensor]:
    """Returns the tensors reachable from an object, each once."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    inside: list[Any] = []
    if isinstance(thing, dict):
        inside = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        inside = list(thing)
    elif type(thing).__module__.startswith("torchrec_dyn"):
        inside = list(getattr(thing, "__dict__", {}).values())
    return [tensor for one in inside for tensor in tensors_of(one, seen)]


def bytes_beside(table: DynamicTable) -> int:
    """Returns the bytes that the table holds in memory besides the rows of weights and optimizer state."""
    rows = {block.data_ptr() for store in table.stores for block in store.blocks}
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_of(table, set())}
    return sum(resident_bytes(tensor) for at, tensor in storages.items() if at not in rows)


class Growth:
    """One table, and the seconds of each step of new and of known ids.

    Attributes:
        seconds: ("new" or "known", "forward" or "step") -> one number per step.
        beside: rows after a step -> bytes besides weights and optimizer state.
    """

    def __init__(self, rows: int, step: int, dim: int, clock: str) -> None:
        self.table = empty_table("table", rows, dim)
        self.group = TableGroup([self.table], [1], "sum")
        self.size = step
        self.offsets = torch.arange(0, step + 1, BAG)
        self.grad = torch.randn(step // BAG, dim) * 1e-3
        self.now = CLOCKS[clock]
        self.seconds: dict[tuple[str, str], list[float]] = {
            (ids, what): [] for ids in ("new", "known") for what in ("forward", "step")
        }
        self.beside: dict[int, int] = {}
        for done in range(0, rows - step + 1, step):
            self._train("new", raw_ids(torch.arange(done, done + step)))
            self._train("known", raw_ids(torch.randint(0, done + step, (step,))))
            assert self.table.num_rows == done + step
            self.beside[done + step] = bytes_beside(self.table)

    def _train(self, kind: str, ids: Tensor) -> None:
        begin = self.now()
        output = self.group(ids, self.offsets, training=True)
        middle = self.now()
        output.backward(self.grad)
        end = self.now()
        self.seconds[kind, "forward"].append(middle - begin)
        self.seconds[kind, "step"].append(end - begin)

    def tenths(self, kind: str, what: str) -> list[float]:
        """Returns the mean nanoseconds per id in each tenth of the steps."""
        seconds = self.seconds[kind, what]
        bounds = [len(seconds) * tenth // 10 for tenth in range(11)]
        return [
            statistics.mean(seconds[begin:end]) / self.size * 1e9 for begin, end in pairwise(bounds)
        ]


def report(growth: Growth, threads: int) -> list[dict[str, Any]]:
    """Prints the tables of one run and returns its results."""
    rows = growth.table.num_rows
    name = f"growth to {rows}"
    lines: list[dict[str, Any]] = []
    print(f"{threads} threads, {rows:,} rows, ns an id by tenth of the way")
    for what in ("forward", "step"):
        for kind in ("new", "known"):
            print(f"{what:8} {kind:6}" + "".join(f"{ns:8.1f}" for ns in growth.tenths(kind, what)))
        new, known = growth.seconds["new", what], growth.seconds["known", what]
        by_tenth = [
            a / b for a, b in zip(*(growth.tenths(k, what) for k in ("new", "known")), strict=True)
        ]
        _, low, high = quartiles(by_tenth)
        flat = growth.tenths("new", what)
        slowest = max(new) / statistics.median(new)
        numbers = {"dynamic": {"median_ns": statistics.mean(new) / growth.size * 1e9}}
        numbers["known"] = {"median_ns": statistics.mean(known) / growth.size * 1e9}
        for against, seen in (
            ("known ids", (sum(new) / sum(known), low, high)),
            ("first tenth", (flat[-1] / flat[0],) * 3),
            ("median step", (slowest,) * 3),
        ):
            lines.append(
                result(name, threads, what, against, seen, in_mean=False, ns_per_id=numbers)
            )
        print(
            f"{what}: new ids {lines[-3]['ratio']:.2f}x the known ones, last tenth "
            f"{lines[-2]['ratio']:.2f}x the first, slowest step {slowest:.2f}x the median one"
        )
    return lines


def memory(growth: Growth) -> list[dict[str, Any]]:
    """Prints and returns the bytes per row besides weights and optimizer state."""
    lines = []
    for mark in GROWTH_MARKS:
        rows = min(growth.beside, key=lambda rows: abs(rows - mark))
        if abs(rows - mark) <= growth.size:
            lines.append({"what": "bytes a row", "rows": rows, "bytes": growth.beside[rows] / rows})
    above = {rows: size / rows for rows, size in growth.beside.items() if rows >= 100_000}
    if above:
        worst = max(above, key=lambda rows: above[rows])
        lines.append({"what": "most bytes a row above 100k", "rows": worst, "bytes": above[worst]})
    for line in lines:
        print(f"{line['what']}: {line['bytes']:.1f} at {line['rows']:,} rows")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Grows one table for each number of threads and prints the tables."""
    parser = options(__doc__, THREADS[:1])
    parser.add_argument("--rows", type=int, default=GROWTH_ROWS)
    parser.add_argument("--dim", type=int, default=64)
    arguments: argparse.Namespace = parser.parse_args(argv)
    total, step = (20_000, 500) if arguments.quick else (arguments.rows, GROWTH_STEP)
    lines: list[dict[str, Any]] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        touch_memory(total * (4 * arguments.dim + 100))
        growth = Growth(total, step, arguments.dim, arguments.clock)
        lines += report(growth, threads) + memory(growth)
    finish("growth", lines, arguments)


if __name__ == "__main__":
    main()
