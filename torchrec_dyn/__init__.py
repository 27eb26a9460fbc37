"""Dynamic embedding tables for TorchRec: any int64 is an id, under every sharding plan."""

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.embedding_collection import DynamicEmbeddingCollection
from torchrec_dyn.embeddingbag_collection import DynamicEmbeddingBagCollection
from torchrec_dyn.initializers import Constant, Normal, TruncatedNormal, Uniform
from torchrec_dyn.make_dynamic import make_dynamic

__all__ = [
    "Constant",
    "DynamicEmbeddingBagCollection",
    "DynamicEmbeddingCollection",
    "DynamicTableConfig",
    "Normal",
    "TruncatedNormal",
    "Uniform",
    "make_dynamic",
]
