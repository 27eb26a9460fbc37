"""Modules that hold a collection: those of one table, block embeddings, quotient-remainder embeddings.

Imports `distributed`, `modules` and the ground. Start with `embedding`: a module reads its input
(`inputs`), looks up in its collection, and shapes the output. Then `embedding_bag`, which pools in one of
three ways: in the collection (`bags`), side by side (`tile`), or so that weights get gradients
(`weight_gradients`). Then `block_embedding` and `quotient_remainder`.

The sharders shard the collections inside; nothing here is sharded itself.
"""

from torchrec_dyn.layers.block_embedding import BlockEmbeddingBagCollection
from torchrec_dyn.layers.embedding import DynamicEmbedding
from torchrec_dyn.layers.embedding_bag import DynamicEmbeddingBag
from torchrec_dyn.layers.quotient_remainder import QuotientRemainderEmbeddingBagCollection
