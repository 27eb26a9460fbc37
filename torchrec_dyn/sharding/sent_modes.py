"""The mode and the form of a batch are sent with it: they are those of all ranks.

A rank in evaluation runs no backward, and the others would wait for it, or read what it sends next. And of a
batch with a size per feature another tensor is sent than of a batch with one size. So each rank sends its
mode and its form, and a difference is an error before any table changes: of modes on every rank, of forms on
the ranks with one size, while the others wait for them.

TorchRec first exchanges how many numbers of each tensor follow: a row of numbers for each tensor, which the
host reads. A `SentBatch` adds two rows, so there is no further exchange and no further wait. One has four
times the number of its ids, plus 2 with a size per feature, plus 1 in training. It has the label of the ids,
"values": of rows with one label TorchRec writes the last one received into the context of a sharding, where
`check_modes` reads it. The other is of zeros, and stands where a batch of the other form has the number of
its sizes, or its size: so the first row has one place in both forms, and no rank waits for numbers that a
batch of the other form does not send.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# TorchRec's labels.
_IDS = "values"
_SIZES = "strides"
_NO_TENSOR = ""


class SentBatch(KeyedJaggedTensor):
    """A batch that is sent with the mode of its rank.

    Attributes:
        trains: True in training.
    """

    trains: bool

    def permute(
        self, indices: list[int], indices_tensor: torch.Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Permutes the features."""
        return with_mode(super().permute(indices, indices_tensor), self.trains)

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Splits the features."""
        return [with_mode(part, self.trains) for part in super().split(segments)]

    def dist_labels(self) -> list[str]:
        """Returns the labels of the rows of `dist_splits`; the last two have no tensor."""
        labels = super().dist_labels()
        if _SIZES not in labels:
            return [*labels, _NO_TENSOR, _IDS]
        return [*(one for one in labels if one != _SIZES), _SIZES, _IDS, _NO_TENSOR]

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Returns how many numbers of each tensor each rank gets, and the two rows."""
        rows = dict(zip(super().dist_labels(), super().dist_splits(key_splits), strict=True))
        sizes = rows.pop(_SIZES, None)
        mode = [4 * count + 2 * (sizes is not None) + self.trains for count in rows[_IDS]]
        zeros = [0] * len(mode)
        # TorchRec adds the size of a batch with one size as the last row.
        return [*rows.values(), *([zeros, mode] if sizes is None else [sizes, mode, zeros])]

    def dist_tensors(self) -> list[Tensor]:
        """Returns the tensors of the rows: the sizes come last."""
        tensors = dict(zip(super().dist_labels(), super().dist_tensors(), strict=True))
        sizes = tensors.pop(_SIZES, None)
        return [*tensors.values()] if sizes is None else [*tensors.values(), sizes]

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
        lengths, ids, *others = tensors
        if variable_stride_per_key:
            sizes = others.pop()
            is_mixed = sizes.numel() != num_workers * len(keys)
            others = [sizes, *others]
        else:
            is_mixed = lengths.numel() != len(keys) * sum(stride_per_rank or ())
        if is_mixed:  # `check_modes` raises
            return KeyedJaggedTensor(keys, ids[:0], lengths=lengths[:0], stride=0)
        return KeyedJaggedTensor.dist_init(
            keys,
            [lengths, ids, *others],
            variable_stride_per_key,
            num_workers,
            recat,
            stride_per_rank,
            stagger,
        )


def with_mode(features: KeyedJaggedTensor, trains: bool) -> SentBatch:
    """Returns a batch, with the same tensors, that is sent with a mode."""
    if isinstance(features, SentBatch):
        return features
    made = SentBatch.__new__(SentBatch)
    made.__dict__.update(features.__dict__)
    made.trains = trains
    return made


def with_mode_of(features: KeyedJaggedTensor, other: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns a batch that is sent with the mode of another, if that has one."""
    return with_mode(features, other.trains) if isinstance(other, SentBatch) else features


def expect_modes(contexts: Iterable[Any]) -> None:
    """Makes TorchRec write the received modes into its contexts of a batch, which is being sent."""
    for context in contexts:
        if not hasattr(context, "output_splits"):  # of pooled batches
            context.output_splits = []


def check_modes(contexts: Iterable[Any], where: str) -> None:
    """Checks that all ranks sent a batch in one mode and form, and restores TorchRec's contexts.

    Call it once for each batch.

    Raises:
        ValueError: if the modes differ, on every rank; if the forms differ, on the ranks with one size.
    """
    told: list[int] = []
    for context in contexts:
        told = [number % 4 for number in context.output_splits]
        for name in ("input_splits", "output_splits"):
            if hasattr(context, name):
                setattr(context, name, [number // 4 for number in getattr(context, name)])
    varying = [rank for rank, number in enumerate(told) if number & 2]
    evaluating = [rank for rank, number in enumerate(told) if not number & 1]
    if 0 < len(varying) < len(told):
        raise ValueError(
            f"{where}: expected batches of one form on every rank, got a size per feature on ranks {varying} "
            "and one size on the others. Give stride_per_key_per_rank and inverse_indices on every rank, "
            "also where one has no samples, or on none."
        )
    if 0 < len(evaluating) < len(told):
        raise ValueError(
            f"{where}: expected every rank in the same mode, got ranks {evaluating} in evaluation and the "
            "others in training. Call train() or eval() of the model on every rank before the forward."
        )
