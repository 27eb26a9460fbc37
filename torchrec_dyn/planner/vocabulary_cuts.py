"""Concatenates the vocabularies of several features and cuts them into one equal piece per rank.

Rank r holds the rows [r * per, (r + 1) * per) of the concatenation, per = sum(rows) // ranks. The last rank
also holds the remainder. A feature with a cut inside it has rows on both sides of the cut.
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
        rows: number of rows of each feature.
        features: for each rank, the features with rows on it, in order.
        offsets: for each rank and each of its features, the begin of the feature's rows on the rank.
        sizes: number of rows on each rank; the last rank may have up to ranks - 1 rows more than the others.
        cuts: for each feature, the rows before which it is cut; empty for most features.
    """

    rows: tuple[int, ...]
    features: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]

    def owners(self, features: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rank of each row, and the number of the row on its rank.

        Args:
            features: int64 numbers of features, in a shape that broadcasts with the shape of `rows`.
            rows: int64 rows of these features.

        Returns:
            The pair (ranks, local).

            - ranks: int64, in the broadcast shape.
            - local: int64 row numbers on these ranks, in the broadcast shape.

        Raises:
            ValueError: if an argument is not int64, or a feature or row does not exist.
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
    """Returns cuts of vocabularies that put the same number of rows on every rank, for any vocabulary sizes.

    The last rank also gets the remainder.

    Args:
        rows: number of rows of each feature; a feature without rows is on no rank.
        ranks: number of ranks that share the rows.

    Raises:
        ValueError: if `ranks` is below 1, a number of rows is negative, or the number of all rows is below
            `ranks` or above the int64 range.
    """
    _check(rows, ranks)
    ends = [0, *accumulate(rows)]
    per = ends[-1] // ranks
    bounds = [*(per * rank for rank in range(ranks)), ends[-1]]
    features, offsets = [], []
    for low, high in pairwise(bounds):
        # Ranges are half-open: a feature that ends where a rank begins is not on this rank.
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
