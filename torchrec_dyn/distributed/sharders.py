"""The sharders, which DistributedModelParallel and the planner ask how to shard a collection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

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


class _TableSharder(BaseEmbeddingSharder[_Unsharded], Generic[_Unsharded, _Sharded]):
    """Shards collections of one type; abstract, subclasses set the attributes.

    Attributes:
        unsharded: the type of the collection.
        sharded: the type that it has when sharded.
        holder: the name under which the unsharded collection holds its tables.
        shardings: names of the sharding types that it supports.
        options: further keyword arguments of the sharded collection.
    """

    unsharded: type[_Unsharded]
    sharded: type[_Sharded]
    holder: str
    shardings: Iterable[str]
    options: Mapping[str, Any]

    def shard(
        self,
        module: _Unsharded,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> _Sharded:
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
        return self.sharded(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            **self.options,
        )

    def reshard(
        self,
        sharded_module: _Sharded,
        changed_shard_to_params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> _Sharded:
        """Moves tables to where another plan has them, for `DistributedModelParallel.reshard`. Collective.

        Args:
            sharded_module: sharded by this sharder; changed in place.
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

    def shardable_parameters(self, module: _Unsharded) -> dict[str, nn.Parameter]:
        """Returns the placeholder of each table, from whose shape the planner plans."""
        tables: Mapping[str, UnshardedTable] = getattr(module, self.holder)
        return {name: table.weight for name, table in tables.items()}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns all types of the collection; the planner takes GRID only where constraints name it."""
        return list(self.shardings)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns "fused", which every planner can price; `shard` puts ours in its place."""
        return [EmbeddingComputeKernel.FUSED.value]

    @property
    def module_type(self) -> type[_Unsharded]:
        """The type of the unsharded collection."""
        return self.unsharded

    @property
    def sharded_module_type(self) -> type[_Sharded]:
        """The type of the sharded collection."""
        return self.sharded


class DynamicEmbeddingBagCollectionSharder(
    _TableSharder[DynamicEmbeddingBagCollection, ShardedDynamicEmbeddingBagCollection]
):
    """Shards pooled collections, by every type but data-parallel, on any device.

    Args:
        fused_params: the optimizer of the rows and `output_dtype`, as TorchRec's sharders
            take them. An optimizer set on a table's parameter goes before it, the module's
            `fused_params` after it.
        qcomm_codecs_registry: TorchRec's codecs of quantized comms.
    """

    unsharded = DynamicEmbeddingBagCollection
    sharded = ShardedDynamicEmbeddingBagCollection
    holder = "embedding_bags"
    shardings = POOLED_SHARDINGS

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self.options = {}


class DynamicEmbeddingCollectionSharder(
    _TableSharder[DynamicEmbeddingCollection, ShardedDynamicEmbeddingCollection]
):
    """Shards sequence collections table-, row- and column-wise, on any device.

    Args:
        fused_params: as of `DynamicEmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: TorchRec's codecs of quantized comms.
        use_index_dedup: whether each id of a rank's batch is sent once a table, however often it
            occurs. Outputs are the same; gradients of repeats are summed before they are sent.
    """

    unsharded = DynamicEmbeddingCollection
    sharded = ShardedDynamicEmbeddingCollection
    holder = "embeddings"
    shardings = SEQUENCE_SHARDINGS

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self.options = {"use_index_dedup": use_index_dedup}
