"""The physical floor: a bare prefetching gather in C++ of the rows that a lookup reads.

    python benchmarks/floor.py          # nanoseconds per row for several prefetch distances

The first use compiles it for this machine. It takes row numbers and the blocks of the dynamic tables (on huge
pages). "read" adds the rows into a register. "copy" writes them to a new tensor, page faults included, as any
forward that returns every row must do.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from layouts import DynamicTable
from torch import Tensor

# Rows between a prefetch and its use: the best of main() below on an AMD EPYC (Zen 4); flat from 32 to 96.
AHEAD = 48
_SOURCE = Path(__file__).with_name("floor.cpp")
_BUILD = _SOURCE.parent.parent / "build" / "floor"


class NoFloorError(RuntimeError):
    """The floor cannot be compiled or run here."""


def compiled() -> ctypes.CDLL:
    """Compiles floor.cpp if it has changed, and loads it.

    Raises:
        NoFloorError: there is no compiler, or the compiler failed.
    """
    flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"]
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join(flags).encode()).hexdigest()[:16]
    library = _BUILD / f"{key}.so"
    if not library.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        command = ["g++", *flags, str(_SOURCE), "-o", str(library)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise NoFloorError(
                f"floor: expected g++ to compile {_SOURCE.name}, got {getattr(error, 'stderr', error)}."
            ) from error
    loaded = ctypes.CDLL(str(library))
    loaded.gather_floor.restype = ctypes.c_uint64
    return loaded


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


class Floor:
    """Reads or copies the rows of batches from the blocks of dynamic tables.

    Args:
        tables: T tables of one width and dtype.
        ids: batches, each [N] int64 raw ids, N / T for each table, all known.

    Raises:
        NoFloorError: the floor does not compile, or a row is not a whole number of cache lines.
    """

    def __init__(self, tables: Sequence[DynamicTable], ids: Sequence[Tensor]) -> None:
        self._gather = compiled().gather_floor
        count = len(tables)
        self._tables = count
        weights = [table.weights for table in tables]
        self._columns, self._dtype = weights[0].columns, weights[0].dtype
        self._row_bytes = weights[0].row_bytes
        if self._row_bytes % 64:
            raise NoFloorError(
                f"floor: expected rows of whole cache lines, got {self._row_bytes} bytes."
            )
        self._rows = [
            torch.cat([t.find_or_insert(part) for t, part in zip(tables, batch.chunk(count), strict=True)])
            for batch in ids
        ]  # fmt: skip
        self._offsets = torch.arange(count + 1) * (self._rows[0].numel() // count)
        blocks = [block for store in weights for block in store.blocks]
        self._held = blocks  # keeps the memory of the pointers below
        self._blocks = torch.tensor([block.data_ptr() for block in blocks])
        firsts = [0]
        for store in weights:
            firsts.append(firsts[-1] + len(store.blocks))
        self._first_block = torch.tensor(firsts)
        self._shifts = torch.tensor([store.shift for store in weights])

    def read(self, turn: int, ahead: int = AHEAD) -> int:
        """Reads the rows of a batch; returns the sum of their 64-bit words modulo 2^64."""
        return self._run(turn, None, ahead)

    def copy(self, turn: int, ahead: int = AHEAD) -> Tensor:
        """Returns the rows of a batch, copied to a new tensor [N, columns]."""
        rows = self._rows[turn % len(self._rows)]
        out = torch.empty(rows.numel(), self._columns, dtype=self._dtype)
        self._run(turn, out, ahead)
        return out

    def _run(self, turn: int, out: Tensor | None, ahead: int) -> int:
        threads = min(torch.get_num_threads(), self._tables)
        return self._gather(
            _pointer(self._rows[turn % len(self._rows)]), _pointer(self._offsets),
            ctypes.c_int64(self._tables), _pointer(self._blocks), _pointer(self._first_block),
            _pointer(self._shifts), ctypes.c_int64(self._row_bytes), _pointer(out),
            ctypes.c_int64(ahead), ctypes.c_int64(threads),
        )  # fmt: skip


def floors(
    tables: Sequence[DynamicTable], ids: Sequence[Tensor]
) -> dict[str, Callable[[int], object]]:
    """Returns the floors as contestants by name; if there is no floor, an empty dict and a message on stderr.

    Args:
        tables: T tables.
        ids: batches of known ids, each [N] int64.
    """
    try:
        floor = Floor(tables, ids)
    except NoFloorError as error:
        print(error, file=sys.stderr)
        return {}
    return {"read floor": floor.read, "copy floor": floor.copy}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the nanoseconds per row for each prefetch distance."""
    from axes import POOLED, ranks, raw_ids, tiny
    from contestants import dynamic_tables
    from interleaved import measure, options, summary

    arguments = options(__doc__, [1]).parse_args(argv)
    workload = tiny(POOLED[0]) if arguments.quick else POOLED[0]
    floor = Floor(
        dynamic_tables(workload).tables, [raw_ids(batch) for batch in ranks(workload, 4, seed=0)]
    )
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for name, run in (("read", floor.read), ("copy", floor.copy)):
            sides = {f"{n:3} ahead": partial(run, ahead=n) for n in (0, 8, 16, 32, 48, 64, 96, 128)}
            seconds = measure(sides, arguments.rounds, clock=arguments.clock)
            for distance, numbers in summary(seconds, workload.ids_per_step).items():
                print(f"{name}, {threads} threads, {distance}: {numbers['median_ns']:.1f} ns a row")


if __name__ == "__main__":
    main()
