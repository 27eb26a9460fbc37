"""The pooled sharding types: TorchRec's shardings with our lookups, dists and stitching of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torchrec.distributed.embedding_sharding import (
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
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

from torchrec_dyn.sharding.dists import OwnerInputDist, SumOverRanks, outputs_by_column
from torchrec_dyn.sharding.lookups import OPTIONS_KEY, CreatesLookup, SequenceLookup, TableOptions
from torchrec_dyn.sharding.rows_to_bags import BagsOutputDist, IdsInputDist


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


class SpreadsRows(CreatesLookup):
    """Mixin for TorchRec's shardings that spread rows: creates the input dist that routes by owner."""

    def create_input_dist(self, device: torch.device | None = None) -> OwnerInputDist:
        """Creates the input dist."""
        return OwnerInputDist(self.stock_input_dist(device), self.lookup_class is SequenceLookup)

    def stock_input_dist(self, device: torch.device | None) -> Any:
        """Creates TorchRec's input dist."""
        return super().create_input_dist(device)

    def _get_feature_hash_sizes(self) -> list[int]:
        # Of TorchRec's blocks of ids, some of which are int32. Ours are ranges of mixed ids.
        return [0] * len(super()._get_feature_hash_sizes())


_ANY_BATCH = EmbeddingShardingContext(variable_batch_per_feature=True)


class TakesAnyBatch(CreatesLookup):
    """Mixin for TorchRec's shardings: creates the output dist for both kinds of batch, not for the first."""

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        """Creates the output dist."""
        output_dist: Any = super().create_output_dist(device)
        output_dist._create_output_dist_module(_ANY_BATCH)
        return output_dist


def _summing_within_nodes(output_dist: Any) -> Any:
    """Makes an output dist of table-row-wise tables ready for both kinds of batch, with our sums."""
    output_dist._create_output_dist_modules(_ANY_BATCH)
    sums = SumOverRanks(output_dist._intra_pg, output_dist._intra_codecs)
    output_dist._intra_dist = output_dist._variable_intra_dist = sums
    return output_dist


class TableWisePooled(TakesAnyBatch, TwPooledEmbeddingSharding):
    """Whole tables on one rank each."""


class ColumnWisePooled(TakesAnyBatch, CwPooledEmbeddingSharding):
    """Column ranges of tables on any ranks."""

    def _init_combined_embeddings(self) -> None:
        _combine_columns(self, self._grouped_embedding_configs_per_rank)


class TableColumnWisePooled(ColumnWisePooled, TwCwPooledEmbeddingSharding):
    """Column ranges of tables on the ranks of one node."""


class RowWisePooled(SpreadsRows, RwPooledEmbeddingSharding):
    """Rows spread over all ranks."""

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        """Creates the output dist, which sums over all ranks."""
        output_dist: Any = super().create_output_dist(device)
        output_dist._dist = SumOverRanks(output_dist._pg, output_dist._codecs)
        return output_dist


class TableRowWisePooled(SpreadsRows, TwRwPooledEmbeddingSharding):
    """Rows spread over the ranks of one node."""

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        """Creates the output dist, which sums within the node and sends sums to the ranks of the batches."""
        return _summing_within_nodes(super().create_output_dist(device))


class GridPooled(SpreadsRows, GridPooledEmbeddingSharding):
    """Column ranges of tables on nodes; the rows of a range are spread over the ranks of its node."""

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        """Creates the output dist: that of table-row-wise tables, which then stitches column shards.

        Before stitching, a grid is a set of column shards, each table-row-wise. TorchRec's dist of a grid
        does not support a batch size per feature.
        """
        grid: Any = super().create_output_dist(device)
        grid._create_output_dist_modules()
        by_node = TwRwPooledEmbeddingSharding.create_output_dist(cast(Any, self), device)
        output_dist = _summing_within_nodes(by_node)
        output_dist._cross_dist, output_dist._callbacks = grid._cross_dist, grid._callbacks
        return output_dist

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


def sends_rows(info: EmbeddingShardingInfo) -> bool:
    """Returns True if the rows of a table travel: those of a spread table with max pooling."""
    assert info.fused_params is not None
    options: TableOptions = info.fused_params[OPTIONS_KEY](info.embedding_config.name)
    return options.sends_rows


class SendsRows(SpreadsRows):
    """Mixin for the shardings that spread rows, of tables with max pooling."""

    def create_input_dist(self, device: torch.device | None = None) -> IdsInputDist:
        """Creates the input dist, which sends ids one by one."""
        return IdsInputDist(self.stock_input_dist(device))

    def create_output_dist(self, device: torch.device | None = None) -> BagsOutputDist:
        """Creates the output dist, which sends rows."""
        return BagsOutputDist(self, super().create_output_dist(device))


class RowWiseMax(SendsRows, RowWisePooled):
    """Rows spread over all ranks."""


class TableRowWiseMax(SendsRows, TableRowWisePooled):
    """Rows spread over the ranks of one node."""


class GridMax(SendsRows, GridPooled):
    """Column ranges of tables on nodes; the rows of a range are spread over the ranks of its node."""


_ROW_SENDING_SHARDINGS: Mapping[str, Any] = {
    ShardingType.ROW_WISE.value: RowWiseMax,
    ShardingType.TABLE_ROW_WISE.value: TableRowWiseMax,
    ShardingType.GRID_SHARD.value: GridMax,
}


def pooled_sharding_of(info: EmbeddingShardingInfo) -> Any:
    """Returns the class of the sharding of a pooled table, as its plan and its pooling need."""
    shardings = _ROW_SENDING_SHARDINGS if sends_rows(info) else POOLED_SHARDINGS
    return shardings[info.param_sharding.sharding_type]


class TableWiseSequence(CreatesLookup, TwSequenceEmbeddingSharding):
    """Whole tables on one rank each."""

    lookup_class = SequenceLookup


class ColumnWiseSequence(CreatesLookup, CwSequenceEmbeddingSharding):
    """Column ranges of tables on any ranks."""

    lookup_class = SequenceLookup


class RowWiseSequence(SpreadsRows, RwSequenceEmbeddingSharding):
    """Rows spread over all ranks."""

    lookup_class = SequenceLookup


SEQUENCE_SHARDINGS = {
    ShardingType.TABLE_WISE.value: TableWiseSequence,
    ShardingType.ROW_WISE.value: RowWiseSequence,
    ShardingType.COLUMN_WISE.value: ColumnWiseSequence,
}
