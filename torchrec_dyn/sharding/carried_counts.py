"""Counts of ids that travel where TorchRec's dists carry the weights of a batch.

Weights are float32, exact for integers up to 2**24 only. So a count travels as the 32 bits of an int32:
the dists copy, sort and send weights, but never reckon with them. (Small counts look like denormal floats,
large ones may look like NaN.)
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_IDS = 2**31 - 1  # of a batch, hence of any count


def as_weights(counts: Tensor) -> Tensor:
    """Disguises counts as weights.

    Args:
        counts: [N] int64 in [1, 2**31).

    Returns:
        [N] float32 of the same bits as int32 counts.
    """
    return counts.to(torch.int32).view(torch.float32)


def counts_of(weights: Tensor) -> Tensor:
    """Returns the counts that came as weights, [N] int64.

    Args:
        weights: [N] float32 of `as_weights`, in any order.
    """
    return weights.view(torch.int32).long()
