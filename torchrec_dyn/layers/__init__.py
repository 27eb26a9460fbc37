"""Modules that hold collections: modules of one table, block embeddings and quotient-remainder embeddings.

Imports `modules` and the ground. Start with `embedding`: a module reads its input (`inputs`), looks up rows
in its collection, and shapes the output. Then read `block_embedding` and `quotient_remainder`.

The sharders shard the collections inside these modules. The modules themselves are not sharded.
"""

from torchrec_dyn.layers.block_embedding import BlockEmbeddingBagCollection
from torchrec_dyn.layers.embedding import DynamicEmbedding, DynamicEmbeddingBag
from torchrec_dyn.layers.quotient_remainder import QuotientRemainderEmbeddingBagCollection
