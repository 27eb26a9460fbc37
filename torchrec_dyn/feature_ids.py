"""What a collection reads from a KeyedJaggedTensor: the ids of chosen features, in a chosen order.

Letters: F features read, B bags of a feature, N ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class FeatureIds:
    """The ids of some features, one feature after the other.

    Attributes:
        ids: [N] int64.
        lengths: [sum of batch_sizes], ids per bag.
        weights: [N] float, of weighted bags.
        batch_sizes: [F], bags per feature.
        counts: [F], ids per feature.
    """

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None
    batch_sizes: list[int]
    counts: list[int]

    def offsets(self) -> Tensor:
        """Gives where each bag starts and the last one ends, [sum of batch_sizes + 1] int64."""
        offsets = torch.zeros(
            self.lengths.numel() + 1, dtype=torch.int64, device=self.lengths.device
        )
        torch.cumsum(self.lengths, 0, out=offsets[1:])
        return offsets

    def feature_offsets(self) -> Tensor:
        """Gives where each feature starts and the last one ends, [F + 1] int64."""
        return torch.tensor([0, *itertools.accumulate(self.counts)], device=self.ids.device)

    def select(self, positions: Sequence[int]) -> FeatureIds:
        """Picks features by position; a feature may be picked several times."""
        if list(positions) == list(range(len(self.counts))):
            return self
        ids = torch.split(self.ids, self.counts)
        lengths = torch.split(self.lengths, self.batch_sizes)
        weights = None if self.weights is None else torch.split(self.weights, self.counts)
        return FeatureIds(
            ids=torch.cat([ids[i] for i in positions]),
            lengths=torch.cat([lengths[i] for i in positions]),
            weights=None if weights is None else torch.cat([weights[i] for i in positions]),
            batch_sizes=[self.batch_sizes[i] for i in positions],
            counts=[self.counts[i] for i in positions],
        )


def read_features(
    features: KeyedJaggedTensor,
    feature_names: Sequence[Sequence[str]],
    weighted: bool,
    where: Sequence[str],
) -> FeatureIds:
    """Reads the features of a collection's tables, in table order, checking them first.

    Args:
        features: as the user passed it; further features and another order of keys are fine.
        feature_names: the features of each table; a feature may stand in several tables.
        weighted: whether bags carry weights.
        where: each table, for messages.

    Raises:
        ValueError: if a feature is missing or the tensors do not fit each other.
    """
    index = {key: position for position, key in enumerate(features.keys())}
    for names, table in zip(feature_names, where, strict=True):
        for name in names:
            if name not in index:
                raise ValueError(
                    f"{table}: expected feature '{name}', got features {features.keys()}."
                )
    read = checked_features(features, weighted, where[0].partition("(")[0])
    return read.select([index[name] for names in feature_names for name in names])


def checked_features(features: KeyedJaggedTensor, weighted: bool, where: str) -> FeatureIds:
    """Reads all features in their order, checking that their tensors fit each other.

    Args:
        features: as the user passed it.
        weighted: whether bags carry weights.
        where: the collection, for messages.

    Raises:
        ValueError: if they do not fit.
    """
    ids, weights = features.values(), features.weights_or_none() if weighted else None
    if ids.dtype != torch.int64:
        raise ValueError(
            f"{where}: expected ids of dtype int64, got {ids.dtype}. Convert with ids.long()."
        )
    if weighted and weights is None:
        raise ValueError(
            f"{where}: expected weights for weighted bags, got none. "
            "Pass weights in the KeyedJaggedTensor, or make the collection with is_weighted=False."
        )
    if weights is not None and not weights.is_floating_point():
        raise ValueError(f"{where}: expected weights of a floating dtype, got {weights.dtype}.")
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(
            f"{where}: expected one weight per id, got {weights.numel()} for {ids.numel()} ids."
        )
    lengths, batch_sizes = features.lengths(), features.stride_per_key()
    if lengths.numel() != sum(batch_sizes):
        raise ValueError(
            f"{where}: expected {sum(batch_sizes)} lengths for {len(batch_sizes)} features "
            f"of {batch_sizes} bags, got {lengths.numel()}."
        )
    if lengths.numel() and len(set(batch_sizes)) == 1:
        counts = lengths.view(len(batch_sizes), -1).sum(1).tolist()
    else:
        counts = [int(part.sum()) for part in torch.split(lengths, batch_sizes)]
    if (lengths < 0).any() or sum(counts) != ids.numel():
        raise ValueError(
            f"{where}: expected lengths that are not negative and add up to the {ids.numel()} ids, "
            f"got a least of {int(lengths.min()) if lengths.numel() else 0} and a sum of "
            f"{sum(counts)}."
        )
    return FeatureIds(
        ids, lengths, None if weights is None else weights.float(), batch_sizes, counts
    )
