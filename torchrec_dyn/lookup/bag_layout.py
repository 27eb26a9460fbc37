"""Checks of the tensors of a batch; BagLayout: the ids of each bag, and the place of its row in the output.

Legend: T tables, F features (in table order), N ids, k batches, S segments (a segment is a run of bags of one
table).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchrec_dyn.lookup.batch import Batch
from torchrec_dyn.ops import complete_cumsum
from torchrec_dyn.storage import host_numbers
from torchrec_dyn.table import TableShard

Pooling = Literal["sum", "mean", "max", "none"]
_LOOKS_UP_IDS = ("max", "none")  # the maximum is taken of sequences (largest.py)
_INTEGERS = ((torch.int64, 1), (torch.int32, 1))  # dtypes and dimensions of lengths and offsets


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
    for name, size in (("lengths", "[F * B]"), ("offsets", "[F * B + 1]")):
        numbers = getattr(batch, name)
        if numbers is None:
            continue
        if (numbers.dtype, numbers.dim()) not in _INTEGERS:
            raise _misfit(tables, f"{name} {size} of int64 or int32, got {_kind(numbers)}.")
        setattr(batch, name, numbers.contiguous())
    rows = tables[0].weights
    for tensor in (ids, batch.lengths, batch.offsets, weights):
        if tensor is None or (tensor.is_cpu and rows.is_cpu):
            continue
        if tensor.device != rows.device:
            raise _misfit(
                tables,
                f"ids, offsets and weights on {rows.device}, where the rows are, got a tensor on "
                f"{tensor.device}. Move the batch, or the collection, with .to(...).",
            )
    batch.ids = ids.contiguous()


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


class Bags(NamedTuple):
    """The bags of one batch and their places in the output.

    Attributes:
        segments: [S, 5] int64 on the CPU (csrc/lookup/bags.h).
        elements, shape: of the output.
    """

    segments: Tensor
    elements: int
    shape: tuple[int, ...]

    @property
    def arguments(self) -> tuple[Tensor, int, int]:
        """Segments, and rows and columns of the output for `ops.find_and_pool`."""
        return self.segments, self.shape[0], self.shape[1] if len(self.shape) > 1 else 0


class BagLayout:
    """Layout of batches for tables of fixed widths and features."""

    def __init__(
        self, columns: Sequence[int], features_per_table: Sequence[int], pooling: Pooling
    ) -> None:
        if pooling not in get_args(Pooling):
            raise ValueError(
                f'BagLayout: expected pooling "sum", "mean", "max" or "none", got {pooling!r}.'
            )
        if pooling in _LOOKS_UP_IDS and len(set(columns)) > 1:
            raise ValueError(
                f"BagLayout: expected tables of one width for sequences, got {sorted(set(columns))}."
            )
        if len(features_per_table) != len(columns):
            raise ValueError(
                f"BagLayout: expected the number of features of each of {len(columns)} tables, got "
                f"{list(features_per_table)}."
            )
        self._is_sequence = pooling in _LOOKS_UP_IDS
        self._columns = list(columns)
        self._table_of = [t for t, count in enumerate(features_per_table) for _ in range(count)]
        self._first_feature = list(accumulate(features_per_table, initial=0))
        self._features = len(self._table_of)
        self._width = sum(columns[t] for t in self._table_of)
        self.first_features = torch.tensor(self._first_feature, device="cpu")
        # Of the last batch: the next batch often has the same number of bags.
        self._last: tuple[int | None, Tensor, Bags | None] = (None, self.first_features, None)

    def bags_of(self, batch: Batch) -> Bags | None:
        """Returns the bags of a batch, and notes the first ones in it; None for sequences (`sequences`).

        Raises:
            ValueError: the number of bags, or the batch sizes, are not valid.
        """
        count = -1
        if batch.lengths is not None:
            count = batch.lengths.numel()
        elif batch.offsets is not None:
            count = batch.offsets.numel() - 1
        if batch.batch_sizes is not None:
            batch.first_bags, bags = self._varying(count, batch.batch_sizes)
            return bags
        if self._last[0] != count:
            self._last = count, *self._regular(count)
        _, batch.first_bags, bags = self._last
        return bags

    def _regular(self, bags: int) -> tuple[Tensor, Bags | None]:
        if bags < 0 or bags % self._features:
            raise ValueError(
                f"lookup: expected offsets [F * B + 1] with F = {self._features} features, got "
                f"{bags + 1} offsets."
            )
        batch = bags // self._features
        first_bags = torch.arange(self._features + 1, device="cpu") * batch
        if self._is_sequence:
            return first_bags, None
        first_column = accumulate((self._columns[t] for t in self._table_of), initial=0)
        lines = [
            [t, f * batch, batch, c, self._width]
            for f, (t, c) in enumerate(zip(self._table_of, first_column, strict=False))
        ]
        shape = (batch, self._width)
        return first_bags, Bags(torch.tensor(lines, device="cpu"), batch * self._width, shape)

    def _varying(
        self, bags: int, batch_sizes: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Bags | None]:
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
            return first_bags, None
        return first_bags, self._varying_bags(begins, batch_sizes)

    def _varying_bags(
        self, first_bags: Sequence[int], batch_sizes: Sequence[Sequence[int]]
    ) -> Bags:
        """Returns the bags, rank by rank."""
        lines: list[list[int]] = []
        place, next_bag = 0, list(first_bags)
        for rank in range(len(batch_sizes[0])):
            for feature, table in enumerate(self._table_of):
                bags, columns = batch_sizes[feature][rank], self._columns[table]
                lines.append([table, next_bag[feature], bags, place, columns])
                next_bag[feature] += bags
                place += bags * columns
        return Bags(torch.tensor(lines, device="cpu"), place, (place,))

    def joined(
        self,
        batches: Sequence[Bags],
        offsets: Sequence[Tensor | None],
        begins: Sequence[Tensor],
    ) -> tuple[Bags, Tensor | None, Tensor]:
        """Returns several batches as one: its bags, their offsets, and the places of its ids in the batches.

        The ids of a feature come one batch after another, as in one large batch. The outputs of the batches
        follow each other: those of the joined batch are not in the order of a large one. For sequences the
        outputs are in the order of the ids.

        batches: k of them; offsets: of their bags, None for sequences; begins [F + 1] of their features.

        Returns:
            The bags, whose shape is that of all outputs one after another; [bags + 1] int64; and [N] int64.
        """
        runs = torch.stack(list(begins))  # [k, F + 1]
        ids = int(runs[:, -1].sum())
        sizes = runs.diff(dim=1)
        before = sizes.sum(1).cumsum(0) - sizes.sum(1)
        places = _places_of_runs(runs[:, :-1] + before[:, None], sizes, ids)
        if self._is_sequence:
            return self.sequences(self.offsets_of_tables(runs.sum(0)), ids), None, places
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
        lengths = torch.cat([of_batch.diff() for of_batch in offsets if of_batch is not None])
        firsts = (counts.cumsum(1) - counts) + (counts.sum(1).cumsum(0) - counts.sum(1))[:, None]
        order = _places_of_runs(firsts, counts, bags).to(lengths.device, non_blocking=True)
        joined = Bags(torch.cat(lines), first_output, (first_output,))
        return joined, complete_cumsum(lengths[order]), places

    def offsets_of_tables(self, begins: Tensor) -> Tensor:
        """Returns where the ids of each table begin, [T + 1] int64; begins [F + 1], those of each feature."""
        if len(self._first_feature) == self._features + 1:  # each table has one feature
            return begins
        return begins[self.first_features]

    def sequences(self, table_offsets: Tensor, ids: int) -> Bags:
        """Returns the bags of a batch of sequences, as if each table had one bag for each of its ids.

        table_offsets [T + 1] int64: where the ids of each table begin.
        """
        columns, begins, sizes = self._columns[0], table_offsets[:-1], table_offsets.diff()
        widths = torch.full_like(sizes, columns)
        tables = torch.arange(sizes.numel(), device=sizes.device)
        segments = torch.stack([tables, begins, sizes, begins * columns, widths], dim=1)
        return Bags(segments, ids * columns, (ids, columns))


def _places_of_runs(begins: Tensor, sizes: Tensor, total: int) -> Tensor:
    """Returns the places of k * F runs, by feature and then by batch, [total] int64.

    begins [k, F] and sizes [k, F] int64, the first place and the number of places of each run.
    """
    begins, sizes = begins.t().flatten(), sizes.t().flatten()
    moves = begins - (sizes.cumsum(0) - sizes)
    places = torch.arange(total, device=begins.device)
    return places + moves.repeat_interleave(sizes, output_size=total)
