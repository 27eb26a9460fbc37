"""The pooled sharding types: TorchRec's dists around our lookup, input dists and stitching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseEmbeddingLookup,
    BaseSparseFeaturesDist,
    EmbeddingShardingContext,
)
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.sharding.grouped_lookups import PooledLookup, silent_as_others
from torchrec_dyn.sharding.input_dists import NodeRowWiseInputDist, RowWiseInputDist
from torchrec_dyn.sharding.output_dists import (
    GridOutputDist,
    NodeRowWiseOutputDist,
    RowWiseOutputDist,
)
from torchrec_dyn.sharding.output_order import outputs_by_column


def _lookup(
    sharding: Any,
    groups: list[GroupedEmbeddingConfig],
    device: torch.device | None,
    sharding_type: ShardingType | None = None,
) -> PooledLookup:
    lookup = PooledLookup(
        grouped_configs=groups,
        pg=sharding._pg,
        device=device if device is not None else sharding._device,
        sharding_type=sharding_type,
        env=sharding._env,
    )
    silent_as_others(lookup, sharding)
    if sharding_type == ShardingType.TABLE_ROW_WISE:
        lookup.node_size = sharding._intra_pg.size()
    return lookup


def _node_input_dist(sharding: Any, device: torch.device | None) -> NodeRowWiseInputDist:
    return NodeRowWiseInputDist(
        pg=sharding._pg,
        local_size=sharding._intra_pg.size(),
        features_per_rank=sharding._features_per_rank(sharding._grouped_embedding_configs_per_rank),
        device=device if device is not None else sharding._device,
    )


def _node_output_options(sharding: Any, device: torch.device | None) -> dict[str, Any]:
    return {
        "rank": sharding._rank,
        "cross_pg": sharding._cross_pg,
        "intra_pg": sharding._intra_pg,
        "dim_sum_per_node": sharding._dim_sum_per_node(),
        "emb_dim_per_node_per_feature": sharding._emb_dim_per_node_per_feature(),
        "device": device if device is not None else sharding._device,
        "qcomm_codecs_registry": sharding.qcomm_codecs_registry,
    }


def _combine_columns(sharding: Any, groups: Sequence[Sequence[GroupedEmbeddingConfig]]) -> None:
    """Sets the names, widths and order by which a sharding stitches column shards.

    Args:
        sharding: a column-wise or grid sharding.
        groups: table groups in the order in which their outputs arrive.
    """
    configs = [config for of_rank in groups for config in of_rank]
    names = [name for config in configs for name in config.embedding_names()]
    widths = [width for config in configs for width in config.embedding_dims()]
    shards = [shard for config in configs for shard in config.embedding_shard_metadata()]
    by_column = outputs_by_column(
        names, [shard.shard_offsets[1] if shard is not None else 0 for shard in shards]
    )
    sharding._embedding_names = names
    sharding._embedding_dims = widths
    sharding._embedding_order = [i for positions in by_column.values() for i in positions]
    sharding._combined_embedding_names = list(by_column)
    sharding._combined_embedding_dims = [
        sum(widths[i] for i in positions) for positions in by_column.values()
    ]


class TableWisePooled(TwPooledEmbeddingSharding):
    """Whole tables on one rank each."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Creates the lookup of this rank's tables."""
        return _lookup(self, self._grouped_embedding_configs, device)


class ColumnWisePooled(CwPooledEmbeddingSharding):
    """Column ranges of tables on any ranks."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Creates the lookup of this rank's column shards."""
        return _lookup(self, self._grouped_embedding_configs, device)

    def _init_combined_embeddings(self) -> None:
        _combine_columns(self, self._grouped_embedding_configs_per_rank)


class TableColumnWisePooled(TwCwPooledEmbeddingSharding):
    """Column ranges of tables on the ranks of one node."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Creates the lookup of this rank's column shards."""
        return _lookup(self, self._grouped_embedding_configs, device)

    def _init_combined_embeddings(self) -> None:
        _combine_columns(self, self._grouped_embedding_configs_per_rank)


class RowWisePooled(RwPooledEmbeddingSharding):
    """Rows spread over all ranks."""

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """Creates the routing by range of the mixed id."""
        return RowWiseInputDist(
            pg=self._pg,
            num_features=self._get_num_features(),
            device=device if device is not None else self._device,
            is_sequence=False,
        )

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Creates the lookup of this rank's rows."""
        return _lookup(self, self._grouped_embedding_configs, device, ShardingType.ROW_WISE)

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """Creates the sum over all ranks."""
        return RowWiseOutputDist(
            self._pg,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            embedding_dims=self.embedding_dims(),
        )


class TableRowWisePooled(TwRwPooledEmbeddingSharding):
    """Rows spread over the ranks of one node."""

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """Creates the routing by range of the mixed id within the node."""
        return _node_input_dist(self, device)

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Creates the lookup of this rank's rows."""
        groups = self._grouped_embedding_configs_per_rank[self._rank]
        return _lookup(self, groups, device, ShardingType.TABLE_ROW_WISE)

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """Creates the sum within the node and the way back to the batches."""
        return NodeRowWiseOutputDist(**_node_output_options(self, device))


class GridPooled(GridPooledEmbeddingSharding):
    """Column ranges on nodes, their rows spread over the ranks of the node."""

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """Creates the routing by range of the mixed id within each node."""
        return _node_input_dist(self, device)

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Creates the lookup of this rank's rows of its node's column shards."""
        groups = self._grouped_embedding_configs_per_rank[self._rank]
        return _lookup(self, groups, device, ShardingType.TABLE_ROW_WISE)

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """Creates the sum within each node and the way back to the batches."""
        stock = super().create_output_dist(device)
        return GridOutputDist(callbacks=stock._callbacks, **_node_output_options(self, device))

    def uncombined_embedding_names(self) -> list[str]:
        """Returns the output names before stitching, one per column shard and feature."""
        return self._embedding_names

    def uncombined_embedding_dims(self) -> list[int]:
        """Returns the widths before stitching."""
        return self._embedding_dims

    def _init_combined_embeddings(self) -> None:
        _combine_columns(self, self._grouped_embedding_configs_per_node)


POOLED_SHARDINGS = {
    ShardingType.TABLE_WISE.value: TableWisePooled,
    ShardingType.ROW_WISE.value: RowWisePooled,
    ShardingType.COLUMN_WISE.value: ColumnWisePooled,
    ShardingType.TABLE_ROW_WISE.value: TableRowWisePooled,
    ShardingType.TABLE_COLUMN_WISE.value: TableColumnWisePooled,
    ShardingType.GRID_SHARD.value: GridPooled,
}
SPREAD_SHARDINGS = [
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
]
