"""Sequence batches in which a rank sends each id once, and the expansion of the received rows.

A rank sends each distinct id of a table once, for all features of the table together. Features of different
use (`FeatureUse`) are kept apart: the owner knows the use of an id by its feature. `Expansion` repeats the
rows that are sent back. In backward it sums the gradients of repeats in float32, in the order of the batch;
the owner then sums those of the ranks, in their order.

Counts, for tables with a life, are sent as the weights of the batch. Float32 is exact up to 2**24 only, so a
count is sent as the 32 bits of an int32: the dists copy, sort and send weights, but never compute with them.

Legend: F features, B bags of each feature, P column shards (mostly whole tables), N ids, U ids sent. A
run of features of one table that have the same use, one after the other, is a table of its own here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import ops
from torchrec_dyn.lookup import repeat_rows

_MOST_IDS = 2**31 - 1  # in a batch; a count is at most the number of ids


@dataclass(frozen=True)
class Expansion:
    """Repeats the row of an id for every occurrence, at places [N]; a callback of TorchRec's awaitable."""

    places: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """Expands [U, columns] rows to [N, columns]."""
        return repeat_rows(rows, self.places)


class SendOnce:
    """Finds the distinct ids of each table in the batches of one sharding type."""

    def __init__(self, tables: Sequence[tuple[Hashable, int]], counted: bool, where: str) -> None:
        names = [name for name, _ in tables]
        self._first_feature = list(accumulate((features for _, features in tables), initial=0))
        distinct = list(dict.fromkeys(names))
        self._table_of = [distinct.index(name) for name in names]
        self._shard_of = [names.index(name) for name in distinct]  # first shard of each table
        self._counted = counted
        self._where = where

    def __call__(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Expansion]:
        """Returns the batch to send, of F features of B > 0 bags each, and the expansion of its rows.

        The first feature of each column shard has all distinct ids of its table, in order of first
        occurrence.
        """
        if features.values().numel() > _MOST_IDS:
            raise ValueError(
                f"{self._where}: expected at most 2**31 - 1 ids in a batch, got "
                f"{features.values().numel()}. Make batches smaller, or set use_index_dedup=False."
            )
        ends = list(accumulate(features.length_per_key(), initial=0))
        sizes = [ends[after] - ends[first] for first, after in pairwise(self._first_feature)]
        ids, counts, table_sizes, places = self._distinct(features.values(), sizes)
        sent = [table_sizes[table] for table in self._table_of]
        begins = list(accumulate(sent, initial=0))
        if len(self._shard_of) < len(sent):
            ids = self._for_shards(ids, table_sizes)
            counts = self._for_shards(counts, table_sizes)
            first = list(accumulate(table_sizes, initial=0))
            parts = places.split([sizes[shard] for shard in self._shard_of])
            shards = enumerate(self._table_of)
            places = torch.cat([parts[t] + (begins[shard] - first[t]) for shard, t in shards])
        feature_sizes = [0] * len(features.keys())
        for feature, count in zip(self._first_feature, sent, strict=False):
            feature_sizes[feature] = count
        once = KeyedJaggedTensor(
            keys=features.keys(),
            values=ids,
            weights=as_weights(counts) if self._counted else None,
            lengths=self._lengths(features, feature_sizes),
            stride=features.stride(),
            length_per_key=feature_sizes,
        )
        return once, Expansion(places)

    def _distinct(
        self, ids: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor, list[int], Tensor]:
        """Finds the distinct ids of each table, once a table; ids [N] are by column shard, sizes [P] of each.

        Returns the ids and their occurrences [U], the sizes of the tables, and the place of each id, [N of
        tables].
        """
        if len(self._shard_of) < len(sizes):
            parts = ids.split(list(sizes))
            ids = torch.cat([parts[shard] for shard in self._shard_of])
        bounds = list(accumulate((sizes[shard] for shard in self._shard_of), initial=0))
        # The op lists the distinct ids without a row (-1). Here all ids get -1.
        distinct, counts, offsets, places = ops.collect_new(
            ids.contiguous(), torch.full_like(ids, -1), torch.tensor(bounds, device="cpu")
        )
        return distinct, counts, offsets.diff().tolist(), places

    def _for_shards(self, table_sizes: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = table_sizes.split(list(sizes))
        return torch.cat([parts[table] for table in self._table_of])

    def _lengths(self, features: KeyedJaggedTensor, counts: Sequence[int]) -> Tensor:
        """Returns the lengths of bags with counts [F] of ids spread evenly over each feature's bags."""
        batch, device = features.stride(), features.device()
        each = torch.tensor(counts, device="cpu").to(device, non_blocking=True).unsqueeze(1)
        spread = each // batch + (torch.arange(batch, device=device) < each % batch)
        return spread.to(features.lengths().dtype).flatten()


def as_weights(counts: Tensor) -> Tensor:
    """Returns counts [N] int64 in [1, 2**31) as weights: [N] float32 with the bits of int32 counts."""
    return counts.to(torch.int32).view(torch.float32)


def counts_of(weights: Tensor) -> Tensor:
    """Returns the counts [N] int64 of weights [N] float32 that `as_weights` made, in any order."""
    return weights.view(torch.int32).long()
