"""Checks each batch of a sharded collection before it is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.lookup import no_scores, wrong_scores
from torchrec_dyn.modules import checked_features


class BatchCheck:
    """Checks batches and puts their features in the order of the first batch.

    TorchRec computes the positions of features from the first batch and uses them for all batches.

    Args:
        features: those that the collection reads.
        weighted: True if bags have weights.
        pooled: True if outputs are one row per example.
        where: the collection, for messages.
        scored: True if some table scores its ids by the weights of a batch (LowestScore).

    Attributes:
        needs_weights: True if a batch of weighted bags must have weights; False if feature processors
            compute them later.
    """

    def __init__(
        self,
        features: Sequence[str],
        weighted: bool,
        pooled: bool,
        where: str,
        scored: bool = False,
    ) -> None:
        self._features = list(dict.fromkeys(features))
        self._weighted = weighted
        self._scored = scored
        self.needs_weights = True
        self._pooled = pooled
        self.where = where
        self._first_keys: list[str] | None = None

    def __call__(
        self, features: KeyedJaggedTensor | TensorDict, training: bool = False
    ) -> KeyedJaggedTensor:
        """Returns the user's batch, which may have further features, in the first batch's order of keys.

        A batch for `training` has the weights by which some table scores its ids.

        Raises:
            ValueError: if a feature is missing, the tensors do not match each other, or weights require
                a gradient: TorchRec's all-to-all of ids and weights has no backward.
        """
        features = maybe_td_to_kjt(features, self._features)
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
        if self._weighted and has_weights and torch.is_grad_enabled():
            self._check_weights_need_no_gradient(features.weights())
        if self._scored:
            features = self._with_scores(features, training)
        varies = self._pooled and features.variable_stride_per_key()
        if varies and features.inverse_indices_or_none() is None:
            raise ValueError(
                f"{self.where}: expected inverse_indices where the number of bags varies by feature, "
                f"{features.stride_per_key()}, got none. Pass them in the KeyedJaggedTensor."
            )
        features = _sendable(features, read.ids)
        # TorchRec would add up the lengths again, and wait for a GPU.
        features._length_per_key = read.counts
        if is_usual:
            return features
        if self._first_keys is None:
            self._first_keys = list(keys)
            return features
        position = {key: i for i, key in enumerate(keys)}
        # A feature that no table reads may be missing. Then feature 0 fills its position, which is not read.
        return features.permute([position.get(key, 0) for key in self._first_keys])

    def _with_scores(self, features: KeyedJaggedTensor, training: bool) -> KeyedJaggedTensor:
        """Returns a batch with weights in float32 that require no gradient; checks them for training."""
        weights = features.weights_or_none()
        if weights is None:
            if training and self.needs_weights:
                raise no_scores(self.where)
            return features
        if training and self.needs_weights:
            wrong = int(((weights >= 0) & (weights < torch.inf)).logical_not().sum())
            if wrong:
                raise wrong_scores(self.where, wrong)
        if weights.dtype == torch.float32 and not weights.requires_grad:
            return features
        return _made(features, features.values(), weights.detach().float())

    def _check_weights_need_no_gradient(self, weights: Tensor) -> None:
        if weights.requires_grad:
            raise ValueError(
                f"{self.where}: expected weights that require no gradient, got requires_grad=True. "
                "TorchRec's all-to-all of ids and weights has no backward: detach the weights. To train "
                "feature processors, use DynamicFeatureProcessedEmbeddingBagCollectionSharder."
            )

    def _check_names(self, keys: Sequence[str]) -> None:
        for name in self._features:
            if name not in keys:
                raise ValueError(f"{self.where}: expected feature '{name}', got features {keys}.")


def _sendable(features: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    """Returns a batch with these ids, int64 on every rank: ranks must not send different dtypes.

    Its tensors are contiguous: some backends cannot send e.g. a column of a matrix.
    """
    parts = (ids, features.lengths(), features.weights_or_none())
    is_whole = all(part is None or part.is_contiguous() for part in parts)
    if is_whole and ids is features.values():
        return features
    return _made(features, ids, parts[2])


def _made(features: KeyedJaggedTensor, ids: Tensor, weights: Tensor | None) -> KeyedJaggedTensor:
    """Returns the bags of a batch with other ids and weights, contiguous."""
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=ids.contiguous(),
        weights=None if weights is None else weights.contiguous(),
        lengths=features.lengths().contiguous(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )
