"""The physical floors: bare prefetching loops in C++ over the memory that a lookup or an update must touch.

    python benchmarks/floor.py          # nanoseconds per id for several prefetch distances

The first use compiles them for this machine. They take row numbers, and the blocks and maps of the dynamic
tables (on huge pages). "read" adds the rows into a register. "copy" writes them to a new tensor, page faults
included, as any forward that returns every row must do. "probe" reads the slot of each id. "update" reads the
gradient and reads and writes row and state of each id, in the order of the batch. "fresh" writes memory that
no one has written before. "word" adds a number to the score of each id's row. "bit" sets a bit for each row.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from layouts import TableShard
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
    loaded.probe_floor.restype = loaded.update_floor.restype = None
    loaded.fresh_floor.restype = loaded.word_floor.restype = loaded.bit_floor.restype = None
    return loaded


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _pointers(tensors: Iterable[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def write_fresh(floors: ctypes.CDLL, memory: Tensor) -> None:
    """Writes every byte of fresh memory on all threads of torch.

    Args:
        floors: result of `compiled`.
        memory: contiguous memory that no one has written yet.
    """
    threads = ctypes.c_int64(torch.get_num_threads())
    floors.fresh_floor(_pointer(memory), ctypes.c_int64(memory.nbytes), threads)


class Floor:
    """Touches the rows and slots of batches in the blocks and maps of dynamic tables.

    Args:
        tables: T tables of one width and dtype.
        ids: batches, each [N] int64 raw ids, N / T for each table, all known.
        bag: ids of a bag; None for a sequence.

    Raises:
        NoFloorError: the floor does not compile, or a row is not a whole number of cache lines.
    """

    def __init__(
        self, tables: Sequence[TableShard], ids: Sequence[Tensor], bag: int | None
    ) -> None:
        self._floors = compiled()
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
        self._places = [
            torch.cat([_places_of(t)[part] for t, part in zip(tables, rows.chunk(count), strict=True)])
            for rows in self._rows
        ]  # fmt: skip
        self._grad_places = _grad_places(self._offsets, bag, self._columns)
        maps = [table.id_map.slots for table in tables]
        blocks = [block for store in weights for block in store.blocks]
        states = [block for t in tables for store in t.states[:1] for block in store.blocks]
        self._held = [*blocks, *states, *maps]  # keeps the memory of the pointers below
        self._maps, self._blocks, self._states = map(_pointers, (maps, blocks, states))
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

    def probe(self, turn: int, ahead: int = AHEAD) -> Tensor:
        """Returns the rows of the ids of a batch, [N] int64, read from their slots."""
        places = self._places[turn % len(self._places)]
        out = torch.empty_like(places)
        self._floors.probe_floor(
            _pointer(places), _pointer(self._offsets), ctypes.c_int64(self._tables),
            _pointer(self._maps), _pointer(out), ctypes.c_int64(ahead), self._threads(),
        )  # fmt: skip
        return out

    def update(self, turn: int, grad: Tensor, rate: float = 0.0, ahead: int = AHEAD) -> None:
        """Adds `rate` to the state of each id's row, and subtracts `rate` times the gradient from the row.

        Args:
            turn: number of the batch.
            grad: gradient of the output, [B, T * D] for bags, [N, D] for a sequence.
            rate: 0 writes every number as it was.
            ahead: ids between a prefetch and its use.
        """
        rows = self._rows[turn % len(self._rows)]
        self._floors.update_floor(
            _pointer(rows), _pointer(self._offsets), ctypes.c_int64(self._tables),
            _pointer(self._blocks), _pointer(self._states), _pointer(self._first_block),
            _pointer(self._shifts), ctypes.c_int64(self._columns), _pointer(grad),
            _pointer(self._grad_places), ctypes.c_float(rate), ctypes.c_int64(ahead), self._threads(),
        )  # fmt: skip

    def _threads(self) -> ctypes.c_int64:
        return ctypes.c_int64(min(torch.get_num_threads(), self._tables))

    def _run(self, turn: int, out: Tensor | None, ahead: int) -> int:
        return self._floors.gather_floor(
            _pointer(self._rows[turn % len(self._rows)]), _pointer(self._offsets),
            ctypes.c_int64(self._tables), _pointer(self._blocks), _pointer(self._first_block),
            _pointer(self._shifts), ctypes.c_int64(self._row_bytes), _pointer(out),
            ctypes.c_int64(ahead), self._threads(),
        )  # fmt: skip


class WordFloor:
    """Adds a number to the score of each id's row in one table, for as many threads as torch has now.

    Args:
        table: a table with a life.
        ids: batches, each [N] int64 raw ids, all known.

    Raises:
        NoFloorError: the floor does not compile.
    """

    def __init__(self, table: TableShard, ids: Sequence[Tensor]) -> None:
        self._floor = compiled().word_floor
        store = table.life.scores.store
        # The blocks are kept for the pointers.
        self._held, self._shift, self._blocks = store.blocks, store.shift, _pointers(store.blocks)
        self._threads = torch.get_num_threads()
        self._batches = [_by_lines(table.id_map.lookup(b), 8, self._threads) for b in ids]

    def __call__(self, turn: int, by: int = 0, ahead: int = AHEAD) -> None:
        """Adds `by` to the words of a batch; 0 writes every word as it was."""
        rows, offsets = self._batches[turn % len(self._batches)]
        self._floor(
            _pointer(rows), _pointer(offsets), _pointer(self._blocks), ctypes.c_int64(self._shift),
            ctypes.c_uint64(by), ctypes.c_int64(ahead), ctypes.c_int64(self._threads),
        )  # fmt: skip


class BitFloor:
    """Sets the bit of each id's row in bits of its own, for as many threads as torch has now.

    Args:
        table: any table.
        ids: batches, each [N] int64 raw ids, all known.

    Raises:
        NoFloorError: the floor does not compile.
    """

    def __init__(self, table: TableShard, ids: Sequence[Tensor]) -> None:
        self._floor = compiled().bit_floor
        self.bits = torch.zeros(table.weights.capacity // 8 + 1, dtype=torch.uint8)
        self._threads = torch.get_num_threads()
        self._batches = [_by_lines(table.id_map.lookup(b), 512, self._threads) for b in ids]

    def __call__(self, turn: int, ahead: int = AHEAD) -> None:
        """Sets the bits of a batch."""
        rows, offsets = self._batches[turn % len(self._batches)]
        self._floor(
            _pointer(rows), _pointer(offsets), _pointer(self.bits), ctypes.c_int64(ahead),
            ctypes.c_int64(self._threads),
        )  # fmt: skip


def _by_lines(rows: Tensor, rows_of_line: int, threads: int) -> tuple[Tensor, Tensor]:
    """Returns the rows of each thread, by whole cache lines in their order, and where they begin."""
    parts = [rows[rows // rows_of_line % threads == thread] for thread in range(threads)]
    return torch.cat(parts), torch.tensor([0, *(part.numel() for part in parts)]).cumsum(0)


def _grad_places(offsets: Tensor, bag: int | None, columns: int) -> Tensor:
    """Returns where the gradient of each id begins in the gradient of the output, [N] int64."""
    ids, tables = int(offsets[-1]), offsets.numel() - 1
    if bag is None:
        return torch.arange(ids) * columns
    each = torch.arange(ids // tables) // bag * tables
    return torch.cat([(each + t) * columns for t in range(tables)])


def _places_of(table: TableShard) -> Tensor:
    """Returns the slot of each row of a table, [rows] int64."""
    if table.id_map.outgoing is not None:
        raise NoFloorError(f"floor: expected a map that does not grow, got {table.name}.")
    used = table.id_map.slots[:, 1].nonzero().flatten()
    places = torch.empty(table.num_rows, dtype=torch.int64)
    places[table.id_map.slots[used, 1] - 1] = used
    return places


def floors(
    tables: Sequence[TableShard], ids: Sequence[Tensor], bag: int | None, grad: Tensor
) -> dict[str, Callable[[int], object]]:
    """Returns the floors as contestants by name; if there is no floor, an empty dict and a message on stderr.

    Args:
        tables: T tables.
        ids: batches of known ids, each [N] int64.
        bag: ids of a bag; None for a sequence.
        grad: gradient of the output.
    """
    try:
        floor = Floor(tables, ids, bag)
    except NoFloorError as error:
        print(error, file=sys.stderr)
        return {}
    return {
        "read floor": floor.read,
        "copy floor": floor.copy,
        "probe floor": floor.probe,
        "update floor": lambda turn: floor.update(turn, grad),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the nanoseconds per id for each prefetch distance."""
    from axes import POOLED, ranks, raw_ids, tiny
    from contestants import dynamic_tables, output_grad
    from interleaved import measure, options, summary

    arguments = options(__doc__, [1]).parse_args(argv)
    workload = tiny(POOLED[0]) if arguments.quick else POOLED[0]
    floor = Floor(
        dynamic_tables(workload).tables,
        [raw_ids(batch) for batch in ranks(workload, 4, seed=0)],
        workload.bag,
    )
    runs: dict[str, Callable[..., object]] = {
        "read": floor.read, "copy": floor.copy, "probe": floor.probe,
        "update": partial(floor.update, grad=output_grad(workload)),
    }  # fmt: skip
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for name, run in runs.items():
            sides = {f"{n:3} ahead": partial(run, ahead=n) for n in (0, 8, 16, 32, 48, 64, 96, 128)}
            seconds = measure(sides, arguments.rounds, clock=arguments.clock)
            for distance, numbers in summary(seconds, workload.ids_per_step).items():
                print(f"{name}, {threads} threads, {distance}: {numbers['median_ns']:.1f} ns an id")


if __name__ == "__main__":
    main()
