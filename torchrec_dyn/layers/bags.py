"""Reads the bags of DynamicEmbeddingBag and shapes the output of its pooled collection.

Legend: B bags, K ids looked up, D columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.layers.inputs import Input, is_dense, read_ids, read_weights, shares


class InputBags(NamedTuple):
    """The bags of an input."""

    ids: Tensor  # [K] int64
    lengths: Tensor  # [B] int64
    weights: Tensor | None  # [K] float32; None for unweighted bags
    shape: torch.Size  # of the output, without its last dimension


class BagOptions(NamedTuple):
    """The arguments of DynamicEmbeddingBag for reading bags."""

    name: str  # of the feature
    is_weighted: bool  # then ids without weights get weight 1
    padding_idx: int | None
    where: str


def read_bags(source: Input, weights: Tensor | None, options: BagOptions) -> InputBags:
    """Checks and returns bags and their weights.

    weights: in the shape of the ids, or None.
    """
    where = options.where
    read = read_ids(source, options.padding_idx, where)
    if is_dense(source) and not source.dim():
        raise ValueError(
            f"{where}: expected ids [..., bag], got a tensor of no dimensions. "
            "A bag of one id is ids.view(1)."
        )
    of_ids = read_weights(source, weights, where)
    if of_ids is not None and not options.is_weighted:
        raise ValueError(
            f"{where}: expected no weights, got {of_ids.numel()}. "
            "Make the module with is_weighted=True."
        )
    if of_ids is not None and read.kept is not None:
        of_ids = of_ids[read.kept]
    if of_ids is None and options.is_weighted:
        of_ids = torch.ones(read.ids.numel(), dtype=torch.float32, device=read.ids.device)
    return InputBags(
        read.ids,
        read.lengths,
        of_ids,
        source.shape[:-1] if is_dense(source) else read.lengths.shape,
    )


def one_bag(name: str, ids: Tensor) -> KeyedJaggedTensor:
    """Returns ids [K] int64 as a feature of one bag: sequence collections need as many bags on every rank."""
    lengths = torch.full((1,), ids.numel(), device=ids.device)
    return KeyedJaggedTensor([name], ids, lengths=lengths, stride=1)


class BagReader(nn.Module):
    """A module that converts bags to a feature. With `mean`, weights are divided by their sum in the bag.

    It has no parameters, so TorchRec's pipelines may run it ahead.
    """

    def __init__(self, options: BagOptions, mean: bool) -> None:
        super().__init__()
        self._options = options
        self._mean = mean

    def forward(
        self, source: Input, weights: Tensor | None, is_sharded: bool
    ) -> tuple[KeyedJaggedTensor, torch.Size]:
        """Returns the feature, and the shape of the output without its last dimension."""
        bags = read_bags(source, weights, self._options)
        of_ids = bags.weights
        if is_sharded and of_ids is not None and of_ids.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{self._options.where}: expected weights without requires_grad, because a sharded pooled "
                "collection returns no gradients of weights, got weights with requires_grad. "
                "Make the module with weight_gradients=True, or detach them."
            )
        if of_ids is not None and self._mean:
            of_ids = shares(of_ids, bags.lengths)
        features = KeyedJaggedTensor(
            [self._options.name],
            bags.ids,
            weights=of_ids,
            lengths=bags.lengths,
            stride=bags.lengths.numel(),
        )
        return features, bags.shape


class BagShaper(nn.Module):
    """A module that reshapes pooled rows to the shape of the input."""

    def forward(self, output: Any, shape: torch.Size) -> Tensor:
        """Returns the pooled rows, `[*shape, D]`."""
        pooled = output.values()
        return pooled.view(*shape, pooled.shape[1])
