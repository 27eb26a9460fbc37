"""The sharders: DistributedModelParallel and the planner use them to shard the collections.

Those of TorchRec's own collections, for static tables, check `fused_params` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_dyn.distributed.feature_processors import (
    ShardedDynamicFeatureProcessedEmbeddingBagCollection,
)
from torchrec_dyn.distributed.resharding import reshard
from torchrec_dyn.distributed.sharded_collections import (
    ShardedDynamicEmbeddingBagCollection,
    ShardedDynamicEmbeddingCollection,
)
from torchrec_dyn.distributed.stages import ShardedTables
from torchrec_dyn.modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    UnshardedTable,
    check_fused_params,
    with_fbgemm_dtype,
)
from torchrec_dyn.ranks import CACHED_ON_DEVICE, IN_DEVICE_MEMORY, IN_HOST_MEMORY

_Unsharded = TypeVar("_Unsharded", bound=nn.Module)
_Sharded = TypeVar("_Sharded", bound=ShardedTables)


class _TableSharder(BaseEmbeddingSharder[_Unsharded], Generic[_Unsharded, _Sharded]):
    """Shards collections of one type. Abstract: subclasses set the attributes."""

    module_type: type[_Unsharded]
    sharded_module_type: type[_Sharded]

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        check_fused_params(fused_params, type(self).__name__)
        super().__init__(fused_params, qcomm_codecs_registry)
        # Further arguments of the sharded collection.
        self._options: dict[str, Any] = {"qcomm_codecs_registry": qcomm_codecs_registry}

    def shard(
        self,
        module: _Unsharded,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> _Sharded:
        """Shards a collection."""
        return self.sharded_module_type(
            module, params, env, self.fused_params, device, module_fqn=module_fqn, **self._options
        )

    def reshard(
        self,
        sharded_module: _Sharded,
        changed_shard_to_params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> _Sharded:
        """Moves tables to the ranks of another plan, for `DistributedModelParallel.reshard`. Collective.

        Args:
            sharded_module: a collection sharded by this sharder; changed in place.
            changed_shard_to_params: the new plan of the tables that move.
            env: the ranks.
            device: device of the rows; None: unchanged.

        Returns:
            `sharded_module`.

        Raises:
            ValueError: on every rank, if the plan is not valid or differs between ranks, if the sharder
                changes a table's optimizer, if a batch was sent and not looked up yet, or if a forward of any
                table of the collection is open; nothing has changed then.
            RuntimeError: on every rank, if some rank could not move its rows; nothing has changed then.
        """
        reshard(self, sharded_module, changed_shard_to_params, env, device)
        return sharded_module

    def shardable_parameters(self, module: _Unsharded) -> dict[str, nn.Parameter]:
        """Returns the placeholder of each table; the planner reads their shapes."""
        tables: Mapping[str, UnshardedTable] = getattr(module, self.sharded_module_type.holder)
        return {name: table.weight for name, table in tables.items()}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the supported sharding types; the planner uses GRID only if constraints list it."""
        return list(self.sharded_module_type.sharding_classes)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns "fused", and for GPUs those of rows in the host's memory, as TorchRec's sharders do.

        A planner can estimate the cost of these; `shard` replaces them by our kernel.
        """
        if compute_device_type != "cuda":
            return [IN_DEVICE_MEMORY]
        return [IN_DEVICE_MEMORY, IN_HOST_MEMORY, CACHED_ON_DEVICE]


class DynamicEmbeddingBagCollectionSharder(
    _TableSharder[DynamicEmbeddingBagCollection, ShardedDynamicEmbeddingBagCollection]
):
    """Shards pooled collections by all sharding types except data-parallel.

    Args:
        fused_params: the optimizer of the rows and `output_dtype`, in the form of TorchRec's sharders. An
            optimizer set on a table's parameter has priority over them; they have priority over the
            `fused_params` of the module.
        qcomm_codecs_registry: TorchRec's codecs for quantized communication.
    """

    module_type = DynamicEmbeddingBagCollection
    sharded_module_type = ShardedDynamicEmbeddingBagCollection


class DynamicEmbeddingCollectionSharder(
    _TableSharder[DynamicEmbeddingCollection, ShardedDynamicEmbeddingCollection]
):
    """Shards sequence collections table-, row- and column-wise.

    Args:
        fused_params: as in `DynamicEmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: TorchRec's codecs for quantized communication.
        use_index_dedup: True if a rank sends each distinct id of its batch once per table. Outputs are the
            same; gradients of repeats are summed before they are sent.
    """

    module_type = DynamicEmbeddingCollection
    sharded_module_type = ShardedDynamicEmbeddingCollection

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._options["use_index_dedup"] = use_index_dedup


# Keys of `fused_params` that FBGEMM does not have.
_OURS = {*("defer_updates", "initial_accumulator_value", "l1", "l2", "use_rowwise_bias_correction")}


class _StaticSharder(BaseEmbeddingSharder[_Unsharded]):
    """Mixin for TorchRec's sharders: `fused_params` that only dynamic tables have are an error."""

    def shard(
        self, module: Any, params: Mapping[str, ParameterSharding], *args: Any, **options: Any
    ) -> Any:
        """Shards a collection, unless FBGEMM would get `fused_params` that it does not have."""
        given = self.fused_params or {}
        dense = EmbeddingComputeKernel.DENSE.value  # which ignores them
        fused = [name for name, plan in params.items() if plan.compute_kernel != dense]
        wrong = given.keys() & _OURS if fused else set()
        if not isinstance(given.get("optimizer", EmbOptimType.SGD), EmbOptimType):
            parameters = self.shardable_parameters(module)
            if not all(hasattr(parameters[name], "_optimizer_classes") for name in fused):
                wrong.add("optimizer")
        if wrong:
            got = ", ".join(f"{key}={given[key]!r}" for key in sorted(wrong))
            raise ValueError(
                f"{type(self).__name__}: expected fused_params that FBGEMM has for the static tables "
                f"{fused}, got {got}. Give the static tables their own by TorchRec's sharder for their type "
                "of module, behind the others: [*default_sharders(...), "
                "EmbeddingBagCollectionSharder(fused_params=...)], say; in feature-processed modules set the "
                "options of dynamic tables on their collection and pass "
                "DynamicFeatureProcessedEmbeddingBagCollectionSharder() behind the others; or write an "
                "optimizer that both have as EmbOptimType."
            )
        return super().shard(module, params, *args, **options)


class StaticBagSharder(_StaticSharder[Any], EmbeddingBagCollectionSharder):
    """Shards static pooled collections."""


class StaticSequenceSharder(_StaticSharder[Any], EmbeddingCollectionSharder):
    """Shards static sequence collections."""


class DynamicFeatureProcessedEmbeddingBagCollectionSharder(
    FeatureProcessedEmbeddingBagCollectionSharder
):
    """Shards TorchRec's feature-processed collections, with dynamic or static tables.

    It supports all sharding types except data-parallel. Pass it instead of TorchRec's sharder for the same
    type of module, which creates static tables only. Modules with static tables are sharded as TorchRec's
    sharder does.

    Args:
        fused_params: as in `DynamicEmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: TorchRec's codecs for quantized communication.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        self._collection_sharder = DynamicEmbeddingBagCollectionSharder(
            fused_params, qcomm_codecs_registry
        )
        self._static_sharder = FeatureProcessedEmbeddingBagCollectionSharder(
            StaticBagSharder(fused_params, qcomm_codecs_registry=qcomm_codecs_registry),
            qcomm_codecs_registry,
        )
        super().__init__(cast(Any, self._collection_sharder), qcomm_codecs_registry)

    def shard(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFeatureProcessedEmbeddingBagCollection:
        """Shards a collection and its processors; the arguments are those of TorchRec's sharders.

        A dynamic collection of `module` is not changed; the processors become the sharded module's.

        Raises:
            ValueError: for dynamic tables, if a table has LowestScore, a processor does not support spread
                rows, or the plan is not valid; raised before anything is built.
        """
        place = device if device is not None else torch.device("cpu")
        if not isinstance(module._embedding_bag_collection, DynamicEmbeddingBagCollection):
            return self._static_sharder.shard(module, params, env, place, module_fqn)
        return ShardedDynamicFeatureProcessedEmbeddingBagCollection(
            module, params, self._collection_sharder, env, place, module_fqn
        )

    def reshard(
        self,
        sharded_module: ShardedFeatureProcessedEmbeddingBagCollection,
        changed_shard_to_params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedFeatureProcessedEmbeddingBagCollection:
        """Moves tables, for `DistributedModelParallel.reshard`; the processors stay. Collective.

        Returns:
            `sharded_module`, changed in place.

        Raises:
            ValueError, RuntimeError: as in `DynamicEmbeddingBagCollectionSharder.reshard`; ValueError if the
                new plan spreads rows and a processor does not support this, or the tables are static.
        """
        if not isinstance(sharded_module, ShardedDynamicFeatureProcessedEmbeddingBagCollection):
            raise ValueError(
                f"{type(self).__name__}.reshard: expected dynamic tables, got static ones. TorchRec cannot "
                "move tables behind feature processors: save a checkpoint, and load it under the new plan."
            )
        sharded_module.reshard(self._collection_sharder, changed_shard_to_params, env, device)
        return sharded_module

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns all types; the planner spreads rows only if constraints list such a type."""
        return self._collection_sharder.sharding_types(compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the kernels of dynamic collections."""
        return self._collection_sharder.compute_kernels(sharding_type, compute_device_type)

    sharded_module_type = ShardedDynamicFeatureProcessedEmbeddingBagCollection


def default_sharders(
    fused_params: Mapping[str, Any] | None = None,
) -> list[ModuleSharder[nn.Module]]:
    """Returns TorchRec's default sharders and those of dynamic tables.

    Pass the list to `DistributedModelParallel(sharders=...)`, and to the planner if you call it.

    Args:
        fused_params: the optimizer of the rows of static and dynamic tables, in the form of TorchRec's
            sharders. An optimizer set on a table's parameter has priority. Options that FBGEMM does not have,
            such as `defer_updates` or ADAMW, are errors when a static table is sharded: append TorchRec's
            sharder for that type of module to the list, with `fused_params` of its own. Feature-processed
            modules have the same sharder for static and dynamic tables: set the options on their collections,
            and append `DynamicFeatureProcessedEmbeddingBagCollectionSharder()` to the list.

    Raises:
        ValueError: if `fused_params` is not a dict, or its `output_dtype` is not supported.
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
    return list(
        {sharder.module_type: sharder for sharder in sharders}.values()
    )  # the last of each type
