"""Pools bags on the rank of their batch, so that their weights get gradients under any plan.

A sharded pooled collection sends weights together with ids, and TorchRec's exchange has no backward for
weights. Here only ids are sent. One row per id is returned, and the rank of the batch multiplies it by its
weight and sums the rows.

Legend: B bags, K ids looked up, D columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.layers.bags import BagOptions, one_bag, read_bags
from torchrec_dyn.layers.inputs import Input, shares
from torchrec_dyn.layers.row_pooling import pooled_rows


class WeightedBags(NamedTuple):
    """The weights and bags of rows."""

    weights: Tensor  # [K] float32
    lengths: Tensor  # [B] int64, number of rows in each bag
    shape: torch.Size  # of the output, without its last dimension


class RowsReader(nn.Module):
    """A module that converts weighted bags to a feature of ids without weights.

    `options.is_weighted` is True. With `mean`, weights are divided by their sum in the bag.
    """

    def __init__(self, options: BagOptions, mean: bool) -> None:
        super().__init__()
        self._options = options
        self._mean = mean

    def forward(
        self, source: Input, weights: Tensor | None, is_sharded: bool
    ) -> tuple[KeyedJaggedTensor, WeightedBags]:
        """Returns the feature of K ids, and the weights and bags of their rows."""
        bags = read_bags(source, weights, self._options)
        assert bags.weights is not None  # weighted bags have weights
        of_ids = shares(bags.weights, bags.lengths) if self._mean else bags.weights
        weighted = WeightedBags(of_ids, bags.lengths, bags.shape)
        return one_bag(self._options.name, bags.ids), weighted


class RowsPooler(nn.Module):
    """A module that sums weighted rows by bag."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, output: Any, bags: WeightedBags) -> Tensor:
        """Returns the pooled rows, `[*shape, D]`."""
        rows = output[self._name].values()
        pooled = pooled_rows(rows, bags.lengths, bags.weights, mean=False)
        return pooled.view(*bags.shape, rows.shape[1])
