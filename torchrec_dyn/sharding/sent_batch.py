"""SentBatch: a batch as a rank sends it, with all that travels between ranks beside ids and lengths.

Its lengths are checked where they are first added up: before they are sent, and on one rank where ids are
split. If nobody adds them up, the lookup checks them.

The mode and the form of a batch are sent with it: they are those of all ranks.

A rank in evaluation runs no backward, and the others would wait for it, or read what it sends next. A batch
with a size per feature cannot be read as one with a single size, nor the reverse. So each rank sends
its mode and its form, and a difference is an error on every rank, before any table changes. (Where rows
travel, rows_to_bags.py, each id is a bag in either form: a collection of such tables alone takes both.)

A rank with torn tables sends that, too: all ranks raise its error.

TorchRec first exchanges how many numbers of each tensor follow: a row of numbers for each tensor, which the
host reads. A `SentBatch` adds a row of eight times the number of its ids, plus 4 of torn tables, plus 2 with
a size per feature, plus 1 in training: so there is no further exchange. The row has the label of the ids,
"values": of rows with one label TorchRec writes the last one received into the context of a sharding, where
`check_modes` reads it.

Batches of both forms send as many rows and as many tensors, so no rank waits for what another does not send.
TorchRec sends the sizes of a batch with a size per feature as a further tensor; here each feature's lengths
are followed by `_END` instead. On a GPU the host waits for the places of the ends, as TorchRec does for the
sizes. And TorchRec adds a last row with the size of a batch with one size; where the batch has none, the row
is of zeros.

Counts of ids that are sent once, for tables with a life, are sent as the weights of the batch. Float32 is
exact up to 2**24 only, so a count is sent as the 32 bits of an int32: the dists copy, sort and send weights,
but never compute with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.modules import FeatureIds
from torchrec_dyn.storage import places_of, torn_error

# TorchRec's labels.
_LENGTHS = "lengths"
_IDS = "values"
_SIZES = "strides"
_NO_TENSOR = ""
# Follows the lengths of a feature.
_END = -1


class SentBatch(KeyedJaggedTensor):
    """A batch that is sent with the mode of its rank: whether it trains, and has torn tables.

    `read` is what was read of the user's batch, whose lengths may be unchecked; None: they are checked.
    """

    _length_per_key: list[int] | None
    read: FeatureIds | None = None
    trains: bool = False
    is_torn: bool = False

    def length_per_key(self) -> list[int]:
        """Returns the number of ids of each feature, [F], after checks of the lengths."""
        if self._length_per_key is None and self.read is not None:
            self._length_per_key = self.read.counts
        return super().length_per_key()

    def offset_per_key(self) -> list[int]:
        """Returns where the ids of each feature begin, [F + 1], after checks of the lengths."""
        self.length_per_key()
        return super().offset_per_key()

    def counts_by_rank(self, lengths: Tensor, ranks: int) -> list[int] | None:
        """Returns the number of ids for each rank and feature, [ranks * F], after checks of the lengths.

        lengths [ranks * bags]: of these ids, sorted by rank. None if the batch is checked: TorchRec reads
        the numbers.
        """
        if self._length_per_key is not None or self.read is None:
            return None
        return self.read.counts_by_rank(lengths, ranks)

    def dist_labels(self) -> list[str]:
        """Returns the labels of the rows of `dist_splits`: of the tensors, the mode, and the zeros if any."""
        labels = super().dist_labels()
        if _SIZES not in labels:
            return [*labels, _IDS]
        return [*(label for label in labels if label != _SIZES), _IDS, _NO_TENSOR]

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Returns how many numbers of each tensor each rank gets, and the row of the mode and the form."""
        rows = dict(zip(super().dist_labels(), super().dist_splits(key_splits), strict=True))
        sizes = rows.pop(_SIZES, None)
        flags = 4 * self.is_torn + 2 * (sizes is not None) + self.trains
        mode = [8 * count + flags for count in rows[_IDS]]
        if sizes is None:
            return [*rows.values(), mode]
        rows[_LENGTHS] = [sum(both) for both in zip(rows[_LENGTHS], sizes, strict=True)]
        return [*rows.values(), mode, [0] * len(mode)]

    def dist_tensors(self) -> list[Tensor]:
        """Returns the tensors of the rows."""
        tensors = dict(zip(super().dist_labels(), super().dist_tensors(), strict=True))
        if tensors.pop(_SIZES, None) is not None:
            tensors[_LENGTHS] = _with_ends(tensors[_LENGTHS], self.stride_per_key())
        return [*tensors.values()]

    @staticmethod
    def dist_init(
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> KeyedJaggedTensor:
        """Returns the batch that arrived, as TorchRec's; without samples if batches of both forms did."""
        lengths, ids, *weights = tensors
        sent: list[Tensor] | None = None
        if variable_stride_per_key:
            if parts := _without_ends(lengths, num_workers * len(keys)):
                sent = [parts[0], ids, parts[1], *weights]
        elif lengths.numel() == len(keys) * sum(stride_per_rank or ()):
            sent = tensors
        if sent is None:  # `check_modes` raises
            return KeyedJaggedTensor(keys, ids[:0], lengths=lengths[:0], stride=0)
        return KeyedJaggedTensor.dist_init(
            keys, sent, variable_stride_per_key, num_workers, recat, stride_per_rank, stagger
        )


def _with_ends(lengths: Tensor, sizes: list[int]) -> Tensor:
    """Returns lengths [L] of F features of these sizes, each feature's followed by `_END`: [L + F]."""
    end = lengths.new_full((1,), _END)
    return torch.cat([part for feature in lengths.split(sizes) for part in (feature, end)])


def _without_ends(marked: Tensor, num_features: int) -> tuple[Tensor, Tensor] | None:
    """Returns the lengths and the sizes of `_with_ends`; None if ends are missing: two forms were sent."""
    if not num_features:
        return marked, marked  # both are empty
    ends = places_of(marked == _END, num_features)
    at = ends.tolist()
    if at[-1] < 0:
        return None
    lengths = [marked[begin + 1 : end] for begin, end in pairwise([-1, *at])]
    return torch.cat(lengths), ends.diff(prepend=ends.new_full((1,), -1)) - 1


def sent_batch(features: KeyedJaggedTensor, **changed: Any) -> SentBatch:
    """Returns a batch, with the same tensors where none are given, that can be sent."""
    batch = SentBatch.__new__(SentBatch)  # its constructor takes half of the time
    batch.__dict__.update(features.__dict__, **changed)
    return batch


def as_weights(counts: Tensor) -> Tensor:
    """Returns counts [N] int64 in [1, 2**31) as weights: [N] float32 with the bits of int32 counts."""
    return counts.to(torch.int32).view(torch.float32)


def counts_of(weights: Tensor) -> Tensor:
    """Returns the counts [N] int64 of weights [N] float32 that `as_weights` made, in any order."""
    return weights.view(torch.int32).long()


def check_modes(contexts: Iterable[Any], where: str) -> None:
    """Raises unless all ranks sent a batch in one mode and form, and of whole tables; once a batch."""
    by_type = _received_flags(contexts)
    flags = by_type[-1]
    torn = [rank for rank, number in enumerate(flags) if number & 4]
    evaluating = [rank for rank, number in enumerate(flags) if not number & 1]
    if torn:
        raise torn_error(f"the tables of {where} on ranks {torn}")
    if varying := _of_another_form(by_type):
        raise ValueError(
            f"{where}: expected batches of one form on every rank, got a size per feature on ranks {varying} "
            "and one size on the others. Give stride_per_key_per_rank and inverse_indices on every rank, "
            "also where one has no samples, or on none."
        )
    if 0 < len(evaluating) < len(flags):
        raise ValueError(
            f"{where}: expected every rank in the same mode, got ranks {evaluating} in evaluation and the "
            "others in training. Call train() or eval() of the model on every rank before the forward."
        )


def _of_another_form(by_type: Sequence[Sequence[int]]) -> list[int]:
    """Returns the ranks that sent a size per feature where others did not; flags [types][ranks].

    For tables whose rows travel all ranks do.
    """
    for flags in by_type:
        varying = [rank for rank, number in enumerate(flags) if number & 2]
        if 0 < len(varying) < len(flags):
            return varying
    return []


def _received_flags(contexts: Iterable[Any]) -> list[list[int]]:
    """Returns the flags that each rank sent, for each sharding type, and restores TorchRec's contexts."""
    flags: list[list[int]] = []
    for context in contexts:
        flags.append([number % 8 for number in context.output_splits])
        for name in ("input_splits", "output_splits"):
            if hasattr(context, name):
                setattr(context, name, [number // 8 for number in getattr(context, name)])
    return flags
