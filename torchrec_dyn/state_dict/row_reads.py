"""Reads a table from the files of a checkpoint straight into its staged stores.

DCP's reader loads each chunk as a tensor, whole, and then copies the part that is wanted. Here the numbers
are read into their places, a window of rows at a time: first the ids of the window, then its rows, which are
summed by these ids as they are read. DCP's own reads remain for storage that is not a directory of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import ChunkedTensor
from torchrec_dyn.state_dict.loading import TableLoad
from torchrec_dyn.state_dict.row_sums import SumsAsRead


class _Piece(NamedTuple):
    row: int  # its place in the whole table
    rows: int
    column: int
    columns: int


def read_table(load: TableLoad, files: Mapping[str, ChunkedTensor]) -> None:
    """Reads all tensors of a load that has begun, by name; raises ValueError if a file is damaged."""
    table = load.table
    _read_others(load, files)
    rows = {name: files[name] for name in load.row_names if name in files and name != "waiting"}
    # Column shards sum parts of what is read; a GPU sums what it holds.
    is_whole = len(table.cuts) == 2 and table.has_first_column and table.device.type == "cpu"
    load.sums_as_read = SumsAsRead(table.name) if is_whole and load.has_rows else None
    blocks = {name: load.wanted(name) for name in rows}
    for first in range(0, load.total, knobs.LOADED_ROWS):
        _read_window(load, rows, blocks, first)


def _read_others(load: TableLoad, files: Mapping[str, ChunkedTensor]) -> None:
    """Reads the tensors that are not by row, and the waiting ids."""
    for name in files.keys() & {*load.small_names, *load.checksums, "waiting"}:
        for chunk in load.wanted(name):
            if chunk.sizes and name not in load.small_names:
                first = chunk.offsets[0]
                block = files[name].rows(first, first + chunk.sizes[0])
                load.receive(name, (first, 0), block)
            else:
                load.receive(name, (), files[name].whole())


def _read_window(
    load: TableLoad,
    files: Mapping[str, ChunkedTensor],
    blocks: Mapping[str, Sequence[ChunkStorageMetadata]],
    first: int,
) -> None:
    """Reads the wanted blocks of all tensors by row in the window from a row on."""
    ids: dict[int, Tensor] = {}  # by their places
    for name in sorted(files, key=lambda name: name != "ids"):
        number_bytes = 0 if name == "ids" else files[name].dtype.itemsize
        pieces = [*_pieces(blocks[name], first, number_bytes)]
        if name == "ids":
            ids = _joined({piece.row: _read(load, name, files[name], piece) for piece in pieces})
            for begin, some in ids.items():
                _add_to_sums(load, name, _Piece(begin, len(some), 0, 1), some, ids)
        else:
            for piece in pieces:
                block = _read(load, name, files[name], piece)
                _add_to_sums(load, name, piece, block, ids)


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


def _pieces(
    blocks: Sequence[ChunkStorageMetadata], first: int, number_bytes: int
) -> Iterator[_Piece]:
    """Yields the pieces of blocks in the window from a row on; without `number_bytes` they are not small."""
    for block in blocks:
        row, column = block.offsets[0], block.offsets[1] if len(block.offsets) > 1 else 0
        end, columns = row + block.sizes[0], block.sizes[1] if len(block.sizes) > 1 else 1
        row, end = max(row, first), min(end, first + knobs.LOADED_ROWS)
        most = knobs.LOADED_PIECE_BYTES // (columns * number_bytes) if number_bytes else end - row
        for begin in range(row, end, max(1, most)):
            yield _Piece(begin, min(max(1, most), end - begin), column, columns)


def _read(load: TableLoad, name: str, saved: ChunkedTensor, piece: _Piece) -> Tensor:
    """Reads and stages a piece; returns its numbers, [M, C] or [M]."""
    has_columns = len(saved.shape) > 1
    dimensions = 2 if has_columns else 1
    offset = (piece.row, piece.column)[:dimensions]
    size = (piece.rows, piece.columns)[:dimensions]
    block = load.block_to_fill(name, offset, size, saved.dtype)
    into = block if block.is_cpu else torch.empty(size, dtype=saved.dtype, device="cpu")
    saved.read_into(piece.row, piece.column, into if has_columns else into.view(-1, 1))
    if block is not into:
        block.copy_(into)
    load.receive(name, offset, block)
    return block


def _add_to_sums(
    load: TableLoad, name: str, piece: _Piece, block: Tensor, ids: dict[int, Tensor]
) -> None:
    """Adds a piece to the sums of a load, if its ids were read together."""
    staged = {store.dtype for store, _ in load.stores(name)}  # what is staged is summed
    if load.sums_as_read is None or staged - {block.dtype}:
        return
    for begin, some in ids.items():
        start = piece.row - begin
        if start >= 0 and start + piece.rows <= len(some):
            load.sums_as_read.add(name, some[start : start + piece.rows], block, piece.column)
            return
