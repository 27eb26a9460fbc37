"""Checks of the tensors of a batch; BagLayout: the ids of each bag, and the place of its row in the output.

Legend: T tables, F features (in table order), N ids, k batches, S segments (a segment is a run of bags of one
table).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.lookup.batch import Batch
from torchrec_dyn.ops import complete_cumsum
from torchrec_dyn.storage import host_numbers
from torchrec_dyn.table import TableShard

Pooling = Literal["sum", "mean", "none"]
_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


def lookup_of(tables: Sequence[TableShard]) -> str:
    """Returns the begin of errors of a lookup of `tables`."""
    return f"lookup of tables {', '.join(table.name for table in tables)}"


def contiguous_input(tables: Sequence[TableShard], batch: Batch) -> None:
    """Makes the tensors of a batch contiguous.

    Raises:
        ValueError: one of them has a wrong dtype or shape, or is not where the rows are.
    """
    ids, weights = batch.ids, batch.weights
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise _misfit(tables, f"ids [N] of int64, got {_kind(ids)}. Convert with ids.long().")
    if weights is not None and (not weights.is_floating_point() or weights.shape != ids.shape):
        raise _misfit(tables, f"[{ids.numel()}] floating point weights, got {_kind(weights)}.")
    for numbers in (batch.lengths, batch.offsets):
        if numbers is not None and (
            numbers.dtype not in (torch.int64, torch.int32) or numbers.dim() != 1
        ):
            name = "lengths [F * B]" if numbers is batch.lengths else "offsets [F * B + 1]"
            raise _misfit(tables, f"{name} of int64 or int32, got {_kind(numbers)}.")
    _check_device(tables, (ids, batch.lengths, batch.offsets, weights))
    batch.ids = ids.contiguous()
    if batch.lengths is not None:
        batch.lengths = batch.lengths.contiguous()
    if batch.offsets is not None:
        batch.offsets = batch.offsets.contiguous()


def _check_device(tables: Sequence[TableShard], tensors: Sequence[Tensor | None]) -> None:
    on_cpu = tables[0].weights.device.type == "cpu"
    for tensor in tensors:
        if tensor is not None and tensor.is_cpu != on_cpu:
            raise _misfit(
                tables,
                f"ids, offsets and weights on {tables[0].weights.device}, where the rows are, got a tensor "
                f"on {tensor.device}. Move the batch, or the collection, with .to(...).",
            )


def wrong_bags(tables: Sequence[TableShard], batch: Batch) -> ValueError:
    """Returns the error of a batch whose lengths or offsets are wrong. A GPU's host waits for the numbers."""
    ids, lengths, offsets = batch.ids.numel(), batch.lengths, batch.offsets
    where = batch.where or lookup_of(tables)
    if lengths is not None:
        numbers = [*torch.aminmax(lengths), lengths.sum()] if lengths.numel() else [0, 0, 0]
        least, most, total = (int(number) for number in numbers)
        if least < 0 or most > ids or total != ids:  # the sum of long lengths may wrap around
            return ValueError(
                f"{where}: expected lengths that are not negative and add up to the {ids} ids, got a minimum "
                f"of {least} and a sum of {total}."
            )
        return ValueError(
            f"{where}: expected offsets that begin at 0 and agree with the lengths of a batch, got others. "
            "Pass lengths or offsets to the KeyedJaggedTensor, not both."
        )
    ends = [] if offsets is None else offsets.tolist()
    if ends != sorted(ends):
        return ValueError(
            f"{where}: expected ascending offsets, got descending ones. Are there negative lengths?"
        )
    return ValueError(
        f"{where}: expected offsets from 0 to {ids}, the number of ids, got {ends[0]} to {ends[-1]}. Do "
        "lengths and values agree?"
    )


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


class BatchShape(NamedTuple):
    """The part of a batch that follows from its numbers of bags, whatever its ids.

    Attributes:
        first_bags: [F + 1] int64 on the CPU, the first bag of each feature, and the number of bags.
        segments: [S, 5] int64 on the CPU (csrc/lookup/bags.h); None for sequences.
        elements, shape: of the output; of sequences not known.
    """

    first_bags: Tensor
    segments: Tensor | None
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
        self._is_sequence = pooling == "none"
        self._columns = list(columns)
        self._table_of = [t for t, count in enumerate(features_per_table) for _ in range(count)]
        self._first_feature = list(accumulate(features_per_table, initial=0))
        self._features = len(self._table_of)
        self._width = sum(columns[t] for t in self._table_of)
        self.first_features = torch.tensor(self._first_feature, device="cpu")
        # Of the last batch: the next batch often has the same number of bags.
        self._last: tuple[int | None, BatchShape] = (None, BatchShape(_NONE, None, 0, ()))

    def shape_of(self, bags: int, batch_sizes: Sequence[Sequence[int]] | None) -> BatchShape:
        """Returns the shape of a batch of so many bags.

        batch_sizes [F][ranks], bags of each feature and rank, or None if all features have the same number.

        Raises:
            ValueError: the number of bags, or the batch sizes, are not valid.
        """
        if batch_sizes is not None:
            return self._varying(bags, batch_sizes)
        if self._last[0] != bags:
            self._last = bags, self._regular(bags)
        return self._last[1]

    def _regular(self, bags: int) -> BatchShape:
        if bags < 0 or bags % self._features:
            raise ValueError(
                f"lookup: expected offsets [F * B + 1] with F = {self._features} features, got "
                f"{bags + 1} offsets."
            )
        batch = bags // self._features
        first_bags = torch.arange(self._features + 1, device="cpu") * batch
        if self._is_sequence:
            return BatchShape(first_bags, None, 0, ())
        segments = self._regular_segments(batch)
        return BatchShape(first_bags, segments, batch * self._width, (batch, self._width))

    def _varying(self, bags: int, batch_sizes: Sequence[Sequence[int]]) -> BatchShape:
        in_all = sum(sum(sizes) for sizes in batch_sizes)
        if len(batch_sizes) != self._features or in_all != bags:
            raise ValueError(
                f"lookup: expected batch sizes of {self._features} features that sum to {bags} "
                f"bags, got {len(batch_sizes)} features and {in_all} bags."
            )
        ranks = {len(sizes) for sizes in batch_sizes}
        if len(ranks) != 1 or any(size < 0 for sizes in batch_sizes for size in sizes):
            raise ValueError(
                "lookup: expected batch sizes >= 0 of the same ranks for every feature, got "
                f"{[list(sizes) for sizes in batch_sizes]}."
            )
        begins = [*accumulate((sum(sizes) for sizes in batch_sizes), initial=0)]
        first_bags = host_numbers(begins)
        if self._is_sequence:
            return BatchShape(first_bags, None, 0, ())
        segments, elements = self._varying_segments(begins, batch_sizes)
        return BatchShape(first_bags, segments, elements, (elements,))

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

    def offsets_of_tables(self, begins: Tensor) -> Tensor:
        """Returns where the ids of each table begin, [T + 1] int64; begins [F + 1], those of each feature."""
        if len(self._first_feature) == self._features + 1:  # each table has one feature
            return begins
        return begins[self.first_features]

    def bags(self, shape: BatchShape, offsets: Tensor, table_offsets: Tensor, ids: int) -> Bags:
        """Returns the description of a batch; offsets [bags + 1] and table_offsets [T + 1] int64."""
        if shape.segments is None:
            return self._sequence(table_offsets, ids)
        return Bags(table_offsets, offsets, shape.segments, shape.elements, shape.shape)

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

    def _varying_segments(
        self, first_bags: Sequence[int], batch_sizes: Sequence[Sequence[int]]
    ) -> tuple[Tensor, int]:
        """Returns the segments, rank by rank, and the elements of their outputs."""
        lines: list[list[int]] = []
        place, next_bag = 0, list(first_bags)
        for rank in range(len(batch_sizes[0])):
            for feature, table in enumerate(self._table_of):
                bags, columns = batch_sizes[feature][rank], self._columns[table]
                lines.append([table, next_bag[feature], bags, place, columns])
                next_bag[feature] += bags
                place += bags * columns
        return torch.tensor(lines, device="cpu"), place


def _places_of_runs(begins: Tensor, sizes: Tensor, total: int) -> Tensor:
    """Returns the places of k * F runs, by feature and then by batch, [total] int64.

    begins [k, F] and sizes [k, F] int64, the first place and the number of places of each run.
    """
    begins, sizes = begins.t().flatten(), sizes.t().flatten()
    moves = begins - (sizes.cumsum(0) - sizes)
    places = torch.arange(total, device=begins.device)
    return places + moves.repeat_interleave(sizes, output_size=total)
