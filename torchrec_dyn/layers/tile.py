"""The tile of DynamicEmbeddingBag: the first rows of a bag side by side.

Legend: B bags, T the length of a tile, K ids in tiles, D columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.layers.bags import BagOptions, one_bag, read_bags
from torchrec_dyn.layers.inputs import Input, bag_begins


class Tiles(NamedTuple):
    """The places of rows in tiles."""

    places: Tensor  # [K] int64 in [0, B * T)
    weights: Tensor | None  # [K] float32; None for unweighted bags
    shape: torch.Size  # of the output, without its last dimension


class TileReader(nn.Module):
    """A module that converts the ids of tiles to a feature.

    It has no parameters, so TorchRec's pipelines may run it ahead.
    """

    def __init__(self, options: BagOptions, tile_length: int) -> None:
        super().__init__()
        self._options = options
        self._tile_length = tile_length

    def forward(
        self, source: Input, weights: Tensor | None, is_sharded: bool
    ) -> tuple[KeyedJaggedTensor, Tiles]:
        """Returns the feature of K ids, and the places of their rows."""
        bags = read_bags(source, weights, self._options)
        ids, of_ids, device = bags.ids, bags.weights, bags.ids.device
        bag = torch.repeat_interleave(
            torch.arange(bags.lengths.numel(), device=device), bags.lengths, output_size=len(ids)
        )
        in_bag = torch.arange(len(ids), device=device) - bag_begins(bags.lengths)[bag]
        places = bag * self._tile_length + in_bag
        # On a GPU the host reads the kept positions without this test, which would be a second wait.
        if not ids.is_cpu or bool((in_bag >= self._tile_length).any()):
            kept = (in_bag < self._tile_length).nonzero().squeeze(1)
            ids, places = ids[kept], places[kept]
            of_ids = None if of_ids is None else of_ids[kept]
        return one_bag(self._options.name, ids), Tiles(places, of_ids, bags.shape)


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
