"""The floor of training end to end: a sharded TorchRec collection whose lookups take no time.

Model, plan, batches and dists are those of the static side. A lookup returns constant rows in the shape of
its output, and its backward drops the gradient. So what remains is the time of TorchRec, gloo and the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig


class _Constant(torch.autograd.Function):
    """Returns rows that require a gradient, without a copy; drops the gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor) -> Tensor:
        return rows.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class FreeKernel(nn.Module):
    """Stands for the compute kernel of a table group.

    Args:
        config: TorchRec's table group.
        value: value of all elements of the output.
    """

    def __init__(self, config: GroupedEmbeddingConfig, value: float) -> None:
        super().__init__()
        self.config = config
        self._is_sequence = config.pooling == PoolingType.NONE
        widths = config.embedding_dims()
        self._width = widths[0] if self._is_sequence else sum(widths)
        self._value = value
        self._anchor = torch.zeros((), requires_grad=True)
        self._rows = torch.empty(0, 0)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns [B, D of all features] for bags, [N, D] for sequences."""
        count = features.values().numel() if self._is_sequence else features.stride()
        if len(self._rows) < count:
            shape, device = (count, self._width), features.values().device
            self._rows = torch.full(shape, self._value, device=device)
        output: Tensor = _Constant.apply(self._anchor, self._rows[:count])
        return output


def make_lookups_free(sharded: Any, value: float) -> None:
    """Replaces the compute kernels of a sharded collection of TorchRec.

    Args:
        sharded: the sharded collection.
        value: value of all elements of the rows.
    """
    for lookup in sharded._lookups:
        for place, kernel in enumerate(lookup._emb_modules):
            lookup._emb_modules[place] = FreeKernel(kernel.config, value)
