"""Row-wise routing: which rank owns an id, and the input dists that send it there.

Each of S ranks owns one contiguous range of the mixed ids. With B = (2**64 - 1) // S the
owner of an id is `mix64(id) // B` (unsigned); the at most S mixed ids from B*S on go to
`mixed % S`. FBGEMM's bucketize op computes exactly this from a block size of B, so the
ids are mixed before it and the kernel of the owner restores them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.twrw_sharding import TwRwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import ops
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.policies import AdmitAfter


def block_size(ranks: int) -> int:
    """Returns how many mixed ids each of `ranks` ranks owns; 0 stands for all 2**64.

    One rank needs no blocks: FBGEMM reads 0 as "owner is id % ranks".
    """
    return 0 if ranks == 1 else (2**64 - 1) // ranks


def row_limit(num_embeddings: int, ranks: int) -> int:
    """Returns the row limit of one of `ranks` ranks that share `num_embeddings` rows.

    Ids never split evenly: the count on a rank is binomial with standard deviation below
    sqrt(N/S), so eight of them are left as room.
    """
    share = num_embeddings / ranks
    if ranks == 1:
        return num_embeddings
    return min(num_embeddings, math.ceil(share + 8 * math.sqrt(share)))


def config_of_share(config: DynamicTableConfig, ranks: int) -> DynamicTableConfig:
    """Returns the options of one of `ranks` ranks that share a table: its share of the counters."""
    admission = config.admission
    if not isinstance(admission, AdmitAfter) or admission.counters is None:
        return config
    share = replace(admission, counters=row_limit(admission.counters, ranks))
    return replace(config, admission=share)


def owners(ids: Tensor, ranks: int) -> Tensor:
    """Returns which of `ranks` ranks owns each id, by the very op that routes batches.

    Args:
        ids: [N] int64.
        ranks: number of ranks that share the rows.

    Returns:
        [N] int64 in [0, ranks).
    """
    features = KeyedJaggedTensor(
        keys=["ids"],
        values=ops.mix64(ids),
        lengths=torch.tensor([ids.numel()], device=ids.device),
    )
    by_owner, position = bucketize_kjt_before_all2all(
        features,
        num_buckets=ranks,
        block_sizes=torch.tensor([block_size(ranks)], device=ids.device),
        output_permute=True,
        keep_original_indices=True,
    )
    assert position is not None
    return torch.bucketize(position.long(), by_owner.lengths().long().cumsum(0), right=True)


def with_mixed_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the same bags with every id replaced by its mixed id."""
    return with_ids(features, ops.mix64(features.values()))


def with_ids(features: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    """Returns the same bags with other ids.

    Args:
        features: of N ids.
        ids: [N] int64.
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


class RowWiseInputDist(RwSparseFeaturesDist):
    """Sends mixed ids to their owners among all ranks; pooled and sequence.

    Args:
        pg: the ranks that share the rows.
        num_features: features of the row-wise tables.
        device: where the block sizes live.
        is_sequence: whether the outputs must find their way back id by id.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        num_features: int,
        device: torch.device | None,
        is_sequence: bool,
    ) -> None:
        # TorchRec divides the "hash size" by the ranks, which gives exactly our block size.
        super().__init__(
            pg=pg,
            num_features=num_features,
            feature_hash_sizes=[block_size(pg.size()) * pg.size()] * num_features,
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

    TorchRec's own forward loses the ids and holds the block sizes as int32.

    Args:
        pg: all ranks.
        local_size: ranks of a node.
        features_per_rank: features of the tables of each rank.
        device: where the block sizes live.
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
        blocks = torch.full((num_features,), block_size(local_size), device=device)
        self.register_buffer("_mixed_id_blocks", blocks, persistent=False)

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Mixes the ids, sorts them by owner within the node and sends them off."""
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
