"""Dynamic embedding tables for TorchRec: any int64 is an id, under every sharding plan."""

# ruff: noqa: E402  (the check comes before torchrec is imported)

from torchrec_dyn.versions import check_versions

check_versions()

from torchrec_dyn import checkpoint
from torchrec_dyn.config import DynamicTableConfig, FeatureUse, HostMemory, MappedFiles
from torchrec_dyn.distributed import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicFeatureProcessedEmbeddingBagCollectionSharder,
    ShardedDynamicEmbeddingBagCollection,
    ShardedDynamicEmbeddingCollection,
    default_sharders,
)
from torchrec_dyn.initializers import (
    Constant,
    KaimingNormal,
    KaimingUniform,
    Normal,
    TruncatedNormal,
    Uniform,
    XavierNormal,
    XavierUniform,
)
from torchrec_dyn.layers import (
    BlockEmbeddingBagCollection,
    DynamicEmbedding,
    DynamicEmbeddingBag,
    QuotientRemainderEmbeddingBagCollection,
)
from torchrec_dyn.migration import from_static, make_dynamic
from torchrec_dyn.modules import (
    Description,
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    GroupDescription,
    ShardDescription,
    TablePlan,
)
from torchrec_dyn.own_policies import OwnAdmission, OwnEviction
from torchrec_dyn.policies import (
    AdmitAfter,
    AdmitWithProbability,
    ExpireAfter,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LowestScore,
    Never,
)
from torchrec_dyn.replicas import Replicas, Synced
from torchrec_dyn.row_rules import LarsSGD, Lion, RowRule, RuleState
from torchrec_dyn.string_ids import hash_strings
from torchrec_dyn.whole_model import (
    GradScaler,
    add_stats_hook,
    assign_rows,
    clip_grad_norm_,
    erase_rows,
    log_stats,
    lookup_rows,
    mixed_ids,
    owner_ranks,
    read_counts,
    read_ids,
    read_last_seen,
    read_num_rows,
    read_stats,
    sample_ids,
    stats_layout,
)

__all__ = [
    "AdmitAfter",
    "AdmitWithProbability",
    "BlockEmbeddingBagCollection",
    "Constant",
    "Description",
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
    "DynamicEmbeddingBagCollection",
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollection",
    "DynamicEmbeddingCollectionSharder",
    "DynamicFeatureProcessedEmbeddingBagCollectionSharder",
    "DynamicTableConfig",
    "ExpireAfter",
    "FeatureUse",
    "GradScaler",
    "GroupDescription",
    "HostMemory",
    "KaimingNormal",
    "KaimingUniform",
    "LarsSGD",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "Lion",
    "LowestScore",
    "MappedFiles",
    "Never",
    "Normal",
    "OwnAdmission",
    "OwnEviction",
    "QuotientRemainderEmbeddingBagCollection",
    "Replicas",
    "RowRule",
    "RuleState",
    "ShardDescription",
    "ShardedDynamicEmbeddingBagCollection",
    "ShardedDynamicEmbeddingCollection",
    "Synced",
    "TablePlan",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "add_stats_hook",
    "assign_rows",
    "checkpoint",
    "clip_grad_norm_",
    "default_sharders",
    "erase_rows",
    "from_static",
    "hash_strings",
    "log_stats",
    "lookup_rows",
    "make_dynamic",
    "mixed_ids",
    "owner_ranks",
    "read_counts",
    "read_ids",
    "read_last_seen",
    "read_num_rows",
    "read_stats",
    "sample_ids",
    "stats_layout",
]
