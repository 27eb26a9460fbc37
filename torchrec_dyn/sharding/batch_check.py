"""Checks each batch of a sharded collection before it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.lookup import no_scores, wrong_scores
from torchrec_dyn.modules import (
    FeatureIds,
    bags_of_samples,
    check_keyed,
    check_keys_once,
    checked_features,
    checked_inverse,
)

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
        features = maybe_td_to_kjt(features, self.features)
        check_keyed(features, self.where)
        keys = features.keys()
        is_usual = keys == self._first_keys
        if not is_usual:
            self._check_names(keys)
        has_weights = features.weights_or_none() is not None
        read = checked_features(
            features,
            self._weighted and (self.needs_weights or has_weights),
            self.where,
            self._scored,
        )
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
        if weights is None:
            if counted and training:
                raise no_scores(self.where)
            # In evaluation no scores are read, but another rank may have some.
            return torch.zeros_like(features.values(), dtype=torch.float32) if counted else None
        if not (self._weighted or self._scored):
            return None
        if self._weighted and torch.is_grad_enabled() and weights.requires_grad:
            raise ValueError(
                f"{self.where}: expected weights that require no gradient, got requires_grad=True. "
                "TorchRec's all-to-all of ids and weights has no backward: detach the weights. To train "
                "feature processors, use DynamicFeatureProcessedEmbeddingBagCollectionSharder."
            )
        if counted and training:
            wrong = int(((weights >= 0) & (weights < torch.inf)).logical_not().sum())
            if wrong:
                raise wrong_scores(self.where, wrong)
        return weights.detach().float()

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
) -> KeyedJaggedTensor:
    """Returns a batch with what was read of the user's, in the form that all ranks send.

    Tensors are contiguous: some backends cannot send e.g. a column of a matrix. Offsets and other numbers
    that a batch may keep beside its lengths are left behind: TorchRec would read them in some plans.
    """
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=read.ids.contiguous(),
        lengths=read.lengths.long().contiguous(),
        weights=None if weights is None else weights.contiguous(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=[[size] for size in read.batch_sizes] if varies else None,
        length_per_key=read.counts,  # else TorchRec adds up the lengths again, and waits for a GPU
        inverse_indices=inverse,
    )
