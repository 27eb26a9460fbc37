"""What is built of collections: modules of one table, block and quotient-remainder embeddings.

Imports `modules`, `distributed` and the rooms below. Start with `embedding_bag`.

Each holds a collection, which the sharders shard: nothing here is sharded itself.
"""

from torchrec_dyn.layers.block_embedding import BlockEmbeddingBagCollection
from torchrec_dyn.layers.embedding import DynamicEmbedding
from torchrec_dyn.layers.embedding_bag import DynamicEmbeddingBag
from torchrec_dyn.layers.quotient_remainder import QuotientRemainderEmbeddingBagCollection
