"""Finds exactly the places of a rank's rows in a saved table, by a few of its ids.

Ids are saved in canonical order, so the ids of a range of mixed ids are between two places. A search reads
single ids of a file until few are left, then these at once. Mixed ids are spread evenly, so it begins near
its end. If the ids are damaged, the places are wrong; then the content sums over all ranks are wrong too, and
the load is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isqrt

from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.checkpoint_format import ChunkedTensor
from torchrec_dyn.ranks import Table, ids_per_rank, owners
from torchrec_dyn.state_dict.places import Places
from torchrec_dyn.storage import signed, unsigned

ReadIds = Callable[[int, int], Tensor]  # returns the ids at the places [first, last), int64

_READ_AT_ONCE = 1 << 14  # ids
_TOP_BIT = 1 << 63


def places_here(table: Table, saved: ChunkedTensor | None) -> Places | None:
    """Returns the places of this rank's rows in a saved tensor of ids, or of waiting ids [Q, 3].

    None if they are all places, or the tensor is None.
    """
    part, ranks = table.part, table.layout.row_ranks
    if saved is None or part is None or ranks == 1:
        return None
    tensor = saved

    def read(first: int, last: int) -> Tensor:
        rows = tensor.rows(first, last)
        return rows if rows.dim() == 1 else rows[:, 0].contiguous()

    return places_of_part(read, saved.shape[0], part, ranks)


def places_of_part(read: ReadIds, total: int, part: int, ranks: int) -> Places:
    """Returns the places of the ids of a part, and no others.

    `read` is a function that reads saved ids, of which there are `total`; `part` is the number of the rank
    among the `ranks` that share the rows.
    """
    if ranks == 1:
        return Places([(0, total)])
    block = ids_per_rank(ranks)
    end = _first_from((part + 1) * block, total, read)
    # The ids after the last range, at most one a rank, are of any part.
    after = end if part == ranks - 1 else _first_from(ranks * block, total, read)
    own = owners(read(after, total), ranks) == part
    last = [(after + i, after + i + 1) for i in own.nonzero().flatten().tolist()]
    return Places([(_first_from(part * block, total, read), end), *last])


def _first_from(bound: int, total: int, read: ReadIds) -> int:
    """Returns the first place from which on mixed ids are at least `bound`, unsigned."""
    low, high = 0, total if bound else 0
    expected, reach = bound * total >> 64, 4 * isqrt(total)
    near: Iterator[int] = iter((expected - reach, expected + reach))
    while high - low > _READ_AT_ONCE:
        middle = next(near, (low + high) // 2)
        if not low <= middle < high:
            continue
        if unsigned(int(ops.mix64(read(middle, middle + 1)))) < bound:
            low = middle + 1
        else:
            high = middle
    if low == high:
        return low
    # Unsigned words compare as signed ones whose top bits are flipped.
    mixed = ops.mix64(read(low, high)) ^ signed(_TOP_BIT)
    return low + int((mixed < signed(bound ^ _TOP_BIT)).sum())
