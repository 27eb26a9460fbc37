"""Reads a table from the files of a checkpoint straight into its staged stores.

DCP's reader loads each chunk as a tensor, whole, and then copies the part that is wanted. Here the numbers
are read into their places, a window of rows at a time: first the ids of the window, then its rows, which are
summed by these ids as they are read. DCP's own reads remain for storage that is not a directory of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import ChunkedTensor, content_sum
from torchrec_dyn.state_dict.loading import TableLoad
from torchrec_dyn.storage import unsigned


def read_table(load: TableLoad) -> None:
    """Reads the files of a load that has begun; raises ValueError if one is damaged."""
    table, files = load.table, load.files
    _read_others(load, files)
    rows = {name: files[name] for name in load.row_names if name in files and name != "waiting"}
    # Column shards sum parts of what is read; a GPU sums what it holds.
    is_whole = len(table.cuts) == 2 and table.has_first_column and table.device.type == "cpu"
    load.sums_as_read = {} if is_whole and load.has_rows else None
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
            ids = _joined(
                {offset[0]: _read(load, name, files[name], offset, size) for offset, size in pieces}
            )
            for begin, joined in ids.items():
                _add_to_sums(load, name, begin, 0, joined, ids)
        else:
            for offset, size in pieces:
                block = _read(load, name, files[name], offset, size)
                _add_to_sums(load, name, offset[0], (*offset, 0)[1], block, ids)


def _joined(ids: dict[int, Tensor]) -> dict[int, Tensor]:
    """Returns ids by their places, with neighbours in one tensor: pieces of others may lie across them."""
    runs: dict[int, list[Tensor]] = {}
    begin, end = -1, -1
    for place in sorted(ids):
        if place != end:
            begin = end = place
        runs.setdefault(begin, []).append(ids[place])
        end += len(ids[place])
    return {
        place: parts[0] if len(parts) == 1 else torch.cat(parts) for place, parts in runs.items()
    }


def _pieces(
    blocks: Sequence[ChunkStorageMetadata], first: int, number_bytes: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields offset and size of the pieces of blocks in the window from a row on.

    Without `number_bytes` they are not small.
    """
    for block in blocks:
        row, *column = block.offsets
        rows, *columns = block.sizes
        row, end = max(row, first), min(row + rows, first + knobs.LOADED_ROWS)
        row_bytes = prod(columns) * number_bytes
        most = max(1, knobs.LOADED_PIECE_BYTES // row_bytes if row_bytes else end - row)
        for begin in range(row, end, most):
            yield (begin, *column), (min(most, end - begin), *columns)


def _read(
    load: TableLoad,
    name: str,
    saved: ChunkedTensor,
    offset: tuple[int, ...],
    size: tuple[int, ...],
) -> Tensor:
    """Reads and stages a piece; returns its numbers, [M, C] or [M]."""
    block = load.block_to_fill(name, offset, size, saved.dtype)
    into = block if block.is_cpu else torch.empty(size, dtype=saved.dtype, device="cpu")
    saved.read_into(offset[0], (*offset, 0)[1], into if into.dim() > 1 else into.view(-1, 1))
    if block is not into:
        block.copy_(into)
    load.receive(name, offset, block)
    return block


def _add_to_sums(
    load: TableLoad, name: str, row: int, column: int, block: Tensor, ids: dict[int, Tensor]
) -> None:
    """Adds a block, from a row and a column on, to the sums of a load, if its ids were read together."""
    staged = {store.dtype for store, _ in load.stores(name)}  # what is staged is summed
    if load.sums_as_read is None or staged - {block.dtype}:
        return
    for begin, row_ids in ids.items():
        start = row - begin
        if start >= 0 and start + len(block) <= len(row_ids):
            own = row_ids[start : start + len(block)]
            total, numbers = load.sums_as_read.get(name, (0, 0))
            total = unsigned(total + content_sum(load.table.name, name, own, block, column))
            load.sums_as_read[name] = total, numbers + block.numel()
            return
