"""A batch before it is sent: checked, in a form that TorchRec's dists can send, and with each id once.

Padding: TorchRec cannot send a sequence batch without examples, nor pool one with a size per feature and
without examples. It pads a sequence batch with a size per feature, but restores the outputs by an op that
has no gradient on CPU. Here empty bags are appended to sequence batches, and the outputs are restored by ops
that have a gradient; a pooled batch is sent with one example, which is cut from the output.

Each id once: a rank sends each distinct id of a table once, for all features of the table together. Features
of different use (`FeatureUse`) are kept apart: the owner knows the use of an id by its feature. `Expansion`
repeats the rows that are sent back. In backward it sums the gradients of repeats in float32, in the order of
the batch; the owner then sums those of the ranks, in their order.

Legend: F features, B bags of each feature, or examples, P column shards (mostly whole tables), N ids, U ids
sent. A run of features of one table that have the same use, one after the other, is a table of its own in
`SendOnce`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn import ops
from torchrec_dyn.lookup import no_scores, repeat_rows, wrong_scores
from torchrec_dyn.modules import (
    FeatureIds,
    bags_of_samples,
    check_keyed,
    check_keys_once,
    checked_inverse,
    read_features,
)
from torchrec_dyn.sharding.sent_batch import SentBatch, as_weights, sent_batch

_InverseIndices: TypeAlias = tuple[list[str], Tensor]


class BatchCheck:
    """Checks batches and puts their features in the order of the first batch.

    TorchRec computes the positions of features from the first batch and uses them for all batches. `scored`
    is for LowestScore; `needs_weights` is False if feature processors compute the weights of weighted bags.
    """

    def __init__(
        self,
        features: Sequence[str],
        weighted: bool,
        pooled: bool,
        where: str,
        scored: bool = False,
    ) -> None:
        self.features = list(dict.fromkeys(features))
        self._weighted = weighted
        self._scored = scored
        self.needs_weights = True
        self._pooled = pooled
        self.where = where
        self._first_keys: list[str] | None = None

    def __call__(
        self, features: KeyedJaggedTensor | TensorDict, training: bool = False
    ) -> KeyedJaggedTensor:
        """Returns the user's batch, which may have further features, in the first batch's order of keys."""
        if not isinstance(features, KeyedJaggedTensor):
            features = maybe_td_to_kjt(features, self.features)
            check_keyed(features, self.where)
        keys = features.keys()
        is_usual = keys == self._first_keys
        if not is_usual:
            self._check_names(keys)
        has_weights = features.weights_or_none() is not None
        reads_weights = self._weighted and (self.needs_weights or has_weights)
        read = read_features(features, reads_weights, self.where, self._scored)
        inverse = self._inverse_indices(features)
        features = _sendable(features, read, self._sent_weights(features, training), inverse)
        if is_usual:
            return features
        if self._first_keys is None:
            self._first_keys = list(keys)
            return features
        position = {key: i for i, key in enumerate(keys)}
        # A feature that no table reads may be missing. Then feature 0 fills its position, which is not read.
        features = features.permute([position.get(key, 0) for key in self._first_keys])
        features._inverse_indices = inverse  # TorchRec drops them
        return features

    def _inverse_indices(self, features: KeyedJaggedTensor) -> _InverseIndices | None:
        """Returns the bag of each sample, for the collection's features in order if their bags vary."""
        given = features.inverse_indices_or_none()
        varies = features.variable_stride_per_key()
        if not self._pooled and (given is None or not varies):
            return given
        if given is not None or varies:
            given = checked_inverse(features, self.features, self.where)
        if given is None or given[0] == self.features:
            return given
        return self.features, bags_of_samples(given, self.features)

    def _sent_weights(self, features: KeyedJaggedTensor, training: bool) -> Tensor | None:
        """Returns the weights to send, [N] float32; None on every rank if the tables read none."""
        weights = features.weights_or_none()
        counted = self._scored and self.needs_weights
        if counted and training:
            self._check_scores(weights)
        if weights is None:
            # In evaluation no scores are read, but another rank may have some.
            return torch.zeros_like(features.values(), dtype=torch.float32) if counted else None
        if not (self._weighted or self._scored):
            return None
        has_gradient = torch.is_grad_enabled() and weights.requires_grad
        if self._weighted and has_gradient:
            raise ValueError(
                f"{self.where}: expected weights that require no gradient, got requires_grad=True. "
                "TorchRec's all-to-all of ids and weights has no backward: detach the weights. To train "
                "feature processors, use DynamicFeatureProcessedEmbeddingBagCollectionSharder."
            )
        return weights.detach().float()

    def _check_scores(self, weights: Tensor | None) -> None:
        if weights is None:
            raise no_scores(self.where)
        if wrong := int(((weights >= 0) & (weights < torch.inf)).logical_not().sum()):
            raise wrong_scores(self.where, wrong)

    def _check_names(self, keys: Sequence[str]) -> None:
        for name in self.features:
            if name not in keys:
                raise ValueError(f"{self.where}: expected feature '{name}', got features {keys}.")
        check_keys_once(keys, self.features, self.where)


def _sendable(
    features: KeyedJaggedTensor,
    read: FeatureIds,
    weights: Tensor | None,
    inverse: _InverseIndices | None,
) -> SentBatch:
    """Returns a batch with what was read of the user's, in the form that all ranks send."""
    # Contiguous, since some backends cannot send e.g. a column of a matrix. Offsets and other numbers that a
    # batch may keep beside its lengths are left behind: TorchRec would read them in some plans.
    varies, bags = features.variable_stride_per_key(), [[size] for size in read.batch_sizes]
    return sent_batch(
        features,
        read=read,
        _values=read.ids.contiguous(),
        _lengths=read.lengths.long().contiguous(),
        _weights=None if weights is None else weights.contiguous(),
        _offsets=None,
        _stride=None if varies else read.batch_sizes[0],
        _stride_per_key=read.batch_sizes,
        _stride_per_key_per_rank=torch.IntTensor(bags) if varies else None,
        _variable_stride_per_key=None,
        _length_per_key=None,
        _offset_per_key=None,
        _lengths_offset_per_key=None,
        _jt_dict=None,
        _inverse_indices=inverse,
    )


@dataclass(frozen=True)
class Restoration:
    """Turns the outputs of a padded batch into the outputs of the original batch.

    `bags` are those of each feature without the padding; `inverse` [F, B] the bag of each feature and
    example, if several share a bag, in the order of `features`. `feature_names` has the feature of each
    output.
    """

    bags: dict[str, int]
    inverse: Tensor | None
    features: list[str]
    feature_names: Mapping[str, str]

    def __call__(self, outputs: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Restores the outputs of a forward."""
        return {name: self._restored(self.feature_names[name], jt) for name, jt in outputs.items()}

    def _restored(self, feature: str, jagged: JaggedTensor) -> JaggedTensor:
        # Padding has no ids, so the values are already the batch's.
        lengths = jagged.lengths()[: self.bags[feature]]
        values, ids = jagged.values(), jagged.weights_or_none()
        if self.inverse is not None:
            bags = self.inverse[self.features.index(feature)]
            picked = _positions(lengths, bags)
            lengths, values = lengths[bags], repeat_rows(values, picked)
            ids = None if ids is None else ids[picked]
        return JaggedTensor(values=values, lengths=lengths, weights=ids)


def _positions(lengths: Tensor, bags: Tensor) -> Tensor:
    """Returns the positions of the ids of chosen bags [B], one bag after the other, int64; lengths [bags]."""
    lengths = lengths.long()
    begins = (lengths.cumsum(0) - lengths)[bags]
    chosen = lengths[bags]
    shift = begins - (chosen.cumsum(0) - chosen)
    return torch.arange(int(chosen.sum()), device=lengths.device) + shift.repeat_interleave(chosen)


def pad_batch(
    features: KeyedJaggedTensor, feature_names: Mapping[str, str]
) -> tuple[KeyedJaggedTensor, Restoration | None]:
    """Pads every feature to the bags of the largest, at least one; None: no padding was needed."""
    bags = features.stride_per_key()
    if not features.variable_stride_per_key() and min(bags, default=0) > 0:
        return features, None
    even = max([1, *bags])
    names, inverse = features.inverse_indices_or_none() or ([], None)
    by_feature = dict(zip(features.keys(), bags, strict=True))
    restoration = Restoration(by_feature, inverse, names, feature_names)
    return _padded(features, [even] * len(bags), stride=even), restoration


def _padded(features: KeyedJaggedTensor, bags: Sequence[int], **sizes: Any) -> KeyedJaggedTensor:
    """Returns a batch with empty bags behind those of each feature, to `bags` [F] in all."""
    lengths = features.lengths().split(features.stride_per_key())
    padded = [pad(part, (0, n - part.numel())) for part, n in zip(lengths, bags, strict=True)]
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=torch.cat(padded),
        length_per_key=features.length_per_key(),
        **sizes,
    )


def with_an_example(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Adds one example to a batch with a size per feature and no examples: the first bag of each feature."""
    bags = [max(1, number) for number in features.stride_per_key()]
    names, inverse = features.inverse_indices()
    return _padded(
        features,
        bags,
        stride_per_key_per_rank=[[number] for number in bags],
        inverse_indices=(names, inverse.new_zeros(len(names), 1)),
    )


def without_examples(pooled: KeyedTensor) -> KeyedTensor:
    """Cuts the example of `with_an_example` from the outputs, [0, D]: their backward stays collective."""
    return KeyedTensor(pooled.keys(), pooled.length_per_key(), pooled.values()[:0])


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
