"""Distributes the vocabularies of several features over ranks: in equal pieces, or whole feature by feature.

`fair_cuts` concatenates the vocabularies and cuts them. Rank r holds the rows [r * per, (r + 1) * per) of
the concatenation, per = sum(rows) // ranks. The last rank also holds the remainder. A feature with a cut
inside it has rows on both sides of the cut.

`whole_features` cuts no feature: it shuffles the features and gives each rank the same number of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy
import torch
from torch import Tensor

from torchrec_dyn.planner.measured import checked_count


@dataclass(frozen=True)
class FairCuts:
    """The rows of each feature that each rank holds.

    Attributes:
        rows: number of rows of each feature.
        features: the features of each rank, in the order of their rows on the rank.
        offsets: for each rank and each of its features, the row of the rank at which the feature's rows
            begin.
        sizes: number of rows on each rank.
        cuts: for each feature, the rows before which the feature is cut; empty for most features.
    """

    rows: tuple[int, ...]
    features: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]

    def owners(self, features: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rank of each row and the row number on that rank.

        Args:
            features: int64 feature numbers, in a shape that broadcasts with the shape of `rows`.
            rows: int64 rows of these features.

        Returns:
            The pair (ranks, local).

            - ranks: int64, in the broadcast shape.
            - local: int64 row numbers on these ranks, in the broadcast shape.

        Raises:
            ValueError: if an argument is not an int64 tensor, or a feature or row does not exist.
        """
        for name, numbers in (("features", features), ("rows", rows)):
            if not isinstance(numbers, Tensor):
                raise ValueError(
                    f"FairCuts.owners.{name}: expected an int64 tensor, got {numbers!r}. Write "
                    "torch.as_tensor(numbers)."
                )
            if numbers.dtype != torch.int64:
                raise ValueError(
                    f"FairCuts.owners.{name}: expected int64, got {numbers.dtype}. Convert with .long()."
                )
        features, rows = torch.broadcast_tensors(features, rows)
        ends = torch.tensor([0, *accumulate(self.rows)], device=rows.device)
        _check_inside("features", features, torch.tensor(len(self.rows), device=rows.device))
        _check_inside("rows", rows, ends.diff()[features])
        # The pieces in the order of the concatenated vocabularies: begin, rank, and begin on the rank.
        begins, rank_of, local = torch.tensor(self._pieces(), device=rows.device).T.contiguous()
        on_the_line = ends[features] + rows
        # A piece without rows begins where the next piece begins: the search finds the later piece.
        piece = torch.searchsorted(begins, on_the_line, right=True) - 1
        return rank_of[piece], on_the_line - begins[piece] + local[piece]

    def _pieces(self) -> list[tuple[int, int, int]]:
        ends = [0, *accumulate(self.rows)]
        # The pieces of a feature are on ranks in order.
        begins = [iter((0, *cuts)) for cuts in self.cuts]
        by_rank = zip(self.features, self.offsets, strict=True)
        pieces = [
            (feature, next(begins[feature]), rank, offset)
            for rank, (features, offsets) in enumerate(by_rank)
            for feature, offset in zip(features, offsets, strict=True)
        ]
        return [
            (ends[feature] + begin, rank, offset) for feature, begin, rank, offset in sorted(pieces)
        ]


def fair_cuts(rows: Sequence[int], ranks: int) -> FairCuts:
    """Returns cuts of vocabularies that put the same number of rows on every rank, for any vocabulary sizes.

    The last rank also gets the remainder, at most ranks - 1 rows. No piece is empty.

    Args:
        rows: number of rows of each feature; a feature with 0 rows is on no rank.
        ranks: number of ranks that share the rows.

    Raises:
        ValueError: if `ranks` is below 1, a number of rows is negative, or the number of all rows is below
            `ranks` or above the int64 range.
    """
    rows, ranks = _checked("fair_cuts", rows, ranks)
    if sum(rows) < ranks:
        raise ValueError(
            f"fair_cuts: expected a row for each of {ranks} ranks, got {sum(rows)} rows. Use fewer ranks."
        )
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


def whole_features(rows: Sequence[int], ranks: int, seed: int = 111) -> FairCuts:
    """Returns groups of whole features, one group per rank, with about the same number of features in each.

    The features are shuffled, and rank r gets the features from r * (F // ranks) on, F // ranks of them; the
    last rank also gets the remainder. The numbers of rows may differ widely; if they must be even, use
    `fair_cuts`.

    Args:
        rows: number of rows of each of the F features.
        ranks: number of ranks, at most F.
        seed: seed of numpy's legacy generator, whose numbers never change. Source of the generator and of the
            default: LoadBalanceManager(do_fair=False) in hpcaitech/CachedEmbedding, which forms the same
            groups.

    Raises:
        ValueError: if `ranks` is below 1 or above F, a number of rows is negative, the number of all rows is
            above the int64 range, or `seed` is not an integer from 0 to 2^32 - 1.
    """
    rows, ranks = _checked("whole_features", rows, ranks)
    seed = checked_count(seed, "whole_features.seed", 0, "Pass the same seed on every rank.")
    if len(rows) < ranks:
        raise ValueError(
            f"whole_features: expected a feature for each of {ranks} ranks, got {len(rows)} features. "
            "Use fewer ranks, or fair_cuts."
        )
    order = list(range(len(rows)))
    numpy.random.RandomState(seed).shuffle(order)
    each = len(rows) // ranks
    bounds = [*(each * rank for rank in range(ranks)), len(rows)]
    features = tuple(tuple(order[low:high]) for low, high in pairwise(bounds))
    ends = [list(accumulate((rows[feature] for feature in group), initial=0)) for group in features]
    return FairCuts(
        rows=tuple(rows),
        features=features,
        offsets=tuple(tuple(rank_ends[:-1]) for rank_ends in ends),
        sizes=tuple(rank_ends[-1] for rank_ends in ends),
        cuts=((),) * len(rows),
    )


def _checked(where: str, rows: Sequence[int], ranks: int) -> tuple[list[int], int]:
    """Returns both as integers of Python."""
    ranks = checked_count(
        ranks, f"{where}.ranks", 1, "Pass the number of ranks that share the rows."
    )
    if not isinstance(rows, Iterable):
        raise ValueError(
            f"{where}.rows: expected a list of the number of rows of each feature, got {rows!r}. Pass "
            "one number for each feature."
        )
    remedy = "Pass the number of rows of each feature; a tensor as rows.tolist()."
    rows = [
        checked_count(count, f"{where}.rows[{feature}]", 0, remedy)
        for feature, count in enumerate(rows)
    ]
    if sum(rows) >= 2**63:
        raise ValueError(
            f"{where}: expected fewer than 2^63 rows in all, got {sum(rows)}. Check the numbers of rows."
        )
    return rows, ranks


def _check_inside(name: str, numbers: Tensor, ends: Tensor) -> None:
    outside = (numbers < 0) | (numbers >= ends)
    if bool(outside.any()):
        worst, end = numbers[outside][0], ends.expand_as(numbers)[outside][0]
        raise ValueError(
            f"FairCuts.owners.{name}: expected numbers from 0 and below {int(end)}, got {int(worst)}. "
            "Compare the batch with the numbers of rows that were cut."
        )
