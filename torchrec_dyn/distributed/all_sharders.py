"""The sharders of a model with static and dynamic tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder

from torchrec_dyn.distributed.feature_processors import (
    DynamicFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec_dyn.distributed.sharders import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)

_WITH_FUSED_PARAMS = (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicFeatureProcessedEmbeddingBagCollectionSharder,
)


def default_sharders(
    fused_params: Mapping[str, Any] | None = None,
) -> list[ModuleSharder[nn.Module]]:
    """Returns TorchRec's default sharders and those of dynamic tables.

    Pass the list to `DistributedModelParallel(sharders=...)`, and to the planner if you call it.

    Args:
        fused_params: the optimizer of the rows of static and dynamic tables, in the form of TorchRec's
            sharders. An optimizer set on a table's parameter has priority.
    """
    sharders: dict[type[nn.Module], Any] = {
        sharder.module_type: sharder for sharder in get_default_sharders()
    }
    for kind in _WITH_FUSED_PARAMS:
        sharder = kind(fused_params=None if fused_params is None else dict(fused_params))
        sharders[sharder.module_type] = sharder
    return list(sharders.values())
