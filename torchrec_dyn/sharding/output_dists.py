"""The output dists of tables whose rows are spread: they sum partial bags over ranks.

They fill two gaps of TorchRec's output dists:

1. TorchRec's reduce-scatter cannot run backward on gloo if ranks have batches of different sizes. Then every
   rank sends its partial bags to the rank of their batch, which adds them up.
2. TorchRec's grid does not support a batch size per feature.

Legend: B bags of a rank's batch, D columns of all features, F features.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.dist_data import (
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsAwaitable,
    PooledEmbeddingsReduceScatter,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable, QuantizedCommCodecs


class SumOverRanks(nn.Module):
    """Sums partial bags over ranks; each rank receives the sums of its batch.

    Quantized comms (`codecs`) are used only where TorchRec's reduce-scatter runs.
    """

    def __init__(self, pg: dist.ProcessGroup, codecs: QuantizedCommCodecs | None) -> None:
        super().__init__()
        self._pg = pg
        self._even = PooledEmbeddingsReduceScatter(pg, codecs)
        self._by_feature = VariableBatchPooledEmbeddingsReduceScatter(pg, codecs)

    def forward(
        self,
        local_embs: Tensor,
        input_splits: list[int] | None = None,
        batch_size_per_rank_per_feature: list[list[int]] | None = None,
        embedding_dims: list[int] | None = None,
    ) -> PooledEmbeddingsAwaitable:
        """Starts the sum of local_embs [sum of batch sizes, D]; one dimension with a batch size per feature.

        input_splits [ranks] are batch sizes; None: all are equal. batch_size_per_rank_per_feature [ranks][F]
        and embedding_dims [F], the widths, are given if batch sizes vary by feature.
        """
        if batch_size_per_rank_per_feature is None or embedding_dims is None:
            if self._gloo_fails_at(input_splits, local_embs.device):
                return self._sum(local_embs, input_splits)
            return self._even(local_embs, input_splits=input_splits)
        sizes = [
            sum(bags * width for bags, width in zip(rank_bags, embedding_dims, strict=True))
            for rank_bags in batch_size_per_rank_per_feature
        ]
        if self._gloo_fails_at(sizes, local_embs.device):
            awaitable = self._sum(local_embs.view(-1, 1), sizes)
            awaitable.callbacks.append(torch.flatten)
            return awaitable
        return self._by_feature(local_embs, batch_size_per_rank_per_feature, embedding_dims)

    def _gloo_fails_at(self, sizes: list[int] | None, device: torch.device) -> bool:
        # A group may have a backend for each device ("cpu:gloo,cuda:nccl").
        return len(set(sizes or [])) > 1 and self._pg._get_backend(device).name() == "gloo"

    def _sum(self, partial_bags: Tensor, sizes: list[int] | None) -> PooledEmbeddingsAwaitable:
        ranks, width = self._pg.size(), partial_bags.shape[1]
        send = PooledEmbeddingsAllToAll(self._pg, [width] * ranks, partial_bags.device)
        awaitable = send(partial_bags, batch_size_per_rank=sizes)
        awaitable.callbacks.append(partial(_added_up, ranks=ranks, width=width))
        return awaitable


def _added_up(arrived: Tensor, ranks: int, width: int) -> Tensor:
    """Adds up the partial bags of all ranks, [B, ranks * D] to [B, D]."""
    return arrived.view(arrived.shape[0], ranks, width).sum(1)


class RowWiseOutputDist(RwPooledEmbeddingDist):
    """The output dist of row-wise tables."""

    def _create_output_dist_module(
        self, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> None:
        self._dist: Any = SumOverRanks(self._pg, self._codecs)


class NodeRowWiseOutputDist(TwRwPooledEmbeddingDist):
    """The output dist of table-row-wise tables."""

    def _create_output_dist_modules(
        self, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> None:
        # Creates modules for both kinds of batch, with and without a batch size per feature.
        super()._create_output_dist_modules(
            EmbeddingShardingContext(variable_batch_per_feature=True)
        )
        self._intra_dist: Any = SumOverRanks(self._intra_pg, self._intra_codecs)
        self._variable_intra_dist: Any = self._intra_dist


class GridOutputDist(GridPooledEmbeddingDist):
    """The output dist of grid tables.

    Before stitching, a grid is a set of column shards, each table-row-wise. So with a batch size per feature
    it uses the output dist of table-row-wise tables, and the collection stitches.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        by_feature = {name: value for name, value in options.items() if name != "callbacks"}
        self._by_feature = NodeRowWiseOutputDist(**by_feature)

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Sums partial bags within the node and sends the sums to the ranks of their batches."""
        if sharding_ctx is not None and sharding_ctx.variable_batch_per_feature:
            return self._by_feature(local_embs, sharding_ctx)
        return super().forward(local_embs, sharding_ctx)

    def _create_output_dist_modules(
        self, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> None:
        super()._create_output_dist_modules(sharding_ctx)
        self._intra_dist: Any = SumOverRanks(self._intra_pg, self._intra_codecs)
