"""The sequence sharding types: TorchRec's shardings with our lookups and input dist."""

from __future__ import annotations

from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.types import ShardingType

from torchrec_dyn.sharding.grouped_lookups import CreatesLookup, SequenceLookup
from torchrec_dyn.sharding.input_dists import RoutesIds


class _CreatesSequenceLookup(CreatesLookup):
    """Mixin for TorchRec's sequence shardings."""

    lookup_class = SequenceLookup


class TableWiseSequence(_CreatesSequenceLookup, TwSequenceEmbeddingSharding):
    """Whole tables on one rank each."""


class ColumnWiseSequence(_CreatesSequenceLookup, CwSequenceEmbeddingSharding):
    """Column ranges of tables on any ranks."""


class RowWiseSequence(_CreatesSequenceLookup, RoutesIds, RwSequenceEmbeddingSharding):
    """Rows spread over all ranks."""


SEQUENCE_SHARDINGS = {
    ShardingType.TABLE_WISE.value: TableWiseSequence,
    ShardingType.ROW_WISE.value: RowWiseSequence,
    ShardingType.COLUMN_WISE.value: ColumnWiseSequence,
}
