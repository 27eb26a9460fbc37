"""The pooled sharding types: TorchRec's shardings with our lookups, dists and stitching of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
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

from torchrec_dyn.sharding.dists import (
    GridOutputDist,
    NodeRowWiseInputDist,
    NodeRowWiseOutputDist,
    RowWiseInputDist,
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


# Methods of TorchRec's shardings, by how the rows are spread.


def _input_dist_over_ranks(sharding: Any, device: torch.device | None = None) -> RowWiseInputDist:
    """Creates the input dist that routes by range of the mixed id."""
    return RowWiseInputDist(
        pg=sharding._pg,
        num_features=sharding._get_num_features(),
        device=device_of(sharding, device),
        is_sequence=sharding.lookup_class is SequenceLookup,
    )


def _input_dist_within_node(
    sharding: Any, device: torch.device | None = None
) -> NodeRowWiseInputDist:
    """Creates the input dist that routes by range of the mixed id within the node."""
    return NodeRowWiseInputDist(
        pg=sharding._pg,
        local_size=sharding._intra_pg.size(),
        features_per_rank=sharding._features_per_rank(sharding._grouped_embedding_configs_per_rank),
        device=device_of(sharding, device),
    )


def _for_any_batch(output_dist: Any) -> Any:
    """Makes an output dist ready for both kinds of batch: TorchRec's has what the first batch needs."""
    output_dist._create_output_dist_module(
        EmbeddingShardingContext(variable_batch_per_feature=True)
    )
    return output_dist


class TableWisePooled(CreatesLookup, TwPooledEmbeddingSharding):
    """Whole tables on one rank each."""

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        """Creates the output dist."""
        return _for_any_batch(super().create_output_dist(device))


class ColumnWisePooled(CreatesLookup, CwPooledEmbeddingSharding):
    """Column ranges of tables on any ranks."""

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        """Creates the output dist, which stitches column shards."""
        return _for_any_batch(super().create_output_dist(device))

    def _init_combined_embeddings(self) -> None:
        _combine_columns(self, self._grouped_embedding_configs_per_rank)


class TableColumnWisePooled(ColumnWisePooled, TwCwPooledEmbeddingSharding):
    """Column ranges of tables on the ranks of one node."""


class RowWisePooled(CreatesLookup, RwPooledEmbeddingSharding):
    """Rows spread over all ranks."""

    create_input_dist = _input_dist_over_ranks

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        """Creates the output dist, which sums over all ranks."""
        return RowWiseOutputDist(
            self._pg,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            embedding_dims=self.embedding_dims(),
        )


class TableRowWisePooled(CreatesLookup, TwRwPooledEmbeddingSharding):
    """Rows spread over the ranks of one node."""

    create_input_dist = _input_dist_within_node

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        """Creates the output dist, which sums within the node and sends sums to the ranks of the batches."""
        return NodeRowWiseOutputDist(**_node_output_options(self, device))


class GridPooled(CreatesLookup, GridPooledEmbeddingSharding):
    """Column ranges of tables on nodes; the rows of a range are spread over the ranks of its node."""

    create_input_dist = _input_dist_within_node

    def create_output_dist(self, device: torch.device | None = None) -> Any:
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


class RowWiseSequence(CreatesLookup, RwSequenceEmbeddingSharding):
    """Rows spread over all ranks."""

    lookup_class = SequenceLookup
    create_input_dist = _input_dist_over_ranks


SEQUENCE_SHARDINGS = {
    ShardingType.TABLE_WISE.value: TableWiseSequence,
    ShardingType.ROW_WISE.value: RowWiseSequence,
    ShardingType.COLUMN_WISE.value: ColumnWiseSequence,
}
