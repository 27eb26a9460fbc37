"""Pools single rows after the lookup, with an op that has gradients on any device.

Legend: N rows, B bags.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pooled_rows(rows: Tensor, lengths: Tensor, weights: Tensor | None, mean: bool) -> Tensor:
    """Returns the pooled rows of bags, [B, columns], as the pooled collections do; zeros for an empty bag.

    Sums are float32, and rounded once to the dtype of the rows.

    rows: [N, columns], bag after bag.
    lengths: [B], number of ids in each bag, checked: none is negative, and they add up to N.
    weights: [N], factor of each row, or None.
    """
    terms = rows.float() if weights is None else rows.float() * weights[:, None]
    if (
        lengths.numel() == 0
    ):  # empty, but in the graph: other ranks wait for the backward of this rank
        return terms.to(rows.dtype)
    # `unsafe`: torch does not check the lengths again. The host would wait for this check.
    pooled = torch.segment_reduce(terms, "sum", lengths=lengths, axis=0, unsafe=True)
    return (pooled / lengths.clamp(min=1)[:, None] if mean else pooled).to(rows.dtype)
