"""Modules of one dynamic table, with the interfaces of torch.nn.Embedding and torch.nn.EmbeddingBag.

Legend: N values of the input, K ids looked up, B bags, L ids of a bag, T the length of a tile, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_dyn.compilers import forward_of_tables
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.layers.inputs import (
    BagReader,
    Input,
    InputBags,
    check_unscored,
    is_dense,
    nested_parts,
    one_bag,
    places_in_bags,
    pooled_rows,
    read_ids,
    values_of,
)
from torchrec_dyn.modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    TableHandle,
    check_id,
    check_size,
    dynamic_config_by_table,
)


class OneTable(nn.Module):
    """A module that holds a collection of one table. Abstract: subclasses set `collection`."""

    collection: Any  # sharded or not

    def _set_sizes(
        self, embedding_dim: int, num_embeddings: int, name: str, padding_idx: int | None
    ) -> None:
        self.where = f"{type(self).__name__}(table={name!r})"
        check_size(embedding_dim, "embedding_dim", self.where)
        check_size(num_embeddings, "num_embeddings", self.where)
        check_id(padding_idx, "padding_idx", self.where)
        self.embedding_dim = embedding_dim
        self.num_embeddings = num_embeddings
        self.name = name  # of the table and of its only feature
        self.padding_idx = padding_idx

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of the rows; `param_groups[0]["lr"]` is its learning rate."""
        return self.collection.fused_optimizer

    @property
    def table(self) -> TableHandle:
        """The handle of the table; for a sharded table it reads this rank's shard."""
        return self.collection.table(self.name)

    def set_time(self, time: int) -> None:
        """Sets the clock of policies that count in time. Collective if the table is sharded."""
        self.collection.set_time(time)


class DynamicEmbedding(OneTable):
    """A lookup of one row per id, like torch.nn.Embedding, for any int64 ids.

    `collection` is a `DynamicEmbeddingCollection` of one table. DistributedModelParallel shards it with
    `DynamicEmbeddingCollectionSharder`. Use it for all other functions of collections.

    Args:
        embedding_dim: number of columns, D.
        num_embeddings: limit on the number of rows; no memory is reserved for them.
        name: name of the table and of its only feature. Initial rows depend on the name. In a sharded
            model each module needs a different name.
        padding_idx: an id that reads as zeros, gets no row and is not trained. Any int64; -1 is the id -1,
            not the last row.
        device: device of the rows; None: cpu.
        data_type: data type of the rows.
        dynamic: options of the table, or a dict of them by `name`.
        fused_params: optimizer of the rows, as in DynamicEmbeddingCollection.

    Raises:
        ValueError: if an argument is invalid.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_embeddings: int,
        *,
        name: str = "embedding",
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        data_type: DataType = DataType.FP32,
        dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None = None,
        fused_params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._set_sizes(embedding_dim, num_embeddings, name, padding_idx)
        check_unscored(dynamic_config_by_table(dynamic, [name], self.where)[name], self.where)
        config = EmbeddingConfig(
            name=name,
            embedding_dim=embedding_dim,
            num_embeddings=num_embeddings,
            feature_names=[name],
            data_type=data_type,
        )
        # TorchRec's pipelines trace into every module that contains a sharded module. Code that cannot be
        # traced is therefore in a separate module before the collection, and in a wrapped function after it.
        self.read_input = _InputReader(name, padding_idx, self.where)
        self.collection = DynamicEmbeddingCollection(
            [config], device, dynamic=dynamic, fused_params=fused_params
        )

    @forward_of_tables
    def forward(self, ids: Input) -> Any:
        """Looks up the rows of ids.

        Args:
            ids: int64 of any value, int32, or uint64, which is read by its bits: a tensor of any shape, a
                JaggedTensor, or a nested tensor [bags, ids] of layout torch.jagged.

        Returns:
            The rows, in the type of the ids: a tensor `[*shape, D]`; a JaggedTensor with the same lengths,
            and the same weights, if any; a nested tensor [bags, ids, D] with the same offsets.

        Raises:
            ValueError: if `ids` has another type or dtype.
        """
        read = self.read_input(ids)
        return _in_shape_of(ids, self.collection(read[0]), read[1], self.name)

    def extra_repr(self) -> str:
        """Returns the arguments for printing, like torch.nn.Embedding."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.embedding_dim}, {self.num_embeddings}, name={self.name!r}{padding}"


class _InputReader(nn.Module):
    """A module that converts ids to a feature of one bag, so that all ranks have the same number of bags."""

    def __init__(self, name: str, padding_idx: int | None, where: str) -> None:
        super().__init__()
        self._name = name
        self._padding_idx = padding_idx
        self._where = where

    def forward(self, source: Input) -> tuple[KeyedJaggedTensor, Tensor | None]:
        """Returns the feature of K ids, and their positions in the input (None: all positions)."""
        ids, _, kept = read_ids(source, self._padding_idx, self._where)
        return one_bag(self._name, ids), kept


Mode = Literal["sum", "mean", "max", "tile"]


class DynamicEmbeddingBag(OneTable):
    """A pooled lookup of bags of ids, like torch.nn.EmbeddingBag, for any int64 ids.

    With e the rows of a bag and w their weights (1 if no weights are passed), `mode` selects the output:

    - "sum": sum(w e);
    - "mean": sum(w e) / sum(w); zeros if the weights of a bag sum to 0;
    - "max": the largest value of each column of e, as torch.nn.EmbeddingBag computes it. Its gradient goes to
      the first of equal values in the bag. Every looked-up row is updated, with gradient 0 where it has no
      largest value;
    - "tile": w e of the first T ids side by side, zeros to the right. Ids after the first T are not
      looked up: they get no row and are not counted.

    The output of an empty bag is zeros. The looked-up rows and the weights get gradients.

    `collection` is a collection of one table. DistributedModelParallel shards it with the sharder of its
    type: `DynamicEmbeddingBagCollectionSharder`, or, with "tile" or `weight_gradients`,
    `DynamicEmbeddingCollectionSharder`. Then ranks send one row per id, not per bag.

    Args:
        embedding_dim: number of columns, D.
        num_embeddings: limit on the number of rows; no memory is reserved for them.
        mode: "sum", "mean", "max" or "tile".
        tile_length: T; with "tile" only.
        is_weighted: True if ids may have weights; not with "max".
        weight_gradients: True if the weights of "sum" and "mean" also get gradients in a sharded module.
            In an unsharded module and with "tile", weights always get gradients.
        name: name of the table and of its only feature. Initial rows depend on the name. In a sharded
            model each module needs a different name.
        padding_idx: an id that is removed from all bags. Any int64; -1 is the id -1, not the last row.
        device: device of the rows; None: cpu.
        data_type: data type of the rows.
        dynamic: options of the table, or a dict of them by `name`.
        fused_params: optimizer of the rows, as in the collections.

    Raises:
        ValueError: if an argument is invalid.

    Source: the tile of ReCIS 1.0 (recis/nn/functional/embedding_ops.py). ReCIS looks up all ids and
    ignores weights.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_embeddings: int,
        mode: Mode = "sum",
        *,
        tile_length: int | None = None,
        is_weighted: bool = False,
        weight_gradients: bool = False,
        name: str = "embedding_bag",
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        data_type: DataType = DataType.FP32,
        dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None = None,
        fused_params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._set_sizes(embedding_dim, num_embeddings, name, padding_idx)
        _check_mode(mode, tile_length, is_weighted, self.where)
        if weight_gradients and not is_weighted:
            raise ValueError(
                f"{self.where}: expected weight_gradients of weighted bags only, got is_weighted=False. "
                "Make the module with is_weighted=True."
            )
        chosen = dynamic_config_by_table(dynamic, [name], self.where)[name]
        self._sends_rows = mode == "tile" or weight_gradients
        if self._sends_rows or not is_weighted:
            check_unscored(chosen, self.where)
        self.mode = mode
        self.tile_length = tile_length
        self.is_weighted = is_weighted
        self.weight_gradients = weight_gradients
        common: dict[str, Any] = {
            "name": name,
            "embedding_dim": embedding_dim,
            "num_embeddings": num_embeddings,
            "feature_names": [name],
            "data_type": data_type,
        }
        if chosen.pooling is not None and mode != "max":
            raise ValueError(
                f"{self.where}: expected mode='max' with DynamicTableConfig(pooling='max'), got {mode!r}. "
                "Leave `pooling` out: the mode decides."
            )
        if mode == "max":
            dynamic = replace(chosen, pooling="max")
        rows: dict[str, Any] = {"device": device, "dynamic": dynamic, "fused_params": fused_params}
        # A separate module before the collection: see DynamicEmbedding.
        self.read_input = BagReader(
            name, mode, tile_length, is_weighted, self._sends_rows, padding_idx, self.where
        )
        if self._sends_rows:
            self.collection = DynamicEmbeddingCollection([EmbeddingConfig(**common)], **rows)
        else:
            # A weighted mean is computed as a sum: BagReader divides the weights before the lookup.
            divides_rows = mode == "mean" and not is_weighted
            pooling = PoolingType.MEAN if divides_rows else PoolingType.SUM
            self.collection = DynamicEmbeddingBagCollection(
                [EmbeddingBagConfig(pooling=pooling, **common)], is_weighted, **rows
            )

    @forward_of_tables
    def forward(self, ids: Input, weights: Tensor | None = None) -> Tensor:
        """Looks up and pools rows.

        Args:
            ids: int64 of any value, int32, or uint64, which is read by its bits: a tensor [..., L] whose last
                dimension is the bag, a JaggedTensor of B bags, or a nested tensor [B, L] of layout
                torch.jagged.
            weights: weights in the shape of the ids; for a JaggedTensor without weights, one per value.

        Returns:
            [..., D], or [B, D]; with "tile" T * D columns.

        Raises:
            ValueError: if `ids` has another type or dtype, or the weights do not match the ids.
        """
        is_sharded = isinstance(self.collection, ShardedModule)
        read = self.read_input(ids, weights, is_sharded)
        output = self.collection(read[0])
        return _bags_of(output, read[1], self.name, self._sends_rows, self.tile_length)

    def extra_repr(self) -> str:
        """Returns the arguments for printing, like torch.nn.EmbeddingBag."""
        options = {
            "tile_length": self.tile_length,
            "is_weighted": self.is_weighted or None,
            "weight_gradients": self.weight_gradients or None,
            "padding_idx": self.padding_idx,
        }
        given = "".join(f", {key}={value}" for key, value in options.items() if value is not None)
        required = f"{self.embedding_dim}, {self.num_embeddings}"
        return f"{required}, mode={self.mode!r}, name={self.name!r}{given}"


def _check_mode(mode: str, tile_length: int | None, is_weighted: bool, where: str) -> None:
    if mode not in ("sum", "mean", "max", "tile"):
        raise ValueError(f'{where}: expected mode "sum", "mean", "max" or "tile", got {mode!r}.')
    if mode == "max" and is_weighted:
        raise ValueError(
            f'{where}: expected is_weighted=False with mode "max", as in torch.nn.EmbeddingBag, got '
            f"is_weighted={is_weighted!r}. Leave it out."
        )
    if mode == "tile":
        check_size(tile_length, "tile_length", where)
    elif tile_length is not None:
        raise ValueError(
            f'{where}: expected tile_length with mode "tile" only, got {tile_length!r} with '
            f'"{mode}". Leave it out.'
        )


# Torch's tracer takes these functions as they are. It traces the modules that call them, for TorchRec's
# pipelines, and cannot trace what depends on ids.


@torch.fx.wrap
def _in_shape_of(source: Input, output: Any, kept: Tensor | None, name: str) -> Any:
    """Returns rows in the type and shape of the input; zeros for values that were not looked up."""
    rows = output[name].values()
    if kept is not None:
        values = values_of(source).numel()
        rows = rows.new_zeros(values, rows.shape[1]).index_copy(0, kept, rows)
    if is_dense(source):
        return rows.view(*source.shape, rows.shape[1])
    if isinstance(source, JaggedTensor):
        return JaggedTensor(values=rows, lengths=source.lengths(), weights=source.weights_or_none())
    offsets, lengths = nested_parts(source)
    return torch.nested.nested_tensor_from_jagged(rows, offsets, lengths)


@torch.fx.wrap
def _bags_of(
    output: Any, bags: InputBags, name: str, sends_rows: bool, tile_length: int | None
) -> Tensor:
    """Returns pooled rows, `[*shape, D]`, or tiles, `[*shape, T * D]`, zeros where a tile has no row."""
    if not sends_rows:
        pooled = output.values()  # by the collection
        return pooled.view(*bags.shape, pooled.shape[1])
    rows = output[name].values()
    columns = rows.shape[1]
    if tile_length is None:  # here: weights get gradients
        pooled = pooled_rows(rows, bags.lengths, bags.weights, mean=False)
        return pooled.view(*bags.shape, columns)
    if bags.weights is not None:
        rows = (rows * bags.weights.unsqueeze(1)).to(rows.dtype)
    bag, place = places_in_bags(bags.lengths, len(rows))
    tiles = rows.new_zeros(bags.shape.numel() * tile_length, columns)
    tiles = tiles.index_copy(0, bag * tile_length + place, rows)
    return tiles.view(*bags.shape, tile_length * columns)
