"""The pooled sharding types: TorchRec's shardings with our lookups, dists and stitching of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingShardingContext,
)
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.sharding.dists import (
    GridOutputDist,
    NodeRowWiseInputDist,
    NodeRowWiseOutputDist,
    RoutesIds,
    RowWiseOutputDist,
    outputs_by_column,
)
from torchrec_dyn.sharding.grouped_lookups import (
    CreatesLookup,
    SequenceLookup,
    device_of,
)


def _node_output_options(sharding: Any, device: torch.device | None) -> dict[str, Any]:
    return {
        "rank": sharding._rank,
        "cross_pg": sharding._cross_pg,
        "intra_pg": sharding._intra_pg,
        "dim_sum_per_node": sharding._dim_sum_per_node(),
        "emb_dim_per_node_per_feature": sharding._emb_dim_per_node_per_feature(),
        "device": device_of(sharding, device),
        "qcomm_codecs_registry": sharding.qcomm_codecs_registry,
    }


def _combine_columns(sharding: Any, groups: Sequence[Sequence[GroupedEmbeddingConfig]]) -> None:
    """Sets how a column-wise or grid sharding stitches column shards; `groups` are in order of arrival."""
    configs = list(chain.from_iterable(groups))
    names = list(chain.from_iterable(config.embedding_names() for config in configs))
    widths = list(chain.from_iterable(config.embedding_dims() for config in configs))
    shards = list(chain.from_iterable(config.embedding_shard_metadata() for config in configs))
    by_column = outputs_by_column(names, shards)
    sharding._embedding_names = names
    sharding._embedding_dims = widths
    sharding._embedding_order = list(chain.from_iterable(by_column.values()))
    sharding._combined_embedding_names = list(by_column)
    sharding._combined_embedding_dims = [
        sum(widths[i] for i in positions) for positions in by_column.values()
    ]


class _WithinNode(CreatesLookup):
    """Mixin for TorchRec's pooled shardings that spread rows over the ranks of a node."""

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """Creates the input dist that routes by range of the mixed id within the node."""
        sharding: Any = self
        groups_per_rank = sharding._grouped_embedding_configs_per_rank
        return NodeRowWiseInputDist(
            pg=sharding._pg,
            local_size=sharding._intra_pg.size(),
            features_per_rank=sharding._features_per_rank(groups_per_rank),
            device=device_of(sharding, device),
        )


class _WholeRows(CreatesLookup):
    """Mixin for TorchRec's pooled shardings that keep all rows of a column range on one rank."""

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """Creates the output dist for both kinds of batch; TorchRec's has what the first batch needs."""
        output_dist: Any = super().create_output_dist(device)
        output_dist._create_output_dist_module(
            EmbeddingShardingContext(variable_batch_per_feature=True)
        )
        return output_dist


class TableWisePooled(_WholeRows, TwPooledEmbeddingSharding):
    """Whole tables on one rank each."""


class ColumnWisePooled(_WholeRows, CwPooledEmbeddingSharding):
    """Column ranges of tables on any ranks."""

    def _init_combined_embeddings(self) -> None:
        _combine_columns(self, self._grouped_embedding_configs_per_rank)


class TableColumnWisePooled(ColumnWisePooled, TwCwPooledEmbeddingSharding):
    """Column ranges of tables on the ranks of one node."""


class RowWisePooled(RoutesIds, RwPooledEmbeddingSharding):
    """Rows spread over all ranks."""

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """Creates the output dist, which sums over all ranks."""
        return RowWiseOutputDist(
            self._pg,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            embedding_dims=self.embedding_dims(),
        )


class TableRowWisePooled(_WithinNode, TwRwPooledEmbeddingSharding):
    """Rows spread over the ranks of one node."""

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """Creates the output dist, which sums within the node and sends sums to the ranks of the batches."""
        return NodeRowWiseOutputDist(**_node_output_options(self, device))


class GridPooled(_WithinNode, GridPooledEmbeddingSharding):
    """Column ranges of tables on nodes; the rows of a range are spread over the ranks of its node."""

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """Creates the output dist, which sums within each node and sends sums to the ranks of the batches."""
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


POOLED_SHARDINGS: Mapping[str, Any] = {
    ShardingType.TABLE_WISE.value: TableWisePooled,
    ShardingType.ROW_WISE.value: RowWisePooled,
    ShardingType.COLUMN_WISE.value: ColumnWisePooled,
    ShardingType.TABLE_ROW_WISE.value: TableRowWisePooled,
    ShardingType.TABLE_COLUMN_WISE.value: TableColumnWisePooled,
    ShardingType.GRID_SHARD.value: GridPooled,
}


class TableWiseSequence(CreatesLookup, TwSequenceEmbeddingSharding):
    """Whole tables on one rank each."""

    lookup_class = SequenceLookup


class ColumnWiseSequence(CreatesLookup, CwSequenceEmbeddingSharding):
    """Column ranges of tables on any ranks."""

    lookup_class = SequenceLookup


class RowWiseSequence(RoutesIds, RwSequenceEmbeddingSharding):
    """Rows spread over all ranks."""

    lookup_class = SequenceLookup


SEQUENCE_SHARDINGS = {
    ShardingType.TABLE_WISE.value: TableWiseSequence,
    ShardingType.ROW_WISE.value: RowWiseSequence,
    ShardingType.COLUMN_WISE.value: ColumnWiseSequence,
}
