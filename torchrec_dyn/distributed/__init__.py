"""The sharded collections: sharders, shards, handles, resharding.

The room is named after `torchrec.distributed`.

Imports `sharding`, `modules`, `state_dict`, `ranks`, `checkpoint_format`, `lookup`, `table`, `life`,
`storage` and the ground. Start with `sharders`, then `sharded_collections`: `sharding_setup` checks
the plan, `local_shards` holds the tables of this rank. Read as needed: `resharding` and
`feature_processors`.

An invalid argument of a collective call is an error on every rank, and nothing has changed then.
"""

from torchrec_dyn.distributed.local_shards import ShardedTableHandle
from torchrec_dyn.distributed.sharded_collections import (
    ShardedDynamicEmbeddingBagCollection,
    ShardedDynamicEmbeddingCollection,
)
from torchrec_dyn.distributed.sharders import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicFeatureProcessedEmbeddingBagCollectionSharder,
    default_sharders,
)

__all__ = ["ShardedTableHandle"]  # public, besides what other rooms use
