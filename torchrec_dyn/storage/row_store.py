"""RowStore: rows of one kind (weights, or one optimizer state) in blocks that never move.

A table grows by appending a block of 2^shift rows; no row is copied (docs/dev/decisions/0002). A new block is
reserved, not written: Linux commits its pages on first touch, so memory follows the rows in use.

A GPU commits memory at once. There the last block grows in place, in a range of addresses (block_memory.py).
The blocks of a table in mapped files are memory of files on a disk (block_memory.py). Those of a table in
host memory are memory of the host that a GPU reads and writes; some rows are in frames (row_cache.py).

Legend: M rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.initializers import Initializer, table_key
from torchrec_dyn.storage import block_memory
from torchrec_dyn.storage.block_memory import (
    HUGE_PAGE_BYTES,
    HUGE_PAGES,
    JOIN_PAGES,
    SMALL_PAGES,
    host_block,
    lasting,
    mapped_block,
)
from torchrec_dyn.storage.host_reads import for_device, host_numbers, keep_in_use
from torchrec_dyn.storage.id_map import BLOCKS, SLOT_BYTES
from torchrec_dyn.storage.row_cache import CachedTables, RowCache

_LINE_BYTES = 64
# Rows beyond so many bytes get a huge page: on small pages steps of 20 tables took 1.2 of the time.
_SMALL_PAGES_BYTES = 128 << 10


def most_block_bytes(files: str | None) -> int:
    """Returns the upper bound of the bytes of a block on the CPU. `files` is that of its `RowStore`."""
    return knobs.BLOCK_BYTES if files is None else knobs.FILE_BYTES


def block_shift(
    row_limit: int, row_bytes: int, device_type: str = "cpu", most_bytes: int | None = None
) -> int:
    """Returns the binary logarithm of the rows of a block; a small table takes one small block."""
    if device_type in knobs.RANGE_DEVICES:
        return block_memory.range_shift(row_limit, row_bytes)
    most_bytes = knobs.BLOCK_BYTES if most_bytes is None else most_bytes
    rows = max(1, min(most_bytes // max(1, row_bytes), row_limit))
    return max(4, rows.bit_length() - 1)


def most_store_bytes(rows: int, row_bytes: int, shift: int, device_type: str = "cpu") -> int:
    """Returns the most bytes of a store with `rows` rows in use, which planners reserve."""
    if device_type not in knobs.RANGE_DEVICES:
        return rows * row_bytes
    whole, (blocks, rest) = 1 << shift, divmod(rows, 1 << shift)
    block_bytes = block_memory.most_bytes(whole, row_bytes, whole)
    return blocks * block_bytes + block_memory.most_bytes(rest, row_bytes, whole)


@dataclass(eq=False)
class RowStore:
    """A store of rows in blocks [2^shift, columns]; in ranges the last may have fewer rows.

    `files` is the directory of the files from which the blocks are mapped; None: they are in memory.
    `on_host`: the blocks of a GPU's store are memory of the host.
    """

    columns: int
    shift: int
    dtype: torch.dtype
    device: torch.device
    files: str | None = None
    on_host: bool = False

    def __post_init__(self) -> None:
        self.blocks: list[Tensor] = []
        self._spare: list[Tensor] = []
        self.grows_in_place = self.device.type in knobs.RANGE_DEVICES and not self.on_host
        self.is_cpu = self.device.type == "cpu"  # torch takes microseconds for the name of a device
        self._begins_small = False  # True: the first rows are on small pages
        self._process = os.getpid()
        self.cache: RowCache | None = None
        self.frames: RowStore  # of the cache

    def join(self, cache: RowCache) -> None:
        """Makes a store in host memory use the frames of a cache; rows in frames are read from the store."""
        frames = RowStore(self.columns, self.shift, self.dtype, self.device)
        frames.reserve(cache.frames)
        if cache.is_used:
            most = max(1, knobs.CROSSING_BYTES // self.row_bytes)
            owners = cache.owners(self.capacity)  # a step that failed gave frames to rows to come
            for places, rows in zip(*(part.split(most) for part in owners), strict=True):
                frames.write(places, self.read(rows))
        self.frames, self.cache = frames, cache

    def empty(self, columns: int | None = None, dtype: torch.dtype | None = None) -> RowStore:
        """Returns an empty store of the same kind for rows of another width or dtype, by default of these."""
        columns, dtype = columns or self.columns, dtype or self.dtype
        return RowStore(columns, self.shift, dtype, self.device, self.files, self.on_host)

    @property
    def capacity(self) -> int:
        """Rows that the blocks can hold."""
        capacity = len(self.blocks) << self.shift
        if self.grows_in_place and self.blocks:
            capacity -= (1 << self.shift) - len(self.blocks[-1])
        return capacity

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.columns * self.dtype.itemsize

    def reserve(self, rows: int, frames: int = 0) -> None:
        """Appends blocks until `rows` rows fit, and `frames` frames. Existing rows do not move."""
        if self.grows_in_place and self.capacity < rows:
            self._grow(rows)
        is_new = not self.blocks
        while self.capacity < rows:
            if not self._spare:
                self._spare = self._several_blocks()
            BLOCKS.renew()
            self.blocks.append(self._spare.pop())
        if is_new or self._begins_small:
            self._choose_pages(rows)
        if self.cache is not None:
            self.frames.reserve(frames)

    def _choose_pages(self, rows: int) -> None:
        """Puts the first rows of a new store on small pages, and joins these once `rows` rows are in use.

        The system clears a whole huge page at its first row. 1,000 tables of few rows took 2 GB and 3 s.
        """
        if not self.is_cpu or self.files is not None:
            return
        is_mapped = bool(self.blocks) and self.blocks[0].nbytes >= HUGE_PAGE_BYTES
        is_small = is_mapped and rows * self.row_bytes <= _SMALL_PAGES_BYTES
        if is_small and not self._begins_small:
            block_memory.advise(self.blocks[0], HUGE_PAGE_BYTES, SMALL_PAGES)
        elif self._begins_small and not is_small:
            block_memory.advise(self.blocks[0], HUGE_PAGE_BYTES, HUGE_PAGES, JOIN_PAGES)
        self._begins_small = is_small

    @lasting
    def _several_blocks(self) -> list[Tensor]:
        """Returns new blocks, reserved together: as many as the store has, up to `most_block_bytes` in all.

        The blocks of a state with one number per row are smaller than a huge page; side by side they
        share huge pages. A CPU's blocks of a page or more are mapped: malloc would take them from its heap
        once one was freed, and there memory is committed already, and stays (docs/dev/decisions/0002).
        """
        block_rows, count = 1 << self.shift, 1
        if self.is_cpu:  # elsewhere memory is committed at once
            most = most_block_bytes(self.files) // (block_rows * self.row_bytes)
            count = max(1, min(len(self.blocks), most))
        rows = count * block_rows
        if self.on_host:
            together = host_block(rows, self.columns, self.dtype, self.device)
        elif self.files is not None:
            together = mapped_block(self.files, rows, self.columns, self.dtype)
        elif self.is_cpu and rows * self.row_bytes >= HUGE_PAGE_BYTES:
            together = self._zeros(rows)
        else:
            together = torch.empty(rows, self.columns, dtype=self.dtype, device=self.device)
        return list(together.split(block_rows))[::-1]

    @lasting
    def _zeros(self, rows: int) -> Tensor:
        """Returns [rows, columns] of zeros; from HUGE_PAGE_BYTES on a CPU commits it where it is written."""
        nothing = torch.empty(0, 2, dtype=torch.int64, device=self.device)
        lines = -(-rows * self.row_bytes // _LINE_BYTES)
        slots = ops.new_slots(nothing, max(1, lines) * _LINE_BYTES // SLOT_BYTES)
        return slots.view(self.dtype).flatten()[: rows * self.columns].view(-1, self.columns)

    @lasting
    def _grow(self, rows: int) -> None:
        """Makes the last block longer, and appends blocks, until `rows` rows fit."""
        blocks, whole, missing = list(self.blocks), 1 << self.shift, rows - self.capacity
        nothing = torch.empty(0, self.columns, dtype=self.dtype, device=self.device)
        while missing > 0:
            short = bool(blocks) and len(blocks[-1]) < whole
            last = blocks.pop() if short else nothing
            block = block_memory.longer_block(last, min(whole, len(last) + missing), whole)
            missing -= len(block) - len(last)
            blocks.append(block)
        BLOCKS.renew()
        self.blocks = blocks

    @property
    def all_blocks(self) -> list[Tensor]:
        """The blocks of the rows, then those of the frames of a cache."""
        return self.blocks if self.cache is None else self.blocks + self.frames.blocks

    def places(self, rows: Tensor) -> Tensor:
        """Returns where rows [M] int64 are in `all_blocks`, [M] int64."""
        if self.cache is None or not self.cache.is_used:
            return rows
        cached = CachedTables({0: self.cache}, [len(self.blocks) << self.shift])
        return cached.places(rows, host_numbers([0, rows.numel()]))

    def blocks_of_first(self, rows: int) -> list[Tensor]:
        """Returns the blocks of the first `rows` rows, then of frames; in ranges the last is cut."""
        blocks = self.blocks[: -(-rows >> self.shift)]
        if self.grows_in_place and blocks:
            blocks[-1] = blocks[-1][: rows - ((len(blocks) - 1) << self.shift)]
        if self.cache is not None:
            blocks = blocks + self.frames.blocks_of_first(self.cache.frames)
        return blocks

    def read(self, rows: Tensor) -> Tensor:
        """Returns copies of rows [M] int64, [M, columns]; -1 reads as zeros."""
        if self.files is not None:
            parts = [self._read_from_files(some) for some in rows.split(knobs.ROWS_READ_TOGETHER)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        places = self.places(rows)
        return ops.gather_rows(places, self.all_blocks, self.shift, self.columns, self.dtype)

    def _read_from_files(self, rows: Tensor) -> Tensor:
        self.ask_for(rows)
        return ops.gather_rows(rows, self.blocks, self.shift, self.columns, self.dtype)

    def ask_for(self, rows: Tensor) -> None:
        """Asks for rows [M] int64, -1 for none, to be read from the files, and does not wait for them."""
        if self.files is not None and self.blocks:
            ops.ask_for_rows(rows, self.blocks, self.shift, self.columns)

    def snapshot(self) -> RowStore:
        """Returns a store of the present blocks, for another thread; a growth does not change it."""
        store = self.empty()
        store.blocks = list(self.blocks)
        return store

    def check_process(self, where: str) -> None:
        """Raises RuntimeError in a fork of the process that mapped the files: both have the same pages."""
        if self.files is not None and self._process != os.getpid():
            raise RuntimeError(
                f"{where}: expected the process that made the table, got a fork of it, which shares the rows "
                "in mapped files with it. Train and edit in that process, or make the model after the fork."
            )

    def read_ascending(self, rows: Tensor) -> Tensor:
        """Returns distinct ascending rows [M] int64, [M, columns]: a view of neighbours in one block."""
        # On a GPU this check would be a wait, and a copy costs little.
        if rows.is_cpu and rows.numel() and int(rows[-1]) - int(rows[0]) == rows.numel() - 1:
            view = self.within(int(rows[0]), 0, (rows.numel(), self.columns))
            if view is not None:
                return view
        return self.read(rows)

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Writes values [M, columns], rounded to nearest, to rows [M] int64; the last of equal rows stays."""
        if rows.numel() == 0:  # without a block the op cannot determine the dtype
            return
        self.check_process("RowStore")
        values = values.to(self.dtype).contiguous()
        places = self.places(rows)
        ops.scatter_rows_(places, values, self.all_blocks, self.shift, self.columns)

    def within(self, first_row: int, first_column: int, size: Sequence[int]) -> Tensor | None:
        """Returns a range of `size` rows and columns as a view; None if the rows lie in several blocks."""
        block, place = first_row >> self.shift, first_row & ((1 << self.shift) - 1)
        if place + size[0] > 1 << self.shift:
            return None
        return self.blocks[block][place : place + size[0], first_column : first_column + size[1]]

    def put(self, first_row: int, first_column: int, values: Tensor) -> None:
        """Copies values [M, C], rounded to nearest, into rows and columns, unless they lie there.

        For stores that no step has used: rows in frames stay as they are.
        """
        columns = slice(first_column, first_column + values.shape[1])
        end, row = first_row + len(values), first_row
        while row < end:
            block, place = row >> self.shift, row & ((1 << self.shift) - 1)
            count = min(end - row, (1 << self.shift) - place)
            piece = values[row - first_row : row - first_row + count]
            into = self.blocks[block][place : place + count, columns]
            if into.device != piece.device or into.data_ptr() != piece.data_ptr():
                into.copy_(for_device(piece, into.device))
            row += count

    def keep_in_use(self) -> None:
        """Keeps the blocks, which are dropped next, for present kernels.

        Ranges, and blocks in host memory, wait for them themselves.
        """
        if self.cache is not None:
            self.cache.keep_in_use()
            self.frames.keep_in_use()
        in_range = self.grows_in_place and block_memory.in_range(1 << self.shift, self.row_bytes)
        if not (in_range or self.on_host):
            keep_in_use(*self.blocks)

    def reserve_zeros(self, rows: int) -> None:
        """Fills an empty store with `rows` rows of zeros; a CPU commits memory where rows are written."""
        if self.files is not None:  # a new file reads as zeros
            self.reserve(rows)
            return
        if self.grows_in_place or self.on_host:
            self.reserve(rows)
            for block in self.blocks:
                block.zero_()
            return
        blocks = -(-rows >> self.shift)
        together = self._zeros(blocks << self.shift)
        BLOCKS.renew()
        self.blocks = list(together.split(1 << self.shift)) if blocks else []
        self._choose_pages(rows)

    def reserve_filled(self, rows: int, number: float) -> None:
        """Fills an empty store with `rows` rows of a number."""
        if number == 0.0:
            self.reserve_zeros(rows)
            return
        self.reserve(rows)
        for first, block in zip(range(0, rows, 1 << self.shift), self.blocks, strict=False):
            block[: rows - first].fill_(number)

    def fill(self, rows: Tensor, number: float) -> None:
        """Fills rows [M] int64 with a number."""
        constant = [number, 0.0, 0.0, 1.0, 0.0, 1.0]
        places = self.places(rows)
        ops.init_rows_(rows, places, self.all_blocks, self.shift, self.columns, 0, 0, constant, 0)


@dataclass(eq=False)
class InitialRows:
    """The initial rows of one table, or of the column shard of it that begins at `first_column`."""

    initializer: Initializer
    seed: int
    name: str
    first_column: int
    initial_states: Sequence[float] = ()

    def __post_init__(self) -> None:
        self._kind, self._parameters = self.initializer.parameters()
        self._key = table_key(self.seed, self.name, "initial row")

    def numbers(self) -> tuple[tuple[int, int, int], Sequence[float]]:
        """Returns kind, key and first column, and the parameters, as `ops.prepare_tables` takes them."""
        return (self._kind, self._key, self.first_column), self._parameters

    def write(
        self, ids: Tensor, rows: Tensor, store: RowStore, states: Sequence[RowStore] = ()
    ) -> None:
        """Writes the initial rows of ids [M] int64 to rows [M] int64, and those of `states`."""
        ops.init_rows_(
            ids, store.places(rows), store.all_blocks, store.shift, store.columns, self.first_column,
            self._kind, self._parameters, self._key,
        )  # fmt: skip
        if states:
            for state, number in zip(states, self.initial_states, strict=True):
                state.fill(rows, number)


@dataclass(frozen=True)
class TableBlocks:
    """The blocks of one store of each of T tables: one flat list, and a layout of each table.

    Attributes:
        blocks: the blocks of all tables, one after another.
        layout: [T, 4] int64 (csrc/storage/blocks.h).
    """

    blocks: list[Tensor]
    layout: Tensor


def blocks_of(stores: Sequence[RowStore], rows: Sequence[int] | None = None) -> TableBlocks:
    """Returns the blocks of T stores, one for each table; with `rows` [T], only those of its first rows."""
    lines: list[list[int]] = []
    blocks: list[Tensor] = []
    for place, store in enumerate(stores):
        own = store.all_blocks if rows is None else store.blocks_of_first(rows[place])
        lines.append([len(blocks), len(own), store.shift, store.columns])
        blocks.extend(own)
    return TableBlocks(blocks, host_numbers(lines))
