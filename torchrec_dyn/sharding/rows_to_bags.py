"""Max pooling of tables whose rows are spread: rows travel, and the maximum is taken where the bag lives.

Each id is sent as a bag of its own, so its row comes back by TorchRec's all-to-all of outputs with a size per
feature. N rows travel, as in a sequence collection, but tables may differ in width. (A sum of such bags over
the ranks, as of other bags, would send N rows to each of them.)

Legend: F features of a sharding type, R ranks that share the rows of a table, N ids of a rank's batch. A
segment is the ids of one feature that go to one of R ranks; in the order of owners it has the number
rank * F + feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.dist_data import (
    PooledEmbeddingsAwaitable,
    VariableBatchPooledEmbeddingsAllToAll,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.types import Awaitable, CommOp, QuantizedCommCodecs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.lookup import largest_rows, pooled_output
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ops import complete_cumsum
from torchrec_dyn.sharding.dists import OwnerInputDist
from torchrec_dyn.sharding.sent_batch import SentBatch
from torchrec_dyn.storage import host_numbers


@dataclass
class SentRows:
    """The rows that a rank has asked for.

    Attributes:
        order: the segments in the order that they were sent.
        counts: [R * F], ids of each segment.
        places: [N] int64, the place of each id's row where the segments of a feature follow each other.
    """

    order: Sequence[int]
    counts: list[int]
    places: Tensor


@dataclass
class RowsContext(EmbeddingShardingContext):
    """State of one forward: lengths [sum of sizes] and sizes [F] of the rank's bags, and what was sent."""

    lengths: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    sizes: list[int] = field(default_factory=list)
    sizes_vary: bool = False
    sent: SentRows | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Records for the allocator that a stream uses the tensors of this context."""
        super().record_stream(stream)
        self.lengths.record_stream(stream)
        if self.sent is not None:
            self.sent.places.record_stream(stream)


class IdsInputDist(OwnerInputDist):
    """Sends each id to its owner as a bag of its own; `sent` is what was sent last."""

    sent: SentRows

    def __init__(self, stock: Any) -> None:
        super().__init__(stock, needs_positions=True)
        # Ids arrive by rank also within nodes: rows are sent back without a stop there.
        self._dist._stagger = 1

    def forward(self, features: SentBatch) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Sorts the ids by owner and sends them."""
        by_owner, where = self._sorted(features)
        counts = by_owner.length_per_key()
        order = range(len(counts)) if self._places is None else self._places
        self.sent = SentRows(order, counts, _by_feature(where, counts, self._ranks))
        ids = by_owner.values()
        bags = KeyedJaggedTensor(
            keys=by_owner.keys(),
            values=ids,
            weights=by_owner.weights_or_none(),
            lengths=torch.ones_like(ids),
            stride_per_key_per_rank=[[count] for count in counts],
            length_per_key=counts,
        )
        return self._send(bags, features)


def _by_feature(where: Tensor, counts: Sequence[int], ranks: int) -> Tensor:
    """Returns the place of each id where segments are in the order of features: where, in that of owners."""
    by_owner = torch.tensor(counts, device="cpu").view(ranks, -1)
    by_feature = by_owner.t().flatten()
    begins = (by_feature.cumsum(0) - by_feature).view(-1, ranks).t().flatten()
    sizes = by_owner.flatten()
    moves = host_numbers((begins - (sizes.cumsum(0) - sizes)).tolist())
    sizes, moves = (numbers.to(where.device, non_blocking=True) for numbers in (sizes, moves))
    return where + moves.repeat_interleave(sizes, output_size=len(where))[where]


def _codecs_of(sharding: Any) -> QuantizedCommCodecs | None:
    """Returns the codecs of outputs; ValueError for those of 8 bits, which TorchRec pads in part."""
    registry = sharding.qcomm_codecs_registry or {}
    codecs: QuantizedCommCodecs | None = registry.get(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name)
    if codecs is None:
        return None
    if torch.uint8 in (codecs.forward.quantized_dtype, codecs.backward.quantized_dtype):
        raise ValueError(
            f"outputs {listed(sharding.embedding_names())}: expected communication of FP32, FP16 or BF16, "
            "since rows are sent with pooling='max' under this plan, got a codec of 8 bits. Change "
            "QCommsConfig, or choose table_wise or column_wise for these tables."
        )
    return codecs


class BagsOutputDist(nn.Module):
    """Sends rows back to the ranks of their bags, and takes the maximum of each bag.

    `stock` is TorchRec's output dist of the sharding type, which puts column shards in order.
    """

    def __init__(self, sharding: Any, stock: Any) -> None:
        super().__init__()
        self._columns: list[int] = list(sharding.uncombined_embedding_dims())
        self._stitch = list(getattr(stock, "_callbacks", None) or [])
        codecs = _codecs_of(sharding)
        self._dist = VariableBatchPooledEmbeddingsAllToAll(
            sharding._pg,
            [
                [columns for group in groups for columns in group.embedding_dims()]
                for groups in sharding._grouped_embedding_configs_per_rank
            ],
            codecs=codecs,
        )

    def forward(self, local_embs: Tensor, sharding_ctx: RowsContext) -> PooledEmbeddingsAwaitable:
        """Starts to send rows, flat: for each rank in order, those of each feature in order."""
        assert sharding_ctx.sent is not None
        order, counts = sharding_ctx.sent.order, sharding_ctx.sent.counts
        awaitable = self._dist(
            local_embs,
            sharding_ctx.batch_size_per_rank_per_feature,
            [counts[segment] for segment in order],
        )
        awaitable.callbacks.append(partial(self._pooled, context=sharding_ctx))
        return awaitable

    def _pooled(self, arrived: Tensor, context: RowsContext) -> Tensor:
        """Returns the largest values of the bags, in the form of TorchRec's output of pooled bags."""
        sizes = [[size] for size in context.sizes]
        output = pooled_output(
            self._largest(arrived, context), sizes if context.sizes_vary else None
        )
        if not context.sizes_vary:  # else TorchRec stitches column shards
            for callback in self._stitch:
                output = callback(output)
        return output

    def _largest(self, arrived: Tensor, context: RowsContext) -> list[Tensor]:
        assert context.sent is not None
        columns, sent = self._columns, context.sent
        count = len(columns)
        widths = [sent.counts[segment] * columns[segment % count] for segment in sent.order]
        parts = dict(zip(sent.order, arrived.split(widths), strict=True))
        first_bags = [*accumulate(context.sizes, initial=0)]
        outputs: list[Tensor] = []
        first = 0
        for width, run in groupby(range(count), key=columns.__getitem__):
            features = [*run]
            segments = [s for f in features for s in range(f, len(parts), count)]
            rows = torch.cat([parts[segment] for segment in segments]).view(-1, width)
            bags = slice(first_bags[features[0]], first_bags[features[-1] + 1])
            places = sent.places[first : first + len(rows)] - first
            largest = largest_rows(rows, complete_cumsum(context.lengths[bags]), places)
            outputs += largest.split([context.sizes[feature] for feature in features])
            first += len(rows)
        return outputs
