"""The sequence sharding types: TorchRec's shardings with our lookups and input dist."""

from __future__ import annotations

import torch
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.sharding.grouped_lookups import CreatesLookup, SequenceLookup, device_of
from torchrec_dyn.sharding.input_dists import RowWiseInputDist


class _CreatesSequenceLookup(CreatesLookup):
    """Mixin for TorchRec's sequence shardings."""

    lookup_class = SequenceLookup


class TableWiseSequence(_CreatesSequenceLookup, TwSequenceEmbeddingSharding):
    """Whole tables on one rank each."""


class ColumnWiseSequence(_CreatesSequenceLookup, CwSequenceEmbeddingSharding):
    """Column ranges of tables on any ranks."""


class RowWiseSequence(_CreatesSequenceLookup, RwSequenceEmbeddingSharding):
    """Rows spread over all ranks."""

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """Creates the input dist that routes by range of the mixed id."""
        return RowWiseInputDist(
            pg=self._pg,
            num_features=self._get_num_features(),
            device=device_of(self, device),
            is_sequence=True,
        )


SEQUENCE_SHARDINGS = {
    ShardingType.TABLE_WISE.value: TableWiseSequence,
    ShardingType.ROW_WISE.value: RowWiseSequence,
    ShardingType.COLUMN_WISE.value: ColumnWiseSequence,
}
