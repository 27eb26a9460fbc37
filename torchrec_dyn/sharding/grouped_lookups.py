"""The lookups of one sharding type on one rank: TorchRec's, over our kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.sharding.compute_kernel import DynamicKernel


class PooledLookup(GroupedPooledEmbeddingsLookup):
    """Looks up the pooled tables that one sharding type put on this rank.

    Attributes:
        node_size: ranks of a node, if batches arrive sorted by the sender's place in its node.
    """

    node_size: int | None = None

    def expect(self, bags_of_ranks: Sequence[int]) -> None:
        """Tells how many bags of a feature each rank sent of the batch that comes next."""
        places = self.node_size or 1
        lying = [bags for place in range(places) for bags in bags_of_ranks[place::places]]
        for kernel in self._emb_modules:
            kernel.expect(lying)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
        **later_torchrec: Any,
    ) -> BaseEmbedding:
        return DynamicKernel(config, device, sharding_type)

    @property
    def ids_are_mixed(self) -> bool:
        """Whether ids arrive as mixed ids: the rows of its tables are spread over ranks."""
        return any(kernel.ids_mixed for kernel in self._emb_modules)

    def prefetch(
        self, sparse_features: KeyedJaggedTensor, forward_stream: torch.Stream | None = None
    ) -> None:
        """Makes the rows of unseen ids before the forward that needs them."""
        for kernel, features in zip(
            self._emb_modules, sparse_features.split(self._feature_splits), strict=True
        ):
            kernel.prefetch(features)

    def _forward_with_vbe_merging(
        self, features_by_group: list[KeyedJaggedTensor], device: torch.device
    ) -> Tensor:
        # TorchRec's other way preallocates the output, as float32 or float16 only, and has
        # every kernel write its part; outputs may be bfloat16 here.
        return self._merge_variable_batch_embeddings(
            self._forward(features_by_group), self._vbe_splits(features_by_group)
        )


class SequenceLookup(GroupedEmbeddingsLookup):
    """Looks up the sequence tables that one sharding type put on this rank."""

    def expect(self, bags_of_ranks: Sequence[int]) -> None:
        """Tells how many bags of a feature each rank sent of the batch that comes next."""
        for kernel in self._emb_modules:
            kernel.expect(bags_of_ranks)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None = None,
        **later_torchrec: Any,
    ) -> BaseEmbedding:
        return DynamicKernel(config, device)

    def expect_ids_once(self) -> None:
        """From now on ids come once a rank and table, with counts where the tables need them."""
        for kernel in self._emb_modules:
            kernel.ids_come_once = True

    def prefetch(
        self, sparse_features: KeyedJaggedTensor, forward_stream: torch.Stream | None = None
    ) -> None:
        """Makes the rows of unseen ids before the forward that needs them."""
        for kernel, features in zip(
            self._emb_modules, sparse_features.split(self._feature_splits), strict=True
        ):
            kernel.prefetch(features)


def silent_as_others(lookup: PooledLookup | SequenceLookup, sharding: Any) -> None:
    """Lets a rank without tables send its nothing in the dtype in which the others send rows.

    TorchRec's nothing is float32, and what a rank receives it expects in the dtype of what it sends.

    Args:
        lookup: of this rank.
        sharding: TorchRec's, which knows the tables of all ranks.
    """
    groups = [
        group for of_rank in sharding._grouped_embedding_configs_per_rank for group in of_rank
    ]
    chosen = (groups[0].fused_params or {}).get("output_dtype") if groups else None
    if chosen is not None:
        nothing = lookup._dummy_embs_tensor.detach().to(chosen.as_dtype())
        lookup._dummy_embs_tensor = nothing.requires_grad_()


def tell_senders(lookups: Iterable[nn.Module], contexts: Iterable[Any]) -> None:
    """Tells lookups who sent the batch that they get next.

    Args:
        lookups: one per sharding type.
        contexts: TorchRec's of the batch, one per lookup, after its input dist.
    """
    for lookup, context in zip(lookups, contexts, strict=True):
        assert isinstance(lookup, (PooledLookup, SequenceLookup))
        lookup.expect(context.batch_size_per_rank)
