"""TorchRec's sharders for static tables beside dynamic ones, which may have been given the same options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding

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
            f"{type(sharder).__name__}: expected fused_params that FBGEMM has for the static tables {fused}, "
            f"got {told}. Give the static tables their own by TorchRec's sharder for their type of module, "
            "behind the others: [*default_sharders(...), EmbeddingBagCollectionSharder(fused_params=...)], "
            "say; in feature-processed modules set the options of dynamic tables on their collection and "
            "pass DynamicFeatureProcessedEmbeddingBagCollectionSharder() behind the others; or write an "
            "optimizer that both have as EmbOptimType."
        )


class StaticBagSharder(EmbeddingBagCollectionSharder):
    """TorchRec's, with an error for `fused_params` that only dynamic tables have."""

    def shard(self, module: Any, params: Any, *args: Any, **options: Any) -> Any:
        """Shards as TorchRec's sharder.

        Raises:
            ValueError: if FBGEMM does not have an option of `fused_params`.
        """
        _check_static(self, module, params)
        return super().shard(module, params, *args, **options)


class StaticSequenceSharder(EmbeddingCollectionSharder):
    """TorchRec's, with an error for `fused_params` that only dynamic tables have."""

    def shard(self, module: Any, params: Any, *args: Any, **options: Any) -> Any:
        """Shards as TorchRec's sharder.

        Raises:
            ValueError: if FBGEMM does not have an option of `fused_params`.
        """
        _check_static(self, module, params)
        return super().shard(module, params, *args, **options)
