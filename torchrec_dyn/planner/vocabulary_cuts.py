"""Lays the vocabularies of several features end to end and cuts them into one equal piece a rank.

Rank r holds the rows [r * per, (r + 1) * per) of the line, per = sum(rows) // ranks, and the last rank also
the remainder. A feature with a cut inside it has rows on both sides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class FairCuts:
    """The rows of each feature that each rank holds. No piece is empty.

    Attributes:
        rows: of each feature.
        features: of each rank, those with rows on it, in order.
        offsets: of each rank, where the rows of each of its features begin there.
        sizes: rows on each rank; the last one's may be up to ranks - 1 more than the others'.
        cuts: of each feature, the rows before which it is cut; most have none.
    """

    rows: tuple[int, ...]
    features: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]

    def owners(self, features: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the ranks of rows and the places of the rows there.

        Args:
            features: int64 numbers of features, of a shape that broadcasts with the shape of `rows`.
            rows: int64 rows of these features.

        Returns:
            ranks: int64, of the broadcast shape.
            local: int64 rows on these ranks.

        Raises:
            ValueError: if there is no such feature, or it has no such row.
        """
        for name, numbers in (("features", features), ("rows", rows)):
            if numbers.dtype != torch.int64:
                raise ValueError(
                    f"FairCuts.owners.{name}: expected int64, got {numbers.dtype}. Convert with .long()."
                )
        features, rows = torch.broadcast_tensors(features, rows)
        ends = torch.tensor([0, *accumulate(self.rows)], device=rows.device)
        _check_inside("features", features, torch.tensor(len(self.rows), device=rows.device))
        _check_inside("rows", rows, ends.diff()[features])
        on_the_line = ends[features] + rows
        per = self.sizes[0]
        ranks = (on_the_line // per).clamp(max=len(self.sizes) - 1)
        return ranks, on_the_line - ranks * per


def fair_cuts(rows: Sequence[int], ranks: int) -> FairCuts:
    """Cuts vocabularies so that every rank holds the same number of rows, whatever their sizes.

    Args:
        rows: of each feature; a feature without rows is on no rank.
        ranks: number of ranks that share them.

    Raises:
        ValueError: if `ranks` is below 1, a number of rows is negative, or there are fewer rows than ranks
            or more than an int64 counts.
    """
    _check(rows, ranks)
    ends = [0, *accumulate(rows)]
    per = ends[-1] // ranks
    bounds = [*(per * rank for rank in range(ranks)), ends[-1]]
    features, offsets = [], []
    for low, high in pairwise(bounds):
        # Half-open ranges meet in a row or not at all; a feature that ends where a rank begins is not on it.
        first = bisect_right(ends, low) - 1
        here = [f for f in range(first, len(rows)) if ends[f] < high and ends[f + 1] > ends[f]]
        features.append(tuple(here))
        offsets.append(tuple(max(ends[feature] - low, 0) for feature in here))
    return FairCuts(
        rows=tuple(rows),
        features=tuple(features),
        offsets=tuple(offsets),
        sizes=tuple(high - low for low, high in pairwise(bounds)),
        cuts=tuple(
            tuple(cut - begin for cut in bounds[1:-1] if begin < cut < end)
            for begin, end in pairwise(ends)
        ),
    )


def _check(rows: Sequence[int], ranks: int) -> None:
    if not _is_count(ranks) or ranks < 1:
        raise ValueError(f"fair_cuts.ranks: expected an integer above 0, got {ranks!r}.")
    for feature, count in enumerate(rows):
        if not _is_count(count) or count < 0:
            raise ValueError(
                f"fair_cuts.rows[{feature}]: expected a number of rows, 0 or more, got {count!r}."
            )
    if sum(rows) < ranks:
        raise ValueError(
            f"fair_cuts: expected a row for each of {ranks} ranks, got {sum(rows)} rows. Use fewer ranks."
        )
    if sum(rows) >= 2**63:
        raise ValueError(f"fair_cuts: expected fewer than 2^63 rows in all, got {sum(rows)}.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_inside(name: str, numbers: Tensor, ends: Tensor) -> None:
    outside = (numbers < 0) | (numbers >= ends)
    if bool(outside.any()):
        worst, end = numbers[outside][0], ends.expand_as(numbers)[outside][0]
        raise ValueError(
            f"FairCuts.owners.{name}: expected numbers from 0 and below {int(end)}, got {int(worst)}."
        )
