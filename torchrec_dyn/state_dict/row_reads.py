"""RowReads: reads the rows of tables from the files of a checkpoint straight into their places.

DCP's reader loads each chunk as a tensor, whole, and then copies the part that is wanted. Here the numbers
are read into the staged stores, a window of rows at a time: first the ids of the window, then its rows, which
are summed by these ids as they are read. A thread reads the next piece meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from torchrec_dyn.checkpoint_format import ChunkedTensor
from torchrec_dyn.state_dict.load_session import TableEntry
from torchrec_dyn.state_dict.sums_as_read import SumsAsRead

_WINDOW_ROWS = 1 << 18
# Bytes that are read together: they are summed, and the others copied, before they leave the caches.
_PIECE_BYTES = 2 << 20


class _Source(NamedTuple):
    entry: TableEntry
    name: str
    saved: ChunkedTensor
    blocks: Sequence[ChunkStorageMetadata]  # the parts of saved chunks that are read


class _Piece(NamedTuple):
    source: _Source
    row: int  # its place in the whole table
    rows: int
    column: int
    columns: int


class RowReads:
    """The reads of the rows of one table, and of its optimizer state, that belong to this rank."""

    def __init__(self) -> None:
        self._sources: list[_Source] = []

    def add(self, entry: TableEntry, name: str, saved: ChunkedTensor) -> None:
        """Adds a tensor by row of an entry whose load has begun."""
        self._sources.append(_Source(entry, name, saved, entry.wanted(name)))

    def read(self, reader: Executor) -> None:
        """Reads all rows into the staged stores of the entries; `reader` has one thread.

        Raises:
            ValueError: if a file is damaged.
        """
        for entry in {id(one.entry): one.entry for one in self._sources}.values():
            table = entry.table
            # Column shards sum parts of what is read; a GPU sums what it holds.
            if len(table.cuts) == 2 and table.has_first_column and table.device.type == "cpu":
                entry.sums_as_read = SumsAsRead(table.name)
        begun: tuple[_Window, _Piece, Tensor, Future[Tensor]] | None = None
        for window, piece in self._in_order():
            block = _place_of(piece)
            following = window, piece, block, reader.submit(_read, piece, block)
            if begun is not None:
                _end(*begun)
            begun = following
        if begun is not None:
            _end(*begun)

    def _in_order(self) -> Iterator[tuple[_Window, _Piece]]:
        """Yields all pieces, of each window the ids first."""
        ends = [one.offsets[0] + one.sizes[0] for source in self._sources for one in source.blocks]
        for first in range(0, max(ends, default=0), _WINDOW_ROWS):
            window = _Window()
            for source in sorted(self._sources, key=lambda one: one.name != "ids"):
                for piece in _pieces(source, first, first + _WINDOW_ROWS):
                    yield window, piece


class _Window:
    """The ids of a window of rows, as far as they are read."""

    def __init__(self) -> None:
        self._read: dict[int, Tensor] = {}
        self._joined: dict[int, Tensor] | None = None

    def add(self, place: int, ids: Tensor) -> None:
        """Adds the ids from a place on; before `ids_of` is called."""
        self._read[place] = ids

    def ids_of(self, place: int, count: int) -> Tensor | None:
        """Returns the ids of rows from a place on; None if not all of them belong to this rank."""
        if self._joined is None:
            self._joined = _joined(self._read)
        for begin, ids in self._joined.items():
            if begin <= place and place + count <= begin + len(ids):
                return ids[place - begin : place - begin + count]
        return None


def _joined(ids: dict[int, Tensor]) -> dict[int, Tensor]:
    """Returns ids by their places, with neighbours in one tensor: pieces of others may lie across them."""
    runs: dict[int, list[Tensor]] = {}
    begin, end = -1, -1
    for place in sorted(ids):
        if place != end:
            begin = end = place
        runs.setdefault(begin, []).append(ids[place])
        end += len(ids[place])
    return {place: some[0] if len(some) == 1 else torch.cat(some) for place, some in runs.items()}


def _pieces(source: _Source, first: int, last: int) -> Iterator[_Piece]:
    """Yields the pieces of a tensor with rows from `first` to before `last`."""
    for one in source.blocks:
        row, column = one.offsets[0], one.offsets[1] if len(one.offsets) > 1 else 0
        end, columns = row + one.sizes[0], one.sizes[1] if len(one.sizes) > 1 else 1
        row, end = max(row, first), min(end, last)
        most = end - row
        if source.name != "ids":
            most = max(1, _PIECE_BYTES // (columns * source.saved.dtype.itemsize))
        for begin in range(row, end, max(1, most)):
            yield _Piece(source, begin, min(most, end - begin), column, columns)


def _place_of(piece: _Piece) -> Tensor:
    """Returns the tensor that is to hold a piece, [M, C] or [M]."""
    offset, size = _offset_and_size(piece)
    return piece.source.entry.target(piece.source.name, offset, size, piece.source.saved.dtype)


def _offset_and_size(piece: _Piece) -> tuple[tuple[int, ...], tuple[int, ...]]:
    dimensions = 2 if len(piece.source.saved.shape) > 1 else 1
    return (piece.row, piece.column)[:dimensions], (piece.rows, piece.columns)[:dimensions]


def _read(piece: _Piece, block: Tensor) -> Tensor:
    """Reads a piece, and returns its numbers on the CPU: the block itself if it is there."""
    into = block if block.is_cpu else torch.empty(block.shape, dtype=block.dtype, device="cpu")
    saved = piece.source.saved
    saved.read_into(piece.row, piece.column, into if into.dim() == 2 else into.view(-1, 1))
    return into


def _end(window: _Window, piece: _Piece, block: Tensor, reading: Future[Tensor]) -> None:
    """Stages a piece that is read, and adds it to the sums of its entry."""
    read = reading.result()
    if block is not read:
        block.copy_(read)
    entry, name = piece.source.entry, piece.source.name
    entry.receive(name, _offset_and_size(piece)[0], block)
    if name == "ids":
        window.add(piece.row, block)
    staged = {store.dtype for store, _ in entry.stores(name)}  # what is staged is summed
    if entry.sums_as_read is None or staged - {block.dtype}:
        return
    ids = block if name == "ids" else window.ids_of(piece.row, piece.rows)
    if ids is not None:
        entry.sums_as_read.add(name, ids, block, piece.column)
