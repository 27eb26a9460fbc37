"""The input dists of row-wise types: they mix the ids and send each id to its owner (ranks/routing.py).

The compute kernel of the owner restores the ids. `remove_stale_forwards` is for the input dists of all
sharding types.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import ismethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.twrw_sharding import TwRwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import ops
from torchrec_dyn.ranks import ids_per_rank


class RowWiseInputDist(RwSparseFeaturesDist):
    """Sends mixed ids to their owners among all ranks, for pooled and for sequence collections.

    Args:
        pg: the ranks that share the rows.
        num_features: number of features of the row-wise tables.
        device: device of the block sizes.
        is_sequence: True if the outputs are sent back id by id.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        num_features: int,
        device: torch.device | None,
        is_sequence: bool,
    ) -> None:
        # TorchRec divides the "hash size" by the number of ranks: the result is exactly our block size.
        super().__init__(
            pg=pg,
            num_features=num_features,
            feature_hash_sizes=[ids_per_rank(pg.size()) * pg.size()] * num_features,
            device=device,
            is_sequence=is_sequence,
            keep_original_indices=True,
        )

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Mixes the ids, then routes as TorchRec does."""
        return super().forward(with_mixed_ids(sparse_features))


class NodeRowWiseInputDist(TwRwSparseFeaturesDist):
    """Sends mixed ids to their owners within the node that holds the table.

    TorchRec's own forward loses the ids and stores the block sizes as int32.

    Args:
        pg: all ranks.
        local_size: number of ranks of a node.
        features_per_rank: number of features of the tables of each rank.
        device: device of the block sizes.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        local_size: int,
        features_per_rank: list[int],
        device: torch.device | None,
    ) -> None:
        num_features = sum(features_per_rank[::local_size])
        super().__init__(
            pg=pg,
            local_size=local_size,
            features_per_rank=features_per_rank,
            feature_hash_sizes=[0] * num_features,
            device=device,
        )
        blocks = torch.full((num_features,), ids_per_rank(local_size), device=device)
        self.register_buffer("_mixed_id_blocks", blocks, persistent=False)

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Mixes the ids, sorts them by owner within the node and sends them."""
        by_owner, _ = bucketize_kjt_before_all2all(
            with_mixed_ids(sparse_features),
            num_buckets=self._local_size,
            block_sizes=self._mixed_id_blocks,
            keep_original_indices=True,
        )
        # The pipelines replace the forward of `_dist`: nothing may follow it.
        return self._dist(
            by_owner.permute(self._sf_staggered_shuffle, self._sf_staggered_shuffle_tensor)
        )


def with_mixed_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the same bags with every id replaced by its mixed id."""
    return with_ids(features, ops.mix64(features.values()))


def with_ids(features: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    """Returns the same bags with other ids.

    Args:
        features: a batch of N ids.
        ids: [N] int64, the new ids.
    """
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=ids,
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
    )


def remove_stale_forwards(input_dists: Iterable[nn.Module]) -> None:
    """Removes a pipeline's stale patch of `input_dist.forward` after a reshard.

    A train pipeline replaces the forwards of the input dists and keeps the originals. If it is detached
    after tables have moved (distributed/resharding.py), it puts the originals of the earlier plan on the
    new input dists.

    Args:
        input_dists: TorchRec's input dists, one per sharding type.
    """
    for input_dist in input_dists:
        sender: Any = getattr(input_dist, "_dist", input_dist)
        forward = vars(sender).get("forward")
        if ismethod(forward) and forward.__self__ is not sender:
            del sender.forward
