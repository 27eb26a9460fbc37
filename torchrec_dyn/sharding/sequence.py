"""The sequence sharding types: TorchRec's dists around our lookup and input dist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_sharding import BaseEmbeddingLookup, BaseSparseFeaturesDist
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.sharding.grouped_lookups import SequenceLookup, silent_as_others
from torchrec_dyn.sharding.input_dists import RowWiseInputDist


def _lookup(sharding: Any, device: torch.device | None) -> SequenceLookup:
    lookup = SequenceLookup(
        grouped_configs=sharding._grouped_embedding_configs,
        pg=sharding._pg,
        device=device if device is not None else sharding._device,
        env=sharding._env,
    )
    silent_as_others(lookup, sharding)
    return lookup


class TableWiseSequence(TwSequenceEmbeddingSharding):
    """Whole tables on one rank each."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Creates the lookup of this rank's tables."""
        return _lookup(self, device)


class ColumnWiseSequence(CwSequenceEmbeddingSharding):
    """Column ranges of tables on any ranks."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Creates the lookup of this rank's column shards."""
        return _lookup(self, device)


class RowWiseSequence(RwSequenceEmbeddingSharding):
    """Rows spread over all ranks."""

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """Creates the routing by range of the mixed id."""
        return RowWiseInputDist(
            pg=self._pg,
            num_features=self._get_num_features(),
            device=device if device is not None else self._device,
            is_sequence=True,
        )

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Creates the lookup of this rank's rows."""
        return _lookup(self, device)


SEQUENCE_SHARDINGS = {
    ShardingType.TABLE_WISE.value: TableWiseSequence,
    ShardingType.ROW_WISE.value: RowWiseSequence,
    ShardingType.COLUMN_WISE.value: ColumnWiseSequence,
}
