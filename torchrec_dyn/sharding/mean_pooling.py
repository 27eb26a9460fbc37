"""Exact MEAN for tables whose rows are spread over ranks.

A rank that holds part of the rows cannot divide by the length of the bag. So the kernels sum, and the
outputs of MEAN tables with spread rows are divided here, after stitching. Other outputs are not divided.
(TorchRec 1.8.0 divides every output of the collection, and none under grid.)

Legend: B examples, F features, O outputs, D columns of all outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_dyn.modules import bags_of_samples
from torchrec_dyn.storage import host_numbers


class MeanDivisor:
    """Computes the divisor of each output of a collection.

    `features` [O] has for each output the feature whose bag lengths divide it; None: it is not divided.

    Attributes:
        is_needed: True if any output is divided.
    """

    def __init__(self, features: Sequence[str | None]) -> None:
        self._outputs = len(features)
        self._divided = [i for i, feature in enumerate(features) if feature is not None]
        self._features = [feature for feature in features if feature is not None]
        self.is_needed = bool(self._divided)

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns the divisor of a batch of B examples, [B, O] float32, at least 1."""
        keys = features.keys()
        position = {key: i for i, key in enumerate(keys)}
        places = [position[feature] for feature in self._features]
        lengths, device = features.lengths(), features.device()
        if features.variable_stride_per_key():
            firsts = list(accumulate(features.stride_per_key(), initial=0))
            bags = bags_of_samples(features.inverse_indices(), self._features)
            first_bags = _sent([firsts[i] for i in places], device)
            chosen = lengths[bags + first_bags.unsqueeze(1)]
        else:
            feature_lengths = lengths.view(len(keys), features.stride())
            chosen = feature_lengths.index_select(0, _sent(places, device))
        divisor = torch.ones(self._outputs, chosen.shape[1], dtype=torch.float32, device=device)
        divisor[_sent(self._divided, device)] = chosen.clamp(min=1).float()
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
        keys=pooled.keys(),
        length_per_key=widths,
        values=means.to(values.dtype),
        key_dim=1,
    )
