"""The sharders of a model with static and dynamic tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
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
    StaticBagSharder,
    StaticSequenceSharder,
)
from torchrec_dyn.modules import check_fused_params, with_fbgemm_dtype


def default_sharders(
    fused_params: Mapping[str, Any] | None = None,
) -> list[ModuleSharder[nn.Module]]:
    """Returns TorchRec's default sharders and those of dynamic tables.

    Pass the list to `DistributedModelParallel(sharders=...)`, and to the planner if you call it.

    Args:
        fused_params: the optimizer of the rows of static and dynamic tables, in the form of TorchRec's
            sharders. An optimizer set on a table's parameter has priority. What FBGEMM does not have, such as
            `defer_updates` or ADAMW, is an error when a static table is sharded: for it pass TorchRec's
            sharder for its type of module behind these, with `fused_params` of its own. In
            feature-processed modules, which have one sharder for both, set the options on the collections
            and pass `DynamicFeatureProcessedEmbeddingBagCollectionSharder()` behind these.

    Raises:
        ValueError: if `fused_params` are not a dict, or their `output_dtype` is not supported.
    """
    check_fused_params(fused_params, "default_sharders")

    def copied() -> dict[str, Any] | None:
        # TorchRec's sharders take no torch.dtype.
        return None if fused_params is None else with_fbgemm_dtype(fused_params, "default_sharders")

    sharders: list[Any] = [
        *get_default_sharders(),
        StaticBagSharder(copied()),
        StaticSequenceSharder(copied()),
        ManagedCollisionEmbeddingBagCollectionSharder(StaticBagSharder(copied())),
        ManagedCollisionEmbeddingCollectionSharder(StaticSequenceSharder(copied())),
        DynamicEmbeddingBagCollectionSharder(copied()),
        DynamicEmbeddingCollectionSharder(copied()),
        DynamicFeatureProcessedEmbeddingBagCollectionSharder(copied()),
    ]
    return list({one.module_type: one for one in sharders}.values())  # the last one of each type
