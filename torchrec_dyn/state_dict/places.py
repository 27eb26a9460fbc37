"""Places: numbers of rows in the canonical order of a whole table. Finds the places and chunks of a rank.

Each of S ranks owns one range of mixed ids (ranks/routing.py), hence one run of the canonical order. The ids
after the last range, at most S, are single places at the end of the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from torchrec_dyn import ops
from torchrec_dyn.checkpoint_format import ChunkedTensor
from torchrec_dyn.ranks import Table, ids_per_rank, mixed_ranges
from torchrec_dyn.storage import CanonicalRows, first_place, unsigned


class Share(NamedTuple):
    """The number of ids on a rank; all-gathered to find the places of each rank."""

    part: int  # number of the rank among the ranks that share the rows
    rows: int
    tail: list[int]  # mixed ids after the last range, ascending


class Run(NamedTuple):
    """Rows that are neighbours on this rank and in the whole table."""

    here: int  # place of the first row in the canonical order of this rank
    place: int  # its place in that of the whole table
    rows: int


class Places:
    """Ranges [begin, end) of places that this rank reads; their rows are numbered 0, 1, 2, ... in order."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges = _joined(ranges)
        self.count = sum(end - begin for begin, end in self.ranges)

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields the ranges within [begin, end): first place, place after the last, first row."""
        row = 0
        for first, last in self.ranges:
            low, high = max(first, begin), min(last, end)
            if low < high:
                yield low, high, row + low - first
            row += last - first


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns ranges in order; overlapping and adjacent ranges are joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(range_ for range_ in ranges if range_[0] < range_[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def places_here(table: Table, saved: ChunkedTensor | None) -> Places | None:
    """Returns the places of this rank's rows in a saved tensor of ids, or of waiting ids [Q, 3].

    They are found by a few of the ids. None if they are all places, or the tensor is None. If the ids are
    damaged the places are wrong, and so are the content sums over all ranks.
    """
    part, ranks = table.part, table.layout.row_ranks
    if saved is None or part is None or ranks == 1:
        return None
    tensor = saved

    def read(first: int, last: int) -> Tensor:
        rows = tensor.rows(first, last)
        return rows if rows.dim() == 1 else rows[:, 0].contiguous()

    return places_of_part(read, saved.shape[0], part, ranks)


def places_of_part(read: Callable[[int, int], Tensor], total: int, part: int, ranks: int) -> Places:
    """Returns the places of the ids of a part; `read` reads some of the `total` saved ids."""
    ranges = mixed_ranges(part, ranks)
    return Places(
        [
            (first_place(read, total, own.start), first_place(read, total, own.stop))
            for own in ranges
        ]
    )


def share_of(rows: CanonicalRows, table: Table) -> Share:
    """Returns the share of this rank, which must hold a part of the table."""
    part, ranks = table.part, table.layout.row_ranks
    assert part is not None
    tail: list[int] = []
    if ranks > 1 and rows.count:
        beyond = rows.from_mixed(ids_per_rank(ranks) * ranks)
        tail = [unsigned(mixed) for mixed in ops.mix64(beyond).tolist()]
    return Share(part, rows.count, tail)


def runs_of(shares: Sequence[Share | None], part: int | None) -> tuple[int, list[Run]]:
    """Returns the number of rows of the whole table, and those of a part, from the shares of all ranks.

    A rank without a part, None, has none.
    """
    by_part = {share.part: share for share in shares if share is not None}
    starts, start = {}, 0
    for number in sorted(by_part):
        starts[number] = start
        start += by_part[number].rows - len(by_part[number].tail)
    tails = sorted(mixed for share in by_part.values() for mixed in share.tail)
    total = start + len(tails)
    if part is None:
        return total, []
    mine = by_part[part]
    ordered = mine.rows - len(mine.tail)
    runs = [Run(0, starts[part], ordered)] if ordered else []
    runs += [Run(ordered + i, start + tails.index(mixed), 1) for i, mixed in enumerate(mine.tail)]
    return total, runs


def chunks_to_read(
    saved: TensorStorageMetadata, places: Places, columns: Sequence[tuple[int, int]] | None
) -> Iterator[ChunkStorageMetadata]:
    """Yields the parts of the saved chunks of a tensor that must be read, of some ranges of columns.

    A part spans neighbouring column shards: DCP's reader loads the whole chunk for each part.
    """
    ranges = None if columns is None else _joined(columns)
    for chunk in saved.chunks:
        begin, size = chunk.offsets, chunk.sizes
        beyond = [(begin[1:], size[1:])] if all(size[1:]) else []
        if ranges is not None:
            end = begin[1] + size[1]
            inside = ((max(first, begin[1]), min(last, end)) for first, last in ranges)
            beyond = [
                (torch.Size([first]), torch.Size([last - first]))
                for first, last in inside
                if first < last
            ]
        for first_column, width in beyond:
            for low, high, _ in places.within(begin[0], begin[0] + size[0]):
                yield ChunkStorageMetadata(
                    torch.Size([low, *first_column]), torch.Size([high - low, *width])
                )
