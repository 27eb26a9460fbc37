"""The sharders of a model with static and dynamic tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ParameterSharding

from torchrec_dyn.distributed.feature_processors import (
    DynamicFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec_dyn.distributed.sharders import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)

# Keys of `fused_params` that FBGEMM does not have.
_OURS = {*("defer_updates", "initial_accumulator_value", "l1", "l2", "use_rowwise_bias_correction")}


def _check_static(sharder: Any, module: Any, params: Mapping[str, ParameterSharding]) -> None:
    """Raises ValueError if FBGEMM would get `fused_params` that only dynamic tables have."""
    given = sharder.fused_params or {}
    dense = EmbeddingComputeKernel.DENSE.value  # which ignores them
    fused = [name for name, one in params.items() if one.compute_kernel != dense]
    wrong = given.keys() & _OURS if fused else set()
    if not isinstance(given.get("optimizer", EmbOptimType.SGD), EmbOptimType):
        parameters = sharder.shardable_parameters(module)
        if not all(hasattr(parameters[name], "_optimizer_classes") for name in fused):
            wrong.add("optimizer")
    if wrong:
        told = ", ".join(f"{key}={given[key]!r}" for key in sorted(wrong))
        raise ValueError(
            f"default_sharders: expected fused_params that FBGEMM has for the static tables {fused}, got "
            f"{told}. Give the static tables their own by TorchRec's sharder behind the others, "
            "[*default_sharders(...), EmbeddingBagCollectionSharder(fused_params=...)]; or write an "
            "optimizer that both have as EmbOptimType."
        )


class _StaticBagSharder(EmbeddingBagCollectionSharder):
    """TorchRec's, with an error for `fused_params` that only dynamic tables have."""

    def shard(self, module: Any, params: Any, *args: Any, **options: Any) -> Any:
        _check_static(self, module, params)
        return super().shard(module, params, *args, **options)


class _StaticSequenceSharder(EmbeddingCollectionSharder):
    """TorchRec's, with an error for `fused_params` that only dynamic tables have."""

    def shard(self, module: Any, params: Any, *args: Any, **options: Any) -> Any:
        _check_static(self, module, params)
        return super().shard(module, params, *args, **options)


def default_sharders(
    fused_params: Mapping[str, Any] | None = None,
) -> list[ModuleSharder[nn.Module]]:
    """Returns TorchRec's default sharders and those of dynamic tables.

    Pass the list to `DistributedModelParallel(sharders=...)`, and to the planner if you call it. A
    feature-processed collection must contain dynamic tables: for static ones pass TorchRec's
    `FeatureProcessedEmbeddingBagCollectionSharder`, which shards the same type of module.

    Args:
        fused_params: the optimizer of the rows of static and dynamic tables, in the form of TorchRec's
            sharders. An optimizer set on a table's parameter has priority. What FBGEMM does not have, such as
            `defer_updates` or ADAMW, is an error when a static table is sharded: for it pass TorchRec's
            sharder behind these, with `fused_params` of its own.
    """

    def copied() -> dict[str, Any] | None:
        return None if fused_params is None else dict(fused_params)

    sharders: list[Any] = [
        *get_default_sharders(),
        _StaticBagSharder(copied()),
        _StaticSequenceSharder(copied()),
        ManagedCollisionEmbeddingBagCollectionSharder(_StaticBagSharder(copied())),
        ManagedCollisionEmbeddingCollectionSharder(_StaticSequenceSharder(copied())),
        DynamicEmbeddingBagCollectionSharder(copied()),
        DynamicEmbeddingCollectionSharder(copied()),
        DynamicFeatureProcessedEmbeddingBagCollectionSharder(copied()),
    ]
    return list({one.module_type: one for one in sharders}.values())  # the last one of each type
