"""Checks of the tensors of a batch; BagLayout: the ids of each bag, and the place of its row in the output.

Legend: T tables, F features (in table order), N ids, k batches, S segments (a segment is a run of bags of one
table).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from torchrec_dyn.ops import complete_cumsum
from torchrec_dyn.storage import host_numbers
from torchrec_dyn.table import TableShard

Pooling = Literal["sum", "mean", "none"]
_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


def lookup_of(tables: Sequence[TableShard]) -> str:
    """Returns the begin of errors of a lookup of `tables`."""
    return f"lookup of tables {', '.join(table.name for table in tables)}"


def checked_input(
    tables: Sequence[TableShard], ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the ids, offsets and weights of a batch of `tables`, contiguous, the offsets as int64.

    ids [N], offsets [F * B + 1] and weights [N] are those of `TableGroup.__call__`.

    Raises:
        ValueError: one of them has a wrong dtype or shape, or is on another device than the rows.
    """
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise _misfit(tables, f"ids [N] of int64, got {_kind(ids)}. Convert with ids.long().")
    if weights is not None and (not weights.is_floating_point() or weights.shape != ids.shape):
        raise _misfit(tables, f"[{ids.numel()}] floating point weights, got {_kind(weights)}.")
    if offsets.dtype not in (torch.int64, torch.int32) or offsets.dim() != 1:
        raise _misfit(tables, f"offsets [F * B + 1] of int64 or int32, got {_kind(offsets)}.")
    device = tables[0].weights.device
    on_cpu = device.type == "cpu"
    for tensor in (ids, offsets, weights):
        if tensor is not None and tensor.is_cpu != on_cpu:
            raise _misfit(
                tables,
                f"ids, offsets and weights on {device}, where the rows are, got a tensor on "
                f"{tensor.device}. Move the batch, or the collection, with .to(...).",
            )
    return ids.contiguous(), offsets.to(torch.int64).contiguous(), weights


def _misfit(tables: Sequence[TableShard], what: str) -> ValueError:
    return ValueError(f"{lookup_of(tables)}: expected {what}")


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"


@dataclass(frozen=True)
class Bags:
    """The description of one batch for the ops (csrc/lookup/bags.h).

    Attributes:
        table_offsets: [T + 1] int64 on the CPU, where the ids of each table begin.
        offsets: [bags + 1] int64 on the device of the ids, or None for sequences.
        segments: [S, 5] int64 on the CPU.
        elements, shape: of the output.
    """

    table_offsets: Tensor
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
        self._width = sum(columns[t] for t in self._table_of)
        # Values of the last batch: the next batch often has the same number of bags.
        self._cached: tuple[int, Tensor, Tensor] = (-1, torch.empty(0), torch.empty(0))

    def table_offsets(
        self, offsets: Tensor, ids: int, batch_sizes: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Returns the begin of each table's ids, [T + 1] int64 on the CPU.

        offsets [bags + 1] int64 on any device, where each bag begins in the ids; `ids` is N;
        batch_sizes [F][ranks], bags of each feature and rank, or None if all features have the same number.

        Raises:
            ValueError: offsets or batch sizes are not valid.
        """
        bags = offsets.numel() - 1
        if batch_sizes is None:
            if bags < 0 or bags % self._features:
                raise ValueError(
                    f"lookup: expected offsets [F * B + 1] with F = {self._features} features, got "
                    f"{offsets.numel()} offsets."
                )
        else:
            in_all = sum(sum(sizes) for sizes in batch_sizes)
            if len(batch_sizes) != self._features or in_all != bags:
                raise ValueError(
                    f"lookup: expected batch sizes of {self._features} features that sum to {bags} "
                    f"bags, got {len(batch_sizes)} features and {in_all} bags."
                )
            ranks = {len(sizes) for sizes in batch_sizes}
            if len(ranks) != 1 or any(bags < 0 for sizes in batch_sizes for bags in sizes):
                raise ValueError(
                    "lookup: expected batch sizes >= 0 of the same ranks for every feature, got "
                    f"{[list(sizes) for sizes in batch_sizes]}."
                )
        # Checked here, before any id is inserted: the ops check only after the insertion.
        descends = (offsets[1:] < offsets[:-1]).any()
        table_offsets = offsets[self._first_bags(bags, batch_sizes).to(offsets.device)]
        if not offsets.is_cpu:  # one read of a GPU
            words = torch.cat([table_offsets, descends.view(1)]).cpu()
            table_offsets, descends = words[:-1], words[-1]
        first, *_, last = table_offsets.tolist()
        if descends:
            raise ValueError(
                "lookup: expected ascending offsets, got descending ones. Are there negative lengths?"
            )
        if (first, last) != (0, ids):
            raise ValueError(
                f"lookup: expected offsets from 0 to {ids}, the number of ids, got {first} to "
                f"{last}. Do lengths and values agree?"
            )
        return table_offsets

    def begins_of_tables(self, begins: Tensor) -> Tensor:
        """Returns the begin of each table's ids, [T + 1] int64 on the device of `begins`.

        begins [F + 1] int64 are the begin of each feature's ids, and the end of the last.
        """
        if len(self._first_feature) == self._features + 1:  # each table has one feature
            return begins
        # Not waited for: the copy is in the order of the stream.
        return begins[host_numbers(self._first_feature).to(begins.device, non_blocking=True)]

    def begins_of_features(
        self, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Returns the begin of each feature's ids, and the end of the last, [F + 1] int64.

        offsets [bags + 1] int64 on any device, checked; batch_sizes as in `table_offsets`.
        """
        if batch_sizes is None:
            batch = (offsets.numel() - 1) // self._features
            first_bags = torch.arange(self._features + 1, device="cpu") * batch
        else:
            sizes = (sum(sizes) for sizes in batch_sizes)
            first_bags = torch.tensor(list(accumulate(sizes, initial=0)), device="cpu")
        return offsets[first_bags.to(offsets.device, non_blocking=True)]

    def joined(self, batches: Sequence[Bags], begins: Sequence[Tensor]) -> tuple[Bags, Tensor]:
        """Returns the description of several batches as one, and the places of its ids in the batches.

        The ids of a feature come one batch after another, as in one large batch. The outputs of the batches
        follow each other: those of the joined batch are not in the order of a large one. For sequences the
        outputs are in the order of the ids.

        batches: k descriptions; begins: `begins_of_features` of each.

        Returns:
            The description, whose shape is that of all outputs one after another, and [N] int64.
        """
        table_offsets = torch.stack([one.table_offsets for one in batches]).sum(0)
        ids = int(table_offsets[-1])
        runs = torch.stack(list(begins))  # [k, F + 1]
        sizes = runs.diff(dim=1)
        before = sizes.sum(1).cumsum(0) - sizes.sum(1)
        places = _places_of_runs(runs[:, :-1] + before[:, None], sizes, ids)
        if self._is_sequence:
            return self._sequence(table_offsets, ids), places
        segments = [one.segments.view(-1, self._features, 5) for one in batches]  # ranks, F
        counts = torch.stack([of_batch[:, :, 2].sum(0) for of_batch in segments])  # [k, F] bags
        bags, first_bags = int(counts.sum()), counts.t().flatten().cumsum(0).roll(1)
        first_bags[0] = 0
        lines: list[Tensor] = []
        first_output = 0
        for one, of_batch, first_bag in zip(
            batches, segments, first_bags.view(-1, len(batches)).t(), strict=True
        ):
            of_ranks, moved = of_batch[:, :, 2], of_batch.clone()
            moved[:, :, 1] = first_bag + of_ranks.cumsum(0) - of_ranks
            moved[:, :, 3] += first_output
            first_output += one.elements
            lines.append(moved.flatten(0, 1))
        lengths = torch.cat([one.offsets.diff() for one in batches if one.offsets is not None])
        firsts = (counts.cumsum(1) - counts) + (counts.sum(1).cumsum(0) - counts.sum(1))[:, None]
        order = _places_of_runs(firsts, counts, bags).to(lengths.device, non_blocking=True)
        offsets = complete_cumsum(lengths[order])
        all_lines = torch.cat(lines)
        return Bags(table_offsets, offsets, all_lines, first_output, (first_output,)), places

    def offsets_of_tables(self, counts: Sequence[int]) -> Tensor:
        """Returns the begin of each table's ids, [T + 1] int64 on the CPU; counts [F] are ids of features."""
        begins = list(accumulate(counts, initial=0))
        return host_numbers([begins[f] for f in self._first_feature])

    def describe(
        self,
        offsets: Tensor,
        ids: int,
        batch_sizes: Sequence[Sequence[int]] | None,
        counts: Sequence[int] | None = None,
    ) -> Bags:
        """Returns the description of one batch.

        As `BagLayout.table_offsets`, but not checked with counts [F], the number of ids of each feature: then
        the caller has checked that offsets ascend from 0 to N, and the number of bags. (The ops check again
        before they read memory.)
        """
        if counts is None:
            table_offsets = self.table_offsets(offsets, ids, batch_sizes)
        elif offsets.is_cpu:
            table_offsets = offsets[self._first_bags(offsets.numel() - 1, batch_sizes)]
        else:
            table_offsets = self.offsets_of_tables(counts)
        if self._is_sequence:
            return self._sequence(table_offsets, ids)
        return self._pooled(table_offsets, offsets, batch_sizes)

    def describe_uncounted(
        self, offsets: Tensor, ids: int, batch_sizes: Sequence[Sequence[int]] | None
    ) -> Bags | None:
        """Returns the description of a batch whose counts are not known, without `table_offsets`.

        As `BagLayout.table_offsets`, but not checked: the caller has checked the number of bags. Returns None
        for sequences of several tables, where the tables of ids are not known.
        """
        if not self._is_sequence:
            return self._pooled(_NONE, offsets, batch_sizes)
        if len(self._columns) > 1:
            return None
        return self._sequence(host_numbers([0, ids]), ids)

    def _first_bags(self, bags: int, batch_sizes: Sequence[Sequence[int]] | None) -> Tensor:
        """Returns the first bag of each table, and the number of bags, [T + 1] int64 on the CPU."""
        if batch_sizes is None:
            return self._of_batch(bags // self._features)[1]
        first_bag = list(accumulate((sum(sizes) for sizes in batch_sizes), initial=0))
        return torch.tensor([first_bag[feature] for feature in self._first_feature], device="cpu")

    def _of_batch(self, batch: int) -> tuple[int, Tensor, Tensor]:
        """Returns B, the first bag of each table and the segments of batches of B bags per feature."""
        if self._cached[0] != batch:
            first_bags = torch.tensor(self._first_feature, device="cpu") * batch
            self._cached = (batch, first_bags, self._regular_segments(batch))
        return self._cached

    def _regular_segments(self, batch: int) -> Tensor:
        first_column = accumulate((self._columns[t] for t in self._table_of), initial=0)
        return torch.tensor(
            [
                [t, f * batch, batch, c, self._width]
                for f, (t, c) in enumerate(zip(self._table_of, first_column, strict=False))
            ],
            device="cpu",
        )

    def _sequence(self, table_offsets: Tensor, ids: int) -> Bags:
        columns, begins, sizes = self._columns[0], table_offsets[:-1], table_offsets.diff()
        widths = torch.full_like(sizes, columns)
        tables = torch.arange(sizes.numel(), device=sizes.device)
        segments = torch.stack([tables, begins, sizes, begins * columns, widths], dim=1)
        return Bags(table_offsets, None, segments, ids * columns, (ids, columns))

    def _pooled(
        self,
        table_offsets: Tensor,
        offsets: Tensor,
        batch_sizes: Sequence[Sequence[int]] | None,
    ) -> Bags:
        if batch_sizes is not None:
            return self._variable(table_offsets, offsets, batch_sizes)
        batch, _, segments = self._of_batch((offsets.numel() - 1) // self._features)
        shape = (batch, self._width)
        return Bags(table_offsets, offsets, segments, batch * self._width, shape)

    def _variable(
        self,
        table_offsets: Tensor,
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
        return Bags(table_offsets, offsets, torch.tensor(lines, device="cpu"), place, (place,))


def _places_of_runs(begins: Tensor, sizes: Tensor, total: int) -> Tensor:
    """Returns the places of k * F runs, by feature and then by batch, [total] int64.

    begins [k, F] and sizes [k, F] int64, the first place and the number of places of each run.
    """
    begins, sizes = begins.t().flatten(), sizes.t().flatten()
    moves = begins - (sizes.cumsum(0) - sizes)
    places = torch.arange(total, device=begins.device)
    return places + moves.repeat_interleave(sizes, output_size=total)
