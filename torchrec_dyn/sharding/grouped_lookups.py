"""The lookups of one sharding type on one rank: TorchRec's lookups with our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.lookup import PrefetchedStep
from torchrec_dyn.modules import chosen_output_dtype
from torchrec_dyn.name_lists import listed
from torchrec_dyn.sharding.compute_kernel import DynamicKernel

# The steps of one batch that were taken ahead of its forward.
PrefetchedSteps: TypeAlias = dict[DynamicKernel, PrefetchedStep]


def _refuse_state_tracker(lookup: Any, record_fn: Callable[..., None]) -> None:
    """Refuses TorchRec's tracker of changed rows with optimizer state, which it reads by row number."""
    names = {name for group in lookup.grouped_configs for name in group.table_names()}
    raise ValueError(
        f"tables {listed(sorted(names))}: expected a ModelDeltaTracker of ids (TrackingMode.ID_ONLY, "
        "or EMBEDDING for a sequence collection), got a mode with optimizer state. "
        "Export changed rows and their optimizer state with torchrec_dyn.checkpoint.export_delta."
    )


class PooledLookup(GroupedPooledEmbeddingsLookup):
    """Looks up the pooled tables of one sharding type; `node_size` ranks share rows within a node."""

    node_size: int = 1
    register_optim_state_tracker_fn = _refuse_state_tracker

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
        **later_torchrec: Any,
    ) -> BaseEmbedding:
        return DynamicKernel(config, device)

    def _forward_with_vbe_merging(
        self, features_by_group: list[KeyedJaggedTensor], device: torch.device
    ) -> Tensor:
        # TorchRec preallocates the output, as float32 or float16 only, and every kernel writes its part.
        # Here outputs may be bfloat16.
        by_group = [
            output.split(
                values_per_rank(
                    zip(*features.stride_per_key_per_rank(), strict=True), config.embedding_dims()
                )
            )
            for output, features, config in zip(
                self._forward(features_by_group),
                features_by_group,
                self.grouped_configs,
                strict=True,
            )
        ]
        return torch.cat([part for parts in zip(*by_group, strict=True) for part in parts])


def values_per_rank(bags: Iterable[Sequence[int]], widths: Sequence[int]) -> list[int]:
    """Returns how many values each rank receives; bags [ranks][F] by feature, widths [F] of outputs."""
    return [sum(n * width for n, width in zip(row, widths, strict=True)) for row in bags]


class SequenceLookup(GroupedEmbeddingsLookup):
    """Looks up the sequence tables of one sharding type on this rank."""

    node_size: int = 1  # TorchRec does not spread rows of sequence tables within nodes
    register_optim_state_tracker_fn = _refuse_state_tracker

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None = None,
        **later_torchrec: Any,
    ) -> BaseEmbedding:
        return DynamicKernel(config, device)


def prefetch(
    lookups: Iterable[nn.Module],
    features: Iterable[KeyedJaggedTensor],
    steps: PrefetchedSteps | None,
) -> None:
    """Prepares the forward of a batch: inserts rows for unseen ids, or takes training steps.

    Each lookup gets the ids that arrived for its sharding type. Steps are added to `steps`, if given.
    """
    for lookup, lookup_features in zip(lookups, features, strict=True):
        assert isinstance(lookup, (PooledLookup, SequenceLookup))
        kernel_features = lookup_features.split(lookup._feature_splits)
        for kernel, kernel_input in zip(kernels_of([lookup]), kernel_features, strict=True):
            keeps_step = steps is not None and kernel not in steps
            step = kernel.prefetch(kernel_input, keeps_step)
            if steps is not None and step is not None:
                steps[kernel] = step


def kernels_of(lookups: Iterable[nn.Module]) -> Iterator[DynamicKernel]:
    """Yields the kernels of lookups."""
    for lookup in lookups:
        assert isinstance(lookup, (PooledLookup, SequenceLookup))
        for kernel in lookup._emb_modules:
            assert isinstance(kernel, DynamicKernel)
            yield kernel


def set_batch(
    lookups: Iterable[nn.Module], contexts: Iterable[Any], steps: PrefetchedSteps
) -> None:
    """Sets the kernels to the next batch: its senders, and its steps of `steps`, which are removed there."""
    for lookup, context in zip(lookups, contexts, strict=True):
        bags, size = context.batch_size_per_rank, cast(PooledLookup, lookup).node_size
        # Within nodes a batch arrives sorted by the position of its sender within the sender's node.
        as_arrived = [rank_bags for place in range(size) for rank_bags in bags[place::size]]
        for kernel in kernels_of([lookup]):
            kernel.bags_of_ranks = as_arrived
            # Also None: an interrupt may have left the step of another batch.
            kernel.prefetched_step = steps.pop(kernel, None)


class CreatesLookup(EmbeddingSharding[Any, KeyedJaggedTensor, Tensor, Tensor]):
    """Mixin for TorchRec's shardings: creates the lookup with our kernels. List it before the sharding."""

    lookup_class: ClassVar[type[PooledLookup] | type[SequenceLookup]] = PooledLookup

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> PooledLookup | SequenceLookup:
        """Creates the lookup of the shards on this rank."""
        sharding: Any = self
        groups_per_rank = sharding._grouped_embedding_configs_per_rank
        lookup = self.lookup_class(
            grouped_configs=groups_per_rank[sharding._rank],
            pg=sharding._pg,
            device=device_of(sharding, device),
            env=sharding._env,
        )
        if hasattr(sharding, "_intra_pg"):
            lookup.node_size = sharding._intra_pg.size()
        # TorchRec makes the empty output of a rank without tables as float32, but a rank expects to receive
        # the dtype that it sends.
        if groups := list(chain.from_iterable(groups_per_rank)):
            names = ", ".join(groups[0].table_names())
            dtype = chosen_output_dtype(groups[0].fused_params, f"tables {names}")
            empty = lookup._dummy_embs_tensor.detach().to(dtype)
            lookup._dummy_embs_tensor = empty.requires_grad_()
        return lookup


def device_of(sharding: Any, device: torch.device | None) -> torch.device | None:
    """Returns `device`, or the device of a TorchRec sharding if it is None."""
    return device if device is not None else sharding._device
