"""The bags of DynamicEmbeddingBag: reads them, and shapes the output of the collection, in one of three ways.

- In the collection: `BagReader`, `BagShaper`.
- Side by side, in a tile of the first T rows of a bag: `TileReader`, `TileShaper`.
- On the rank of the batch, so that weights get gradients under any plan: `RowsReader`, `RowsPooler`. A
  sharded pooled collection sends weights together with ids, and TorchRec's exchange has no backward for
  weights. Here only ids are sent, and the rank of the batch multiplies the row of each id by its weight.

The readers have no parameters, so TorchRec's pipelines may run them ahead.

Legend: B bags, T the length of a tile, K ids looked up, D columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.layers.inputs import Input, bag_begins, is_dense, read_ids, read_weights


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
    """Checks and returns bags and their weights; weights: in the shape of the ids, or None."""
    where = options.where
    read = read_ids(source, options.padding_idx, where)
    if is_dense(source) and not source.dim():
        raise ValueError(
            f"{where}: expected ids [..., bag], got a tensor of no dimensions. "
            "A bag of one id is ids.view(1)."
        )
    id_weights = read_weights(source, weights, where)
    if id_weights is not None and not options.is_weighted:
        raise ValueError(
            f"{where}: expected no weights, got {id_weights.numel()}. "
            "Make the module with is_weighted=True."
        )
    if id_weights is not None and read.kept is not None:
        id_weights = id_weights[read.kept]
    if id_weights is None and options.is_weighted:
        id_weights = torch.ones(read.ids.numel(), dtype=torch.float32, device=read.ids.device)
    return InputBags(
        read.ids,
        read.lengths,
        id_weights,
        source.shape[:-1] if is_dense(source) else read.lengths.shape,
    )


def one_bag(name: str, ids: Tensor) -> KeyedJaggedTensor:
    """Returns ids [K] int64 as a feature of one bag: sequence collections need as many bags on every rank."""
    lengths = torch.full((1,), ids.numel(), device=ids.device)
    return KeyedJaggedTensor([name], ids, lengths=lengths, stride=1)


class BagReader(nn.Module):
    """A module that converts bags to a feature. With `mean`, weights are divided by their sum in the bag."""

    def __init__(self, options: BagOptions, mean: bool) -> None:
        super().__init__()
        self._options = options
        self._mean = mean

    def forward(
        self, source: Input, weights: Tensor | None, is_sharded: bool
    ) -> tuple[KeyedJaggedTensor, torch.Size]:
        """Returns the feature, and the shape of the output without its last dimension."""
        bags = read_bags(source, weights, self._options)
        id_weights = bags.weights
        if (
            is_sharded
            and id_weights is not None
            and id_weights.requires_grad
            and torch.is_grad_enabled()
        ):
            raise ValueError(
                f"{self._options.where}: expected weights without requires_grad, because a sharded pooled "
                "collection returns no gradients of weights, got weights with requires_grad. "
                "Make the module with weight_gradients=True, or detach them."
            )
        if id_weights is not None and self._mean:
            id_weights = shares(id_weights, bags.lengths)
        features = KeyedJaggedTensor(
            [self._options.name],
            bags.ids,
            weights=id_weights,
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


class Tiles(NamedTuple):
    """The places of rows in tiles."""

    places: Tensor  # [K] int64 in [0, B * T)
    weights: Tensor | None  # [K] float32; None for unweighted bags
    shape: torch.Size  # of the output, without its last dimension


class TileReader(nn.Module):
    """A module that converts the ids of tiles to a feature."""

    def __init__(self, options: BagOptions, tile_length: int) -> None:
        super().__init__()
        self._options = options
        self._tile_length = tile_length

    def forward(
        self, source: Input, weights: Tensor | None, is_sharded: bool
    ) -> tuple[KeyedJaggedTensor, Tiles]:
        """Returns the feature of K ids, and the places of their rows."""
        bags = read_bags(source, weights, self._options)
        ids, id_weights, device = bags.ids, bags.weights, bags.ids.device
        bag = torch.repeat_interleave(
            torch.arange(bags.lengths.numel(), device=device), bags.lengths, output_size=len(ids)
        )
        in_bag = torch.arange(len(ids), device=device) - bag_begins(bags.lengths)[bag]
        places = bag * self._tile_length + in_bag
        # On a GPU the host reads the kept positions without this test, which would be a second wait.
        if not ids.is_cpu or bool((in_bag >= self._tile_length).any()):
            kept = (in_bag < self._tile_length).nonzero().squeeze(1)
            ids, places = ids[kept], places[kept]
            id_weights = None if id_weights is None else id_weights[kept]
        return one_bag(self._options.name, ids), Tiles(places, id_weights, bags.shape)


class TileShaper(nn.Module):
    """A module that arranges rows side by side."""

    def __init__(self, name: str, tile_length: int) -> None:
        super().__init__()
        self._name = name
        self._tile_length = tile_length

    def forward(self, output: Any, tiles: Tiles) -> Tensor:
        """Returns the tiles, `[*shape, T * D]`, zeros where a tile has no row."""
        rows = output[self._name].values()
        if tiles.weights is not None:
            rows = (rows * tiles.weights.unsqueeze(1)).to(rows.dtype)
        bags, columns = tiles.shape.numel(), rows.shape[1]
        tiled = rows.new_zeros(bags * self._tile_length, columns)
        tiled = tiled.index_copy(0, tiles.places, rows)
        return tiled.view(*tiles.shape, self._tile_length * columns)


class WeightedBags(NamedTuple):
    """The weights and bags of rows."""

    weights: Tensor  # [K] float32
    lengths: Tensor  # [B] int64, number of rows in each bag
    shape: torch.Size  # of the output, without its last dimension


class RowsReader(nn.Module):
    """A module that converts weighted bags to a feature of ids without weights."""

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
        id_weights = shares(bags.weights, bags.lengths) if self._mean else bags.weights
        weighted = WeightedBags(id_weights, bags.lengths, bags.shape)
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


def pooled_rows(rows: Tensor, lengths: Tensor, weights: Tensor | None, mean: bool) -> Tensor:
    """Returns the pooled rows of bags, [B, columns], as the pooled collections do; zeros for an empty bag.

    Sums are float32, and rounded once to the dtype of the rows.

    rows: [N, columns], bag after bag.
    lengths: [B], number of ids in each bag, checked: none is negative, and they add up to N.
    weights: [N], factor of each row, or None.
    """
    terms = rows.float() if weights is None else rows.float() * weights[:, None]
    if lengths.numel() == 0:  # in the graph: other ranks wait for the backward of this rank
        return terms.to(rows.dtype)
    # `unsafe`: torch does not check the lengths again. The host would wait for this check.
    pooled = torch.segment_reduce(terms, "sum", lengths=lengths, axis=0, unsafe=True)
    return (pooled / lengths.clamp(min=1)[:, None] if mean else pooled).to(rows.dtype)


def shares(weights: Tensor, lengths: Tensor) -> Tensor:
    """Divides each weight [K] by the sum of its bag, so that a weighted sum becomes a weighted mean.

    lengths: [B] int64. Shares are zeros, with zero gradients, in a bag whose weights sum to 0.
    """
    bag = torch.repeat_interleave(
        torch.arange(lengths.numel(), device=weights.device), lengths, output_size=weights.numel()
    )
    total = _sums_by_bag(weights, bag, lengths)
    is_zero = (total == 0)[bag]
    # A divisor of zero would make the gradient NaN even where the quotient is not used.
    return torch.where(is_zero, 0.0, weights / total.where(total != 0, 1.0)[bag])


def _sums_by_bag(weights: Tensor, bag: Tensor, lengths: Tensor) -> Tensor:
    """Returns the sum of the weights of each bag, [B] float32; the same bits on every device."""
    if weights.is_cpu:
        return weights.new_zeros(lengths.numel()).index_add(0, bag, weights)
    # On CUDA `index_add` adds in any order. Segments of rows are added in order, segments of numbers in
    # another order than on the CPU; so each weight is a row of one column.
    return pooled_rows(weights.unsqueeze(1), lengths, None, False).squeeze(1)
