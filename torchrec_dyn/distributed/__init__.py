"""The sharded collections: sharders, shards, handles, resharding; the word of `torchrec.distributed`.

Imports `sharding`, `modules`, `state_dict`, `ranks` and the rooms below. Start with `sharders`, then
`embeddingbag_collection`: what DistributedModelParallel makes of a collection. `sharding_setup` is done
once for each, `resharding` moves the tables of a running model.
"""

from torchrec_dyn.distributed.embedding_collection import ShardedDynamicEmbeddingCollection
from torchrec_dyn.distributed.embeddingbag_collection import ShardedDynamicEmbeddingBagCollection
from torchrec_dyn.distributed.feature_processors import (
    DynamicFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec_dyn.distributed.sharders import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)
from torchrec_dyn.distributed.table_handle import ShardedTableHandle
from torchrec_dyn.distributed.whole_table import Stats, WholeTable
