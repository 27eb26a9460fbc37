"""The lookups of one sharding type on one rank: TorchRec's lookups with our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingContext
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.lookup import PrefetchedStep
from torchrec_dyn.name_lists import listed
from torchrec_dyn.optimizers import output_dtype_of
from torchrec_dyn.sharding.compute_kernel import DynamicKernel

# The steps of one batch that were taken ahead of its forward.
PrefetchedSteps: TypeAlias = dict[DynamicKernel, PrefetchedStep]


class _Lookup:
    """Mixin for TorchRec's lookups: looks up by our kernels; `node_size` ranks share rows within a node."""

    grouped_configs: list[GroupedEmbeddingConfig]
    node_size: int = 1
    _emb_modules: Any  # kernels
    _feature_splits: list[int]
    _dummy_embs_tensor: Tensor

    def _outputs(
        self,
        features: Sequence[KeyedJaggedTensor],
        bags_of_ranks: Sequence[int],
        steps: PrefetchedSteps,
    ) -> list[Tensor]:
        """Returns the output of each kernel, from the bags [ranks] that each rank has sent.

        Steps that were taken ahead are taken out of `steps`.
        """
        size = self.node_size
        if size > 1:
            # Within nodes a batch arrives sorted by the position of its sender within the sender's node.
            bags_of_ranks = [bags for place in range(size) for bags in bags_of_ranks[place::size]]
        return [
            kernel(kernel_features, bags_of_ranks, steps.pop(kernel, None))
            for kernel, kernel_features in zip(self._emb_modules, features, strict=True)
        ]

    def _by_kernel(self, features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        if len(self._feature_splits) == 1:
            return [features]
        return features.split(self._feature_splits)

    def register_optim_state_tracker_fn(self, record_fn: Callable[..., None]) -> None:
        """Refuses TorchRec's tracker of changed rows in its modes with optimizer state, of its own tables."""
        names = {name for group in self.grouped_configs for name in group.table_names()}
        raise ValueError(
            f"tables {listed(sorted(names))}: expected a ModelDeltaTracker of ids (TrackingMode.ID_ONLY, "
            "or EMBEDDING for a sequence collection), got a mode with optimizer state. "
            "Export changed rows and their optimizer state with torchrec_dyn.checkpoint.export_delta."
        )


class PooledLookup(_Lookup, GroupedPooledEmbeddingsLookup):
    """Looks up the pooled tables of one sharding type on this rank."""

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

    def forward(
        self,
        sparse_features: KeyedJaggedTensor,
        context: EmbeddingShardingContext,
        steps: PrefetchedSteps,
    ) -> Tensor:
        """Returns the kernels' outputs side by side; with a size per feature those of a rank in a row."""
        features = [
            self._apply_feature_processor_and_gradient_scaling(part, config)
            for part, config in zip(
                self._by_kernel(sparse_features), self.grouped_configs, strict=True
            )
        ]
        outputs = self._outputs(features, context.batch_size_per_rank, steps)
        if len(outputs) == 1:
            return outputs[0]
        if not sparse_features.variable_stride_per_key():
            if not outputs:
                return self._dummy_embs_tensor.view(sparse_features.stride(), 0)
            return torch.cat(outputs, dim=1)
        # TorchRec preallocates the output, as float32 or float16 only, and every kernel writes its part.
        # Here outputs may be bfloat16.
        by_kernel = [
            output.split(
                values_per_rank(
                    zip(*part.stride_per_key_per_rank(), strict=True), config.embedding_dims()
                )
            )
            for output, part, config in zip(outputs, features, self.grouped_configs, strict=True)
        ]
        parts = [part for parts in zip(*by_kernel, strict=True) for part in parts]
        return torch.cat(parts) if parts else self._dummy_embs_tensor


def values_per_rank(bags: Iterable[Sequence[int]], widths: Sequence[int]) -> list[int]:
    """Returns how many values each rank receives; bags [ranks][F] by feature, widths [F] of outputs."""
    return [sum(n * width for n, width in zip(row, widths, strict=True)) for row in bags]


class SequenceLookup(_Lookup, GroupedEmbeddingsLookup):
    """Looks up the sequence tables of one sharding type on this rank."""

    def forward(
        self,
        sparse_features: KeyedJaggedTensor,
        context: SequenceShardingContext,
        steps: PrefetchedSteps,
    ) -> Tensor:
        """Returns the rows of the ids of all kernels, [N, columns]."""
        lengths = sparse_features.lengths().view(-1, sparse_features.stride())
        context.lengths_after_input_dist = lengths  # for the output dist
        features = self._by_kernel(sparse_features)
        outputs = self._outputs(features, context.batch_size_per_rank, steps)
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs) if outputs else self._dummy_embs_tensor

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
            dtype = output_dtype_of(groups[0].fused_params, f"tables {names}")
            empty = lookup._dummy_embs_tensor.detach().to(dtype)
            if self.lookup_class is SequenceLookup:
                empty = empty.view(0, groups[0].embedding_tables[0].local_cols)
            lookup._dummy_embs_tensor = empty.requires_grad_()
        return lookup


def device_of(sharding: Any, device: torch.device | None) -> torch.device | None:
    """Returns `device`, or the device of a TorchRec sharding if it is None."""
    return device if device is not None else sharding._device
