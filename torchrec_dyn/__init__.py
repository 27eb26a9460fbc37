"""Dynamic embedding tables for TorchRec: any int64 is an id, under every sharding plan."""

from torchrec_dyn import checkpoint
from torchrec_dyn.across_ranks import (
    assign_rows,
    erase_rows,
    lookup_rows,
    read_counts,
    read_ids,
    read_last_seen,
    read_num_rows,
    read_stats,
)
from torchrec_dyn.block_embedding import BlockEmbeddingBagCollection
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.dynamic_embedding import DynamicEmbedding
from torchrec_dyn.dynamic_embedding_bag import DynamicEmbeddingBag
from torchrec_dyn.embedding_collection import DynamicEmbeddingCollection
from torchrec_dyn.embeddingbag_collection import DynamicEmbeddingBagCollection
from torchrec_dyn.fan_initializers import KaimingNormal, KaimingUniform, XavierNormal, XavierUniform
from torchrec_dyn.feature_processors import DynamicFeatureProcessedEmbeddingBagCollectionSharder
from torchrec_dyn.from_static import from_static
from torchrec_dyn.initializers import Constant, Normal, TruncatedNormal, Uniform
from torchrec_dyn.make_dynamic import make_dynamic
from torchrec_dyn.policies import (
    AdmitAfter,
    AdmitWithProbability,
    ExpireAfter,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Never,
)
from torchrec_dyn.quotient_remainder import QuotientRemainderEmbeddingBagCollection
from torchrec_dyn.sharded_embedding import ShardedDynamicEmbeddingCollection
from torchrec_dyn.sharded_embeddingbag import ShardedDynamicEmbeddingBagCollection
from torchrec_dyn.sharders import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)
from torchrec_dyn.stats_logger import add_stats_hook, log_stats

__all__ = [
    "AdmitAfter",
    "AdmitWithProbability",
    "BlockEmbeddingBagCollection",
    "Constant",
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
    "DynamicEmbeddingBagCollection",
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollection",
    "DynamicEmbeddingCollectionSharder",
    "DynamicFeatureProcessedEmbeddingBagCollectionSharder",
    "DynamicTableConfig",
    "ExpireAfter",
    "KaimingNormal",
    "KaimingUniform",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "Never",
    "Normal",
    "QuotientRemainderEmbeddingBagCollection",
    "ShardedDynamicEmbeddingBagCollection",
    "ShardedDynamicEmbeddingCollection",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "add_stats_hook",
    "assign_rows",
    "checkpoint",
    "erase_rows",
    "from_static",
    "log_stats",
    "lookup_rows",
    "make_dynamic",
    "read_counts",
    "read_ids",
    "read_last_seen",
    "read_num_rows",
    "read_stats",
]
