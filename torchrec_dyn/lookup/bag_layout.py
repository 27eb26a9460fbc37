"""BagLayout: the ids of each bag, and the place of its pooled row in the output.

Legend: T tables, F features (in table order), N ids, S segments (a segment is a run of bags of one table).
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
    """The description of one batch for the ops (csrc/lookup/bags.h).

    Attributes:
        table_offsets: [T + 1] int64, where the ids of each table begin.
        bounds: `table_offsets` as a list.
        offsets: [bags + 1] int64, or None for sequences.
        segments: [S, 5] int64.
        elements: number of elements of the output.
        shape: shape of the output.
    """

    table_offsets: Tensor
    bounds: list[int]
    offsets: Tensor | None
    segments: Tensor
    elements: int
    shape: tuple[int, ...]


class BagLayout:
    """Layout of batches for tables of fixed widths and features."""

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
        self._first_feature = list(accumulate(features_per_table, initial=0))
        self._features = len(self._table_of)
        # Values of the last batch: the next batch often has the same sizes.
        self._cached: tuple[int, Tensor] | None = None
        self._table_offsets: tuple[list[int], Tensor] = ([], torch.empty(0))
        self._sequence_segments: tuple[list[int], Tensor] = ([], torch.empty(0))

    def table_offsets(
        self, offsets: Tensor, ids: int, batch_sizes: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Returns the begin of each table's ids, [T + 1] int64. The tensor is shared: do not write to it.

        Args:
            offsets: [bags + 1] int64, where each bag begins in the ids.
            ids: N.
            batch_sizes: [F][ranks] bags of each feature and rank, or None if all features have the same
                number of bags.

        Raises:
            ValueError: offsets or batch sizes are not valid.
        """
        return self._as_tensor(self._checked_bounds(offsets, ids, batch_sizes), offsets.device)

    def describe(
        self,
        offsets: Tensor,
        ids: int,
        batch_sizes: Sequence[Sequence[int]] | None,
        counts: Sequence[int] | None = None,
    ) -> Bags:
        """Returns the description of one batch.

        Args:
            offsets: [bags + 1] int64, where each bag begins in the ids.
            ids: N.
            batch_sizes: as `table_offsets`.
            counts: [F] number of ids of each feature, from a caller that has checked that offsets ascend
                to N and agree with these counts; else None. (The ops check again before they read memory.)

        Raises:
            ValueError: as `table_offsets`, without `counts`.
        """
        if counts is None:
            bounds = self._checked_bounds(offsets, ids, batch_sizes)
        else:
            bounds = self._of_tables(list(accumulate(counts, initial=0)))
        table_offsets = self._as_tensor(bounds, offsets.device)
        if self._is_sequence:
            return self._sequence(table_offsets, bounds, ids)
        if batch_sizes is not None:
            return self._variable(table_offsets, bounds, offsets, batch_sizes)
        batch = (offsets.numel() - 1) // self._features
        width = sum(self._columns[t] for t in self._table_of)
        if self._cached is None or self._cached[0] != batch:
            self._cached = (batch, self._regular_segments(batch, width))
        return Bags(table_offsets, bounds, offsets, self._cached[1], batch * width, (batch, width))

    def _checked_bounds(
        self, offsets: Tensor, ids: int, batch_sizes: Sequence[Sequence[int]] | None
    ) -> list[int]:
        bags = offsets.numel() - 1
        if batch_sizes is None:
            if bags < 0 or bags % self._features:
                raise ValueError(
                    f"lookup: expected offsets [F * B + 1] with F = {self._features} features, got "
                    f"{offsets.numel()} offsets."
                )
            batch = bags // self._features
            of_features = offsets[::batch] if batch else offsets.expand(self._features + 1)
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
            of_features = offsets[torch.tensor(per_feature)]
        # Checked here, before any id is inserted: the ops check only after the insertion.
        if bool((offsets[1:] < offsets[:-1]).any()):
            raise ValueError(
                "lookup: expected ascending offsets, got descending ones. Are there negative lengths?"
            )
        bounds = self._of_tables(of_features.tolist())
        if (bounds[0], bounds[-1]) != (0, ids):
            raise ValueError(
                f"lookup: expected offsets from 0 to {ids}, the number of ids, got {bounds[0]} to "
                f"{bounds[-1]}. Do lengths and values agree?"
            )
        return bounds

    def _of_tables(self, of_features: list[int]) -> list[int]:
        return [of_features[feature] for feature in self._first_feature]

    def _as_tensor(self, bounds: list[int], device: torch.device) -> Tensor:
        last, tensor = self._table_offsets
        if bounds != last or tensor.device != device:
            tensor = torch.tensor(bounds, device=device)
            self._table_offsets = (bounds, tensor)
        return tensor

    def _regular_segments(self, batch: int, width: int) -> Tensor:
        first_column = accumulate((self._columns[t] for t in self._table_of), initial=0)
        return torch.tensor(
            [
                [t, f * batch, batch, c, width]
                for f, (t, c) in enumerate(zip(self._table_of, first_column, strict=False))
            ]
        )

    def _sequence(self, table_offsets: Tensor, bounds: list[int], ids: int) -> Bags:
        columns = self._columns[0]
        last, segments = self._sequence_segments
        if bounds != last:
            segments = torch.tensor(
                [[t, b, e - b, b * columns, columns] for t, (b, e) in enumerate(pairwise(bounds))]
            )
            self._sequence_segments = (bounds, segments)
        return Bags(table_offsets, bounds, None, segments, ids * columns, (ids, columns))

    def _variable(
        self,
        table_offsets: Tensor,
        bounds: list[int],
        offsets: Tensor,
        batch_sizes: Sequence[Sequence[int]],
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
        return Bags(table_offsets, bounds, offsets, torch.tensor(lines), place, (place,))
