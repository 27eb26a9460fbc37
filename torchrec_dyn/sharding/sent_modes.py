"""The mode of a batch is sent with it: all ranks train a batch, or all evaluate it.

A rank in evaluation runs no backward, and the others would wait for it, or read what it sends next. So each
rank sends its mode, and a difference is an error on every rank, before any table changes.

TorchRec first exchanges how many numbers of each tensor follow: a row of numbers for each tensor, which the
host reads. A `SentBatch` adds one row, so there is no further exchange and no further wait: the number of its
ids, doubled, plus 1 in training. The row has the label of the ids, "values". Of rows with one label TorchRec
writes the last one received into the context of a sharding, where `check_modes` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_IDS = "values"  # TorchRec's label


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
        """Returns the labels of the rows of `dist_splits`; the last one has no tensor."""
        return [*super().dist_labels(), _IDS]

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Returns how many numbers of each tensor each rank gets, and the row with the mode."""
        splits = super().dist_splits(key_splits)
        ids = splits[super().dist_labels().index(_IDS)]
        return [*splits, [2 * count + self.trains for count in ids]]


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
    """Checks that all ranks sent a batch in one mode, and restores TorchRec's contexts; once for each batch.

    Raises:
        ValueError: on every rank, if the modes differ.
    """
    modes: list[int] = []
    for context in contexts:
        modes = [count % 2 for count in context.output_splits]
        for name in ("input_splits", "output_splits"):
            if hasattr(context, name):
                setattr(context, name, [count // 2 for count in getattr(context, name)])
    if len(set(modes)) > 1:
        evaluating = [rank for rank, trains in enumerate(modes) if not trains]
        raise ValueError(
            f"{where}: expected every rank in the same mode, got ranks {evaluating} in evaluation and the "
            "others in training. Call train() or eval() of the model on every rank before the forward."
        )
