"""RowReads: reads the rows of tables from the files of a checkpoint straight into their places.

DCP's reader loads each chunk as a tensor, whole, and then copies the part that is wanted. Here the numbers
are read into the staged stores, a window of rows at a time: first the ids of the window, then its rows, which
are summed by these ids as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from torchrec_dyn.checkpoint_format import ChunkedTensor
from torchrec_dyn.state_dict.load_session import TableEntry
from torchrec_dyn.state_dict.row_sums import SumsAsRead

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

    def read(self) -> None:
        """Reads all rows into the staged stores of the entries.

        Raises:
            ValueError: if a file is damaged.
        """
        for entry in {id(one.entry): one.entry for one in self._sources}.values():
            table = entry.table
            # Column shards sum parts of what is read; a GPU sums what it holds.
            if len(table.cuts) == 2 and table.has_first_column and table.device.type == "cpu":
                entry.sums_as_read = SumsAsRead(table.name)
        ends = [one.offsets[0] + one.sizes[0] for source in self._sources for one in source.blocks]
        for first in range(0, max(ends, default=0), _WINDOW_ROWS):
            ids: dict[int, Tensor] = {}  # of the window, by their places
            for source in sorted(self._sources, key=lambda one: one.name != "ids"):
                pieces = [*_pieces(source, first, first + _WINDOW_ROWS)]
                if source.name == "ids":
                    ids = _joined({one.row: _read(one) for one in pieces})
                    for begin, some in ids.items():
                        _add_to_sums(_Piece(source, begin, len(some), 0, 1), some, ids)
                else:
                    for piece in pieces:
                        _add_to_sums(piece, _read(piece), ids)


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


def _read(piece: _Piece) -> Tensor:
    """Reads and stages a piece; returns its numbers, [M, C] or [M]."""
    entry, name, saved, _ = piece.source
    has_columns = len(saved.shape) > 1
    dimensions = 2 if has_columns else 1
    offset = (piece.row, piece.column)[:dimensions]
    size = (piece.rows, piece.columns)[:dimensions]
    block = entry.target(name, offset, size, saved.dtype)
    into = block if block.is_cpu else torch.empty(size, dtype=saved.dtype, device="cpu")
    saved.read_into(piece.row, piece.column, into if has_columns else into.view(-1, 1))
    if block is not into:
        block.copy_(into)
    entry.receive(name, offset, block)
    return block


def _add_to_sums(piece: _Piece, block: Tensor, ids: dict[int, Tensor]) -> None:
    """Adds a piece to the sums of its entry, if its ids were read together."""
    entry, name, _, _ = piece.source
    staged = {store.dtype for store, _ in entry.stores(name)}  # what is staged is summed
    if entry.sums_as_read is None or staged - {block.dtype}:
        return
    for begin, some in ids.items():
        start = piece.row - begin
        if start >= 0 and start + piece.rows <= len(some):
            entry.sums_as_read.add(name, some[start : start + piece.rows], block, piece.column)
            return
