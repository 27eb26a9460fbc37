"""Insertion of new ids into one table that grows to many rows, against known ids in the same table.

    python benchmarks/bench_growth.py [--rows 20000000] [--threads 2] [--dim 64]

Steps of 40,960 new ids (a pooled batch of 4,096 bags) take turns with steps of as many ids drawn from the ids
already in the table, and with the floor: as many bytes of fresh memory as the step of new ids wrote for the
first time (rows, optimizer state, slots), on requested 2 MiB pages, written once on all threads.
Prints the mean nanoseconds per id, forward and whole step, for each tenth of the rows. Then: the last tenth
against the first and the slowest step against the median step, with and without the floor; the slowest steps
and what happened in them; and the bytes of the table besides weights and optimizer state: pages in memory, of
every tensor reachable from the table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from ctypes import CDLL
from itertools import pairwise
from typing import Any

import torch
from axes import GROWTH_MARKS, GROWTH_ROWS, GROWTH_STEP, THREADS, raw_ids
from contestants import empty_table, huge_memory
from floor import compiled, write_fresh
from interleaved import CLOCKS, finish, options, quartiles, result
from layouts import IdMap, TableGroup, TableShard
from resident import resident_bytes
from torch import Tensor

from torchrec_dyn.ops import new_slots

BAG = 10
SLOT_BYTES = 16
SLOWEST = 5


def touch_memory(size: int, huge_pages: bool = True) -> None:
    """Writes `size` bytes once and frees them, so that the host of a virtual machine has backed them.

    The first write to memory that the host has not backed costs twenty times as much as a later page fault
    (measured: 4,800 against 240 us for 2 MiB). The tables do not cause that cost. A system that reports free
    pages to its host loses the backing some two seconds after they were freed.
    """
    memory = huge_memory(size) if huge_pages else torch.empty(size, dtype=torch.uint8)
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


def bytes_beside(table: TableShard) -> int:
    """Returns the bytes that the table holds in memory besides the rows of weights and optimizer state."""
    rows = {block.data_ptr() for store in table.stores for block in store.blocks}
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_of(table, set())}
    return sum(resident_bytes(tensor) for at, tensor in storages.items() if at not in rows)


def filled_slots(id_map: IdMap) -> int:
    """Returns how many slots of the newest array have been filled; of a map that does not grow, all."""
    if id_map.outgoing is None:
        return id_map.capacity
    return id_map.capacity * id_map.moved // len(id_map.outgoing)


class Growth:
    """One table, and the seconds of each step of new and of known ids.

    Attributes:
        seconds: ("new", "known" or "floor", "forward" or "step") -> one number per step.
        happened: what happened in each step of new ids, as text.
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
            (ids, what): [] for ids in ("new", "known", "floor") for what in ("forward", "step")
        }
        self.happened: list[str] = []
        self.beside: dict[int, int] = {}
        floors = compiled()
        for done in range(0, rows - step + 1, step):
            # Rows and slots, and those of the floor; the ends of blocks and maps lie on small pages.
            touch_memory(step * (8 * dim + 1024))
            touch_memory(step * 1024, huge_pages=False)
            array, filled = self.table.id_map.slots, filled_slots(self.table.id_map)
            blocks = len(self.table.weights.blocks)
            self._train("new", raw_ids(torch.arange(done, done + step)))
            id_map = self.table.id_map
            is_same = id_map.slots is array
            slots = filled_slots(id_map) - filled + (0 if is_same else len(array))
            fresh = step * sum(store.row_bytes for store in self.table.stores) + slots * SLOT_BYTES
            events = [f"{fresh / 1e6:.0f} MB of fresh memory"]
            events += ["a new block"] * (len(self.table.weights.blocks) - blocks)
            events += ["" if is_same else "growth begins", "growth" if slots else ""]
            self.happened.append(", ".join(filter(None, events)))
            self._write_fresh(floors, fresh)
            self._train("known", raw_ids(torch.randint(0, done + step, (step,))))
            assert self.table.num_rows == done + step
            self.beside[done + step] = bytes_beside(self.table)

    def _write_fresh(self, floors: CDLL, size: int) -> None:
        """Runs the floor of a step: allocates `size` bytes and writes them once."""
        lines = -(-size // 64)
        begin = self.now()
        memory = new_slots(torch.empty(0, 2, dtype=torch.int64), lines * 64 // SLOT_BYTES)
        write_fresh(floors, memory)
        seconds = self.now() - begin
        for what in ("forward", "step"):
            self.seconds["floor", what].append(seconds)

    def above_floor(self, what: str) -> list[float]:
        """Returns the seconds of each step of new ids, less its floor."""
        new, floor = (self.seconds[kind, what] for kind in ("new", "floor"))
        return [a - b for a, b in zip(new, floor, strict=True)]

    def _train(self, kind: str, ids: Tensor) -> None:
        begin = self.now()
        output = self.group(ids, self.offsets, training=True)
        middle = self.now()
        output.backward(self.grad)
        end = self.now()
        self.seconds[kind, "forward"].append(middle - begin)
        self.seconds[kind, "step"].append(end - begin)

    def tenths(self, seconds: Sequence[float]) -> list[float]:
        """Returns the mean nanoseconds per id in each tenth of the steps, of one number per step."""
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
        for kind in ("new", "known", "floor"):
            flat = growth.tenths(growth.seconds[kind, what])
            print(f"{what:8} {kind:6}" + "".join(f"{ns:8.1f}" for ns in flat))
        all_known, floor = growth.seconds["known", what], growth.seconds["floor", what]
        new = growth.seconds["new", what]
        numbers = {
            side: {"median_ns": statistics.mean(seconds) / growth.size * 1e9}
            for side, seconds in (("dynamic", new), ("known", all_known), ("floor", floor))
        }
        for label, own in ((what, new), (f"{what} - floor", growth.above_floor(what))):
            flat = growth.tenths(own)
            by_tenth = [a / b for a, b in zip(flat, growth.tenths(all_known), strict=True)]
            _, low, high = quartiles(by_tenth)
            slowest = max(own) / statistics.median(own)
            for against, seen in (
                ("known ids", (sum(own) / sum(all_known), low, high)),
                ("first tenth", (flat[-1] / flat[0],) * 3),
                ("median step", (slowest,) * 3),
            ):
                lines.append(
                    result(name, threads, label, against, seen, in_mean=False, ns_per_id=numbers)
                )
            print(
                f"{label}: new ids {lines[-3]['ratio']:.2f}x the known ones, last tenth "
                f"{lines[-2]['ratio']:.2f}x the first, slowest step {slowest:.2f}x the median one"
            )
    forwards = growth.seconds["new", "forward"]
    for step in sorted(range(len(forwards)), key=forwards.__getitem__, reverse=True)[:SLOWEST]:
        floor_ms = growth.seconds["floor", "forward"][step] * 1e3
        print(
            f"slow forward {step} of {len(forwards)}: {forwards[step] * 1e3:.1f} ms, floor {floor_ms:.1f} "
            f"ms; {growth.happened[step]}"
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
        growth = Growth(total, step, arguments.dim, arguments.clock)
        lines += report(growth, threads) + memory(growth)
    finish("growth", lines, arguments)


if __name__ == "__main__":
    main()
