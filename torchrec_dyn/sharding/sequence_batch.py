"""Padding of sequence batches that TorchRec's dists cannot send, and its removal from the outputs.

TorchRec cannot shape a batch without examples. It pads a batch with a size per feature, but restores the
outputs by an op that has no gradient on CPU. Here such batches get empty bags at their end, and the outputs
are cut and repeated by ops that have a gradient.

Legend: F features, B examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


@dataclass(frozen=True)
class Restoration:
    """Turns the outputs of a padded batch into those of the batch.

    Attributes:
        bags: bags per feature, without the padding.
        inverse: [F, B] the bag of each feature and example; None where bags are examples.
        features: the feature of each row of `inverse`.
    """

    bags: dict[str, int]
    inverse: Tensor | None
    features: list[str]

    def __call__(self, outputs: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Restores the outputs of a forward; their names are "feature" or "feature@table"."""
        return {name: self._restored(name.split("@")[0], jt) for name, jt in outputs.items()}

    def _restored(self, feature: str, jagged: JaggedTensor) -> JaggedTensor:
        # Padding has no ids and is last: the values need no cut.
        lengths = jagged.lengths()[: self.bags[feature]]
        values, ids = jagged.values(), jagged.weights_or_none()
        if self.inverse is not None:
            bags = self.inverse[self.features.index(feature)]
            picked = _positions(lengths, bags)
            lengths, values = lengths[bags], values.index_select(0, picked)
            ids = None if ids is None else ids[picked]
        return JaggedTensor(values=values, lengths=lengths, weights=ids)


def _positions(lengths: Tensor, bags: Tensor) -> Tensor:
    """Lists the positions of the ids of chosen bags, one bag after the other.

    Args:
        lengths: [bags] ids per bag.
        bags: [B] bags, repeats allowed.

    Returns:
        [ids of the chosen bags] int64.
    """
    lengths = lengths.long()
    begins = (lengths.cumsum(0) - lengths)[bags]
    chosen = lengths[bags]
    shift = begins - (chosen.cumsum(0) - chosen)
    return torch.arange(int(chosen.sum()), device=lengths.device) + shift.repeat_interleave(chosen)


def pad_batch(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Restoration | None]:
    """Pads every feature to the bags of the largest one, and to one bag at least.

    Args:
        features: a checked batch.

    Returns:
        The padded batch and what restores its outputs; the batch itself and None if it needs no padding.
    """
    bags = features.stride_per_key()
    if not features.variable_stride_per_key() and min(bags, default=0) > 0:
        return features, None
    even = max([1, *bags])
    lengths = [
        torch.nn.functional.pad(of_feature, (0, even - of_feature.numel()))
        for of_feature in features.lengths().split(bags)
    ]
    inverse = features.inverse_indices_or_none()
    restoration = Restoration(
        dict(zip(features.keys(), bags, strict=True)),
        None if inverse is None else inverse[1],
        [] if inverse is None else inverse[0],
    )
    padded = KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=torch.cat(lengths),
        stride=even,
    )
    return padded, restoration
