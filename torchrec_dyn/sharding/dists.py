"""The input dists of row-wise types, and the output dists of tables whose rows are spread.

TorchRec's bucketize op divides an id by a block size. Here the owner depends on the mixed id
(ranks/routing.py), so our op sorts the batch by owner; the ids are sent as they are.

The output dists sum partial bags over ranks. They fill two gaps of TorchRec's:

1. TorchRec's reduce-scatter cannot run backward on gloo if ranks have batches of different sizes. Then every
   rank sends its partial bags to the rank of their batch, which adds them up.
2. TorchRec's grid does not support a batch size per feature.

In a world of one rank ids and outputs stay where they are: TorchRec's dists would hand them to themselves, by
exchanges of a rank with itself. What the stages return are still awaitables: pipelines wait for them at their
own times, and join the exchanges of several collections.

Legend: B bags of a rank's batch, D columns of all features, F features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from inspect import ismethod
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.dist_data import (
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsAwaitable,
    PooledEmbeddingsReduceScatter,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, NoWait, QuantizedCommCodecs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_dyn import ops
from torchrec_dyn.modules import bags_of_samples
from torchrec_dyn.sharding.lookups import values_per_rank
from torchrec_dyn.sharding.sent_batch import SentBatch, sent_batch
from torchrec_dyn.storage import host_numbers


class OwnerInputDist(nn.Module):
    """Sends ids to their owners: among all ranks, or within the node that holds the table.

    `stock` is TorchRec's dist of the sharding type: what it sends by, and its order of ranks, are used.
    """

    def __init__(self, stock: Any, needs_positions: bool) -> None:
        super().__init__()
        self._ranks = getattr(stock, "_local_size", stock._world_size)
        self._places = getattr(stock, "_sf_staggered_shuffle", None)
        self._places_tensor = getattr(stock, "_sf_staggered_shuffle_tensor", None)
        self._needs_positions = needs_positions
        self._dist = stock._dist

    def forward(self, features: SentBatch) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Sorts the ids by owner and sends them."""
        by_owner, where = self._sorted(features)
        self.unbucketize_permute_tensor = where if self._needs_positions else None
        return self._send(by_owner, features)

    def _send(
        self, by_owner: KeyedJaggedTensor, features: SentBatch
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Sends a batch in the order of owners, with what travels beside `features`."""
        if self._places is not None:
            by_owner = by_owner.permute(self._places, self._places_tensor)
        # The pipelines replace the forward of `_dist`: nothing may follow it.
        return self._dist(sent_batch(by_owner, trains=features.trains, is_torn=features.is_torn))

    def _sorted(self, features: SentBatch) -> tuple[KeyedJaggedTensor, Tensor]:
        """Sorts N ids by owner, and checks their lengths where the sums of each owner are read."""
        try:
            by_owner, where = sorted_by_owner(features, self._ranks, self._needs_positions)
        except RuntimeError:
            features.length_per_key()  # raises the error of wrong lengths that names the collection
            raise
        try:
            by_owner._length_per_key = features.counts_by_rank(by_owner.lengths(), self._ranks)
        except ValueError:
            with suppress(RuntimeError):
                ops.raise_errors(features.values())  # the op's own report of these lengths
            raise
        return by_owner, where


def sorted_by_owner(
    features: KeyedJaggedTensor, ranks: int, positions: bool = False
) -> tuple[KeyedJaggedTensor, Tensor]:
    """Sorts N ids by owner: a batch of ranks * F features, and the position of each id there, [N] int64."""
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
    return by_owner, where


def remove_stale_forwards(input_dists: Iterable[nn.Module]) -> None:
    """Removes the forwards of an earlier plan, which a pipeline detached after a reshard puts here."""
    for input_dist in input_dists:
        sender: Any = getattr(input_dist, "_dist", input_dist)
        forward = vars(sender).get("forward")
        if ismethod(forward) and forward.__self__ is not sender:
            del sender.forward


class SumOverRanks(nn.Module):
    """Sums partial bags over ranks; codecs of quantized comms are those of TorchRec's reduce-scatter."""

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
        """Starts the sum of local_embs [sum of batch sizes, D]; one dimension if sizes vary by feature."""
        if batch_size_per_rank_per_feature is None or embedding_dims is None:
            if self._gloo_fails_at(input_splits, local_embs.device):
                return self._sum(local_embs, input_splits)
            return self._even(local_embs, input_splits=input_splits)
        sizes = values_per_rank(batch_size_per_rank_per_feature, embedding_dims)
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


def outputs_by_column(
    names: Sequence[str], shards: Sequence[ShardMetadata | None]
) -> dict[str, list[int]]:
    """Returns, for each name in order of first arrival, the positions of its outputs in column order.

    Column shards of width d on ranks [0, 1, 0] give outputs with first columns [0, 2d, d]; the result is [0,
    2, 1].
    """
    first_columns = [0 if shard is None else shard.shard_offsets[1] for shard in shards]
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    return {
        name: sorted(positions_of_name, key=lambda position: first_columns[position])
        for name, positions_of_name in positions.items()
    }


def mean_divisor(features: KeyedJaggedTensor, divided_by: Sequence[str | None]) -> Tensor:
    """Returns the divisor of outputs, [B, O] float32, at least 1: bag lengths of a feature each; None: 1."""
    keys = features.keys()
    position = {key: i for i, key in enumerate(keys)}
    divided = [i for i, name in enumerate(divided_by) if name is not None]
    names = [name for name in divided_by if name is not None]
    places = [position[name] for name in names]
    lengths, device = features.lengths(), features.device()
    if features.variable_stride_per_key():
        firsts = list(accumulate(features.stride_per_key(), initial=0))
        bags = bags_of_samples(features.inverse_indices(), names)
        first_bags = _sent([firsts[i] for i in places], device)
        chosen = lengths[bags + first_bags.unsqueeze(1)]
    else:
        feature_lengths = lengths.view(len(keys), features.stride())
        chosen = feature_lengths.index_select(0, _sent(places, device))
    divisor = torch.ones(len(divided_by), chosen.shape[1], dtype=torch.float32, device=device)
    divisor[_sent(divided, device)] = chosen.clamp(min=1).float()
    return divisor.t().contiguous()


def _sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Returns numbers as a tensor on a device, without a wait of the host for it."""
    return host_numbers(numbers).to(device, non_blocking=True)


def divide(pooled: KeyedTensor, divisor: Tensor) -> KeyedTensor:
    """Divides sums [B, D] by the divisor [B, O] of each output; a callback of TorchRec's awaitable."""
    values, widths = pooled.values(), pooled.length_per_key()
    if len(set(widths)) == 1:  # without a matrix as large as the outputs
        means = (values.unflatten(1, (len(widths), widths[0])) / divisor.unsqueeze(2)).flatten(1)
    else:
        repeats = _sent(widths, values.device)
        means = values / divisor.repeat_interleave(repeats, dim=1, output_size=sum(widths))
    return KeyedTensor(
        keys=pooled.keys(), length_per_key=widths, values=means.to(values.dtype), key_dim=1
    )


# A world of one rank.

_Value = TypeVar("_Value")


class Here(NoWait[_Value]):
    """An awaitable of a value that is here already."""

    def wait(self) -> _Value:
        """Returns the value after the callbacks, without TorchRec's entry in a profile."""
        value = self._obj
        for callback in self._callbacks:
            value = callback(value)
        return value


class ArrivedIds(Here[Here[KJTList]], KJTListSplitsAwaitable[Any]):
    """The ids of each sharding type, as if they had been sent. Pipelines take its `awaitables`."""

    _obj: Here[KJTList]

    def __init__(self, parts: list[KeyedJaggedTensor], ctx: Any) -> None:
        KJTListSplitsAwaitable.__init__(self, [Here(Here(part)) for part in parts], ctx)
        self._obj = Here(KJTList(parts))


class StayingOutput(nn.Module):
    """The output dist of one rank, in place of TorchRec's `stock`, which puts column shards in order."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self._stitch = list(getattr(stock, "_callbacks", None) or [])

    def forward(
        self, output: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Here[Tensor]:
        """Returns the output; TorchRec stitches that of a batch with a size per feature."""
        if sharding_ctx is None or not sharding_ctx.variable_batch_per_feature:
            for callback in self._stitch:
                output = callback(output)
        return Here(output)
