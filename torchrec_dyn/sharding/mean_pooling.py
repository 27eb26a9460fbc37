"""Exact MEAN for tables whose rows are spread over ranks.

A rank that holds part of the rows cannot divide by the length of the bag. So the kernels sum, and the
outputs of MEAN tables with spread rows are divided here, after stitching. Other outputs are not divided.
(TorchRec 1.8.0 divides every output of the collection, and none under grid.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


class MeanDivisor:
    """Computes the divisor of each output of a collection.

    Args:
        features: for each output the feature whose bag lengths divide it; None: it is not divided.
        widths: number of columns of each output.

    Attributes:
        is_needed: True if any output is divided.
    """

    def __init__(self, features: Sequence[str | None], widths: Sequence[int]) -> None:
        self._features = list(features)
        self._widths = list(widths)
        self.is_needed = any(feature is not None for feature in self._features)

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns the divisor of a batch of B examples, [B, sum of widths] float32, at least 1."""
        columns = [
            None if feature is None else _bag_lengths(features, feature)
            for feature in self._features
        ]
        batch_size = next(lengths for lengths in columns if lengths is not None).numel()
        one = torch.ones(batch_size, device=features.device())
        lengths = torch.stack([one if c is None else c for c in columns], dim=1)
        widths = torch.tensor(self._widths, device=features.device())
        return lengths.repeat_interleave(widths, dim=1, output_size=sum(self._widths))


def _bag_lengths(features: KeyedJaggedTensor, feature: str) -> Tensor:
    """Returns the length of each example's bag, [B] float32; 1 for an empty bag."""
    key = features.keys().index(feature)
    strides = features.stride_per_key()
    begin = sum(strides[:key])
    lengths = features.lengths()[begin : begin + strides[key]].clamp(min=1).float()
    inverse = features.inverse_indices_or_none()
    if features.variable_stride_per_key() and inverse is not None:
        return lengths[inverse[1][inverse[0].index(feature)]]
    return lengths


def divide(pooled: KeyedTensor, divisor: Tensor) -> KeyedTensor:
    """Divides sums by divisor [B, sum of widths], of their shape; a callback of TorchRec's awaitable."""
    values = pooled.values()
    return KeyedTensor(
        keys=pooled.keys(),
        length_per_key=pooled.length_per_key(),
        values=(values / divisor).to(values.dtype),
        key_dim=1,
    )
