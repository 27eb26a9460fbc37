"""BagLayout: which ids form a bag, and where each bag's row goes in the output.

Legend: T tables, F features (in table order), B bags of a feature, N ids, S runs of bags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

Pooling = Literal["sum", "mean", "none"]


@dataclass(frozen=True)
class Bags:
    """One batch, described for the ops (csrc/bags.h).

    Attributes:
        table_offsets: [T + 1] int64, which ids are whose.
        offsets: [bags + 1] int64, or None for sequences.
        segments: [S, 5] int64.
        elements: numbers in the output.
        shape: shape of the output.
    """

    table_offsets: Tensor
    offsets: Tensor | None
    segments: Tensor
    elements: int
    shape: tuple[int, ...]


class BagLayout:
    """Describes batches for tables of fixed widths and features."""

    def __init__(
        self, columns: Sequence[int], features_per_table: Sequence[int], pooling: Pooling
    ) -> None:
        if pooling not in ("sum", "mean", "none"):
            raise ValueError(
                f'BagLayout: expected pooling "sum", "mean" or "none", got {pooling!r}.'
            )
        if pooling == "none" and len(set(columns)) > 1:
            raise ValueError(
                f"BagLayout: expected tables of one width for sequences, got {sorted(set(columns))}."
            )
        if len(features_per_table) != len(columns):
            raise ValueError(
                f"BagLayout: expected the number of features of each of {len(columns)} tables, got "
                f"{list(features_per_table)}."
            )
        self.is_mean = pooling == "mean"
        self._is_sequence = pooling == "none"
        self._columns = list(columns)
        self._table_of = [t for t, count in enumerate(features_per_table) for _ in range(count)]
        self._first_feature = torch.tensor([0, *accumulate(features_per_table)])
        self._features = len(self._table_of)
        self._cached: tuple[int, Tensor] | None = None

    def table_offsets(
        self, offsets: Tensor, ids: int, batch_sizes: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Returns where each table's ids begin, [T + 1] int64.

        Args:
            offsets: [bags + 1] int64.
            ids: N.
            batch_sizes: [F][ranks] bags of each feature and rank, or None where all are equal.
        """
        bags = offsets.numel() - 1
        if batch_sizes is None:
            if bags < 0 or bags % self._features:
                raise ValueError(
                    f"lookup: expected offsets [F * B + 1] with F = {self._features} features, got "
                    f"{offsets.numel()} offsets."
                )
            first_bag = self._first_feature * (bags // self._features)
        else:
            per_feature = [0, *accumulate(sum(sizes) for sizes in batch_sizes)]
            if len(batch_sizes) != self._features or per_feature[-1] != bags:
                raise ValueError(
                    f"lookup: expected batch sizes of {self._features} features that sum to {bags} "
                    f"bags, got {len(batch_sizes)} features and {per_feature[-1]} bags."
                )
            ranks = {len(sizes) for sizes in batch_sizes}
            if len(ranks) != 1 or any(bags < 0 for sizes in batch_sizes for bags in sizes):
                raise ValueError(
                    "lookup: expected batch sizes >= 0 of the same ranks for every feature, got "
                    f"{[list(sizes) for sizes in batch_sizes]}."
                )
            first_bag = torch.tensor(per_feature)[self._first_feature]
        # Before anything is inserted: the ops check only when the rows are there.
        if bool((offsets[1:] < offsets[:-1]).any()):
            raise ValueError(
                "lookup: expected ascending offsets, got descending ones. Are there negative lengths?"
            )
        table_offsets = offsets[first_bag]
        begin, end = int(table_offsets[0]), int(table_offsets[-1])
        if (begin, end) != (0, ids):
            raise ValueError(
                f"lookup: expected offsets from 0 to {ids}, the number of ids, got {begin} to {end}. "
                "Do lengths and values agree?"
            )
        return table_offsets

    def describe(
        self, offsets: Tensor, ids: int, batch_sizes: Sequence[Sequence[int]] | None
    ) -> Bags:
        """Describes one batch.

        Args:
            offsets: [bags + 1] int64.
            ids: N.
            batch_sizes: [F][ranks] bags of each feature and rank, or None where all are equal.
        """
        table_offsets = self.table_offsets(offsets, ids, batch_sizes)
        if self._is_sequence:
            return self._sequence(table_offsets, ids)
        if batch_sizes is not None:
            return self._variable(table_offsets, offsets, batch_sizes)
        batch = (offsets.numel() - 1) // self._features
        width = sum(self._columns[t] for t in self._table_of)
        if self._cached is None or self._cached[0] != batch:
            self._cached = (batch, self._regular_segments(batch, width))
        return Bags(table_offsets, offsets, self._cached[1], batch * width, (batch, width))

    def _regular_segments(self, batch: int, width: int) -> Tensor:
        first_column = accumulate((self._columns[t] for t in self._table_of), initial=0)
        return torch.tensor(
            [
                [t, f * batch, batch, c, width]
                for f, (t, c) in enumerate(zip(self._table_of, first_column, strict=False))
            ]
        )

    def _sequence(self, table_offsets: Tensor, ids: int) -> Bags:
        columns = self._columns[0]
        bounds = table_offsets.tolist()
        segments = torch.tensor(
            [[t, b, e - b, b * columns, columns] for t, (b, e) in enumerate(pairwise(bounds))]
        )
        return Bags(table_offsets, None, segments, ids * columns, (ids, columns))

    def _variable(
        self, table_offsets: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]]
    ) -> Bags:
        lines: list[list[int]] = []
        place = 0
        next_bag = list(accumulate((sum(sizes) for sizes in batch_sizes), initial=0))
        for rank in range(len(batch_sizes[0])):
            for feature, table in enumerate(self._table_of):
                bags, columns = batch_sizes[feature][rank], self._columns[table]
                lines.append([table, next_bag[feature], bags, place, columns])
                next_bag[feature] += bags
                place += bags * columns
        return Bags(table_offsets, offsets, torch.tensor(lines), place, (place,))
