"""The sharders: what DistributedModelParallel and the planner ask how to shard a collection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv

from torchrec_dyn.distributed.embedding_collection import ShardedDynamicEmbeddingCollection
from torchrec_dyn.distributed.embeddingbag_collection import ShardedDynamicEmbeddingBagCollection
from torchrec_dyn.distributed.resharding import reshard
from torchrec_dyn.modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    UnshardedTable,
)
from torchrec_dyn.sharding import POOLED_SHARDINGS, SEQUENCE_SHARDINGS

_Unsharded = TypeVar("_Unsharded", bound=nn.Module)
_Sharded = TypeVar("_Sharded", bound=nn.Module)


def _tables(held: nn.ModuleDict) -> Mapping[str, UnshardedTable]:
    return cast(Mapping[str, UnshardedTable], held)


class _TableSharder(BaseEmbeddingSharder[_Unsharded]):
    """What the sharders of both kinds of collection do alike."""

    def reshard(
        self,
        sharded_module: _Sharded,
        changed_shard_to_params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> _Sharded:
        """Moves tables to where another plan has them, for `DistributedModelParallel.reshard`. Collective.

        Args:
            sharded_module: what this sharder made; changed in place.
            changed_shard_to_params: the new plan of the tables that move.
            env: the ranks.
            device: where the rows live.

        Returns:
            The same module.

        Raises:
            ValueError: on every rank, if the plan cannot be honoured, differs between ranks, or if a batch
                is on its way; nothing has changed then.
            RuntimeError: on every rank, if some rank could not move its rows; nothing has changed then.
        """
        reshard(self, sharded_module, changed_shard_to_params, env, device)
        return sharded_module

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns "fused", which every planner can price; `shard` puts ours in its place."""
        return [EmbeddingComputeKernel.FUSED.value]


class DynamicEmbeddingBagCollectionSharder(_TableSharder[DynamicEmbeddingBagCollection]):
    """Shards pooled collections, by every type but data-parallel, on any device.

    Args:
        fused_params: the optimizer of the rows and `output_dtype`, as TorchRec's sharders
            take them. An optimizer set on a table's parameter goes before it, the module's
            `fused_params` after it.
        qcomm_codecs_registry: TorchRec's codecs of quantized comms.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)

    def shard(
        self,
        module: DynamicEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicEmbeddingBagCollection:
        """Shards a collection.

        Args:
            module: the collection; it is not changed.
            params: the plan of its tables.
            env: the ranks.
            device: where the rows live.
            module_fqn: where the model holds the collection.

        Raises:
            ValueError: if the plan cannot be honoured; before anything is built.
        """
        return ShardedDynamicEmbeddingBagCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    def shardable_parameters(
        self, module: DynamicEmbeddingBagCollection
    ) -> dict[str, nn.Parameter]:
        """Returns the placeholder of each table, from whose shape the planner plans."""
        return {name: table.weight for name, table in _tables(module.embedding_bags).items()}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns all types; the planner takes GRID only where constraints name it."""
        return list(POOLED_SHARDINGS)

    @property
    def module_type(self) -> type[DynamicEmbeddingBagCollection]:
        """What it shards."""
        return DynamicEmbeddingBagCollection

    @property
    def sharded_module_type(self) -> type[ShardedDynamicEmbeddingBagCollection]:
        """What it makes."""
        return ShardedDynamicEmbeddingBagCollection


class DynamicEmbeddingCollectionSharder(_TableSharder[DynamicEmbeddingCollection]):
    """Shards sequence collections table-, row- and column-wise, on any device.

    Args:
        fused_params: as of `DynamicEmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: TorchRec's codecs of quantized comms.
        use_index_dedup: whether each id of a rank's batch is sent once a table, however often it
            occurs. Outputs are the same; gradients of repeats are summed before they are sent.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._use_index_dedup = use_index_dedup

    def shard(
        self,
        module: DynamicEmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicEmbeddingCollection:
        """Shards a collection.

        Args:
            module: the collection; it is not changed.
            params: the plan of its tables.
            env: the ranks.
            device: where the rows live.
            module_fqn: where the model holds the collection.

        Raises:
            ValueError: if the plan cannot be honoured; before anything is built.
        """
        return ShardedDynamicEmbeddingCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
        )

    def shardable_parameters(self, module: DynamicEmbeddingCollection) -> dict[str, nn.Parameter]:
        """Returns the placeholder of each table, from whose shape the planner plans."""
        return {name: table.weight for name, table in _tables(module.embeddings).items()}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns all types that sequences have."""
        return list(SEQUENCE_SHARDINGS)

    @property
    def module_type(self) -> type[DynamicEmbeddingCollection]:
        """What it shards."""
        return DynamicEmbeddingCollection

    @property
    def sharded_module_type(self) -> type[ShardedDynamicEmbeddingCollection]:
        """What it makes."""
        return ShardedDynamicEmbeddingCollection
