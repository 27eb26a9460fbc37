"""Padding of batches that TorchRec's dists cannot send, and its removal from the outputs.

TorchRec cannot send a sequence batch without examples, nor pool one with a size per feature and without
examples. It pads a sequence batch with a size per feature, but restores the outputs by an op that has no
gradient on CPU. Here empty bags are appended to sequence batches, and the outputs are restored by ops that
have a gradient; a pooled batch is sent with one example, which is cut from the output.

Legend: F features, B examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_dyn.lookup import repeat_rows


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
    """Pads every feature of a checked batch to the number of bags of the largest feature, at least one.

    Returns it with the `Restoration` of its outputs; `features` and None if no padding is needed.
    """
    bags = features.stride_per_key()
    if not features.variable_stride_per_key() and min(bags, default=0) > 0:
        return features, None
    even = max([1, *bags])
    lengths = [
        torch.nn.functional.pad(feature_lengths, (0, even - feature_lengths.numel()))
        for feature_lengths in features.lengths().split(bags)
    ]
    inverse = features.inverse_indices_or_none()
    restoration = Restoration(
        dict(zip(features.keys(), bags, strict=True)),
        None if inverse is None else inverse[1],
        [] if inverse is None else inverse[0],
        feature_names,
    )
    padded = KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=torch.cat(lengths),
        stride=even,
    )
    return padded, restoration


def with_an_example(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Adds one example to a batch with a size per feature and no examples: the first bag of each feature."""
    bags = features.stride_per_key()
    lengths = [
        torch.nn.functional.pad(feature_lengths, (0, int(not feature_lengths.numel())))
        for feature_lengths in features.lengths().split(bags)
    ]
    names, inverse = features.inverse_indices()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=[[max(1, number)] for number in bags],
        length_per_key=features.length_per_key(),
        inverse_indices=(names, inverse.new_zeros(len(names), 1)),
    )


def without_examples(pooled: KeyedTensor) -> KeyedTensor:
    """Cuts the example of `with_an_example` from the outputs: [0, D].

    Their backward has no effect on rows, and takes part in that of the other ranks.
    """
    return KeyedTensor(pooled.keys(), pooled.length_per_key(), pooled.values()[:0])
