"""The input dists of row-wise types: they send each id to its owner (ranks/routing.py).

TorchRec's bucketize op divides the id by a block size. Here the owner depends on the mixed id, so an op of
ours sorts the batch by owner; the ids are sent as they are. `remove_stale_forwards` is for the input dists
of all sharding types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import ismethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.twrw_sharding import TwRwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import ops
from torchrec_dyn.sharding.grouped_lookups import CreatesLookup, SequenceLookup, device_of
from torchrec_dyn.sharding.sent_modes import with_mode_of


class RowWiseInputDist(RwSparseFeaturesDist):
    """Sends ids to their owners among all ranks, for pooled and for sequence collections.

    `device` is that of TorchRec's block sizes, which are not used. With `is_sequence` outputs are sent back
    id by id.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        num_features: int,
        device: torch.device | None,
        is_sequence: bool,
    ) -> None:
        super().__init__(
            pg=pg,
            num_features=num_features,
            feature_hash_sizes=[0] * num_features,
            device=device,
            is_sequence=is_sequence,
        )

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Sorts the ids by owner and sends them."""
        by_owner, where = sorted_by_owner(sparse_features, self._world_size, self._is_sequence)
        self.unbucketize_permute_tensor = where if self._is_sequence else None
        # The pipelines replace the forward of `_dist`: nothing may follow it.
        return self._dist(by_owner)


class RoutesIds(CreatesLookup):
    """Mixin for TorchRec's row-wise shardings, with our lookups and input dist."""

    _get_num_features: Callable[[], int]

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """Creates the input dist that routes by range of the mixed id."""
        sharding: Any = self
        return RowWiseInputDist(
            pg=sharding._pg,
            num_features=self._get_num_features(),
            device=device_of(self, device),
            is_sequence=self.lookup_class is SequenceLookup,
        )


class NodeRowWiseInputDist(TwRwSparseFeaturesDist):
    """Sends ids to their owners within the node that holds the table; `pg` has all ranks."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        local_size: int,
        features_per_rank: list[int],
        device: torch.device | None,
    ) -> None:
        super().__init__(
            pg=pg,
            local_size=local_size,
            features_per_rank=features_per_rank,
            feature_hash_sizes=[0] * sum(features_per_rank[::local_size]),
            device=device,
        )

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Sorts the ids by owner within the node and sends them."""
        by_owner, _ = sorted_by_owner(sparse_features, self._local_size)
        # The pipelines replace the forward of `_dist`: nothing may follow it.
        return self._dist(
            by_owner.permute(self._sf_staggered_shuffle, self._sf_staggered_shuffle_tensor)
        )


def sorted_by_owner(
    features: KeyedJaggedTensor, ranks: int, positions: bool = False
) -> tuple[KeyedJaggedTensor, Tensor]:
    """Sorts a batch of N ids in F features by the owners of its ids; every owner gets a part of each bag.

    Returns:
        The batch of ranks * F features, and [N] int64, the position of each id of `features` in that batch;
        [0] without `positions`.
    """
    weights, varies = features.weights_or_none(), features.variable_stride_per_key()
    ids, lengths, sorted_weights, where = ops.sort_by_owner(
        features.values(), features.lengths(), weights, ranks, positions
    )
    by_owner = KeyedJaggedTensor(
        keys=features.keys() * ranks,
        values=ids,
        weights=None if weights is None else sorted_weights,
        lengths=lengths,
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() * ranks if varies else None,
    )
    return with_mode_of(by_owner, features), where


def remove_stale_forwards(input_dists: Iterable[nn.Module]) -> None:
    """Removes a pipeline's stale patch of `input_dist.forward` after a reshard.

    A train pipeline replaces the forwards of the input dists and keeps the originals. If it is detached
    after tables have moved (distributed/resharding.py), it puts the originals of the earlier plan on the
    new input dists.
    """
    for input_dist in input_dists:
        sender: Any = getattr(input_dist, "_dist", input_dist)
        forward = vars(sender).get("forward")
        if ismethod(forward) and forward.__self__ is not sender:
            del sender.forward
