"""Which places of the canonical order of a whole table lie on this rank.

Each of S ranks owns one range of mixed ids (ranks/routing.py), hence one run of the canonical order; the at
most S ids behind the last range are single places at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.ranks import ids_per_rank
from torchrec_dyn.storage import CanonicalRows

_WORD = 1 << 64


class Share(NamedTuple):
    """How many ids a rank holds; told to the other ranks.

    Attributes:
        part: number of the rank among those that share the rows.
        rows: how many in all.
        tail: its mixed ids behind the last range, ascending.
    """

    part: int
    rows: int
    tail: list[int]


class Run(NamedTuple):
    """Rows that are neighbours here and in the whole table.

    Attributes:
        here: place of the first in the canonical order of this rank.
        place: in that of the whole table.
        rows: how many.
    """

    here: int
    place: int
    rows: int


@dataclass(frozen=True)
class Runs:
    """Where the rows of one rank are in the whole table.

    Attributes:
        total: rows of the whole table.
        mine: the runs of this rank, empty if it holds none.
    """

    total: int
    mine: list[Run]


class Places:
    """Ranges of places that are read here, and the rows that they get: 0, 1, 2, ... in their order.

    Args:
        ranges: begin and end of each; those that overlap are joined.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges: list[tuple[int, int]] = []
        for begin, end in sorted(one for one in ranges if one[0] < one[1]):
            if self.ranges and begin <= self.ranges[-1][1]:
                self.ranges[-1] = (self.ranges[-1][0], max(end, self.ranges[-1][1]))
            else:
                self.ranges.append((begin, end))
        self.count = sum(end - begin for begin, end in self.ranges)

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Walks what is read here of places [begin, end): first place, place after the last, first row."""
        row = 0
        for first, last in self.ranges:
            low, high = max(first, begin), min(last, end)
            if low < high:
                yield low, high, row + low - first
            row += last - first


def share_of(rows: CanonicalRows, part: int, ranks: int) -> Share:
    """Tells what a rank holds.

    Args:
        rows: its ids.
        part: its number among those that share the rows.
        ranks: how many those are.
    """
    tail: list[int] = []
    if ranks > 1 and rows.count:
        beyond = rows.from_mixed(ids_per_rank(ranks) * ranks)
        tail = [word % _WORD for word in ops.mix64(beyond).tolist()]
    return Share(part, rows.count, tail)


def runs_of(shares: Sequence[Share], part: int | None) -> Runs:
    """Puts the shares of all ranks in order.

    Args:
        shares: of each part at least once.
        part: whose runs are asked for, None: nobody's.
    """
    by_part = {share.part: share for share in shares}
    starts, start = {}, 0
    for number in sorted(by_part):
        starts[number] = start
        start += by_part[number].rows - len(by_part[number].tail)
    tails = sorted(word for share in by_part.values() for word in share.tail)
    total = start + len(tails)
    if part is None:
        return Runs(total, [])
    mine = by_part[part]
    ordered = mine.rows - len(mine.tail)
    runs = [Run(0, starts[part], ordered)] if ordered else []
    runs += [Run(ordered + i, start + tails.index(word), 1) for i, word in enumerate(mine.tail)]
    return Runs(total, runs)


def fewer_cells(counts: Tensor, bits: int) -> Tensor:
    """Adds up neighbouring cells.

    Args:
        counts: [2^CELL_BITS] int64.
        bits: at most CELL_BITS.

    Returns:
        [2^bits] int64.
    """
    return counts.view(1 << bits, -1).sum(1)


def ranges_of_part(
    cells: Sequence[int] | None, total: int, part: int, ranks: int
) -> list[tuple[int, int]]:
    """Returns the places among which all rows of a part are, and few others.

    Args:
        cells: rows in each of 2^k equal ranges of mixed ids, None if not known: then all places.
        total: rows of the whole table.
        part: number of the rank among those that share the rows.
        ranks: how many those are.
    """
    if cells is None or ranks == 1:
        return [(0, total)]
    block, width = ids_per_rank(ranks), _WORD // len(cells)
    first, last = part * block // width, ((part + 1) * block - 1) // width
    begins = [0, *torch.tensor(cells, dtype=torch.int64).cumsum(0).tolist()]
    # The last S places may hold ids behind the last range, whoever owns those.
    return [(begins[first], begins[last + 1]), (max(0, total - ranks), total)]
