"""Converts row-wise optimizer state (one number per row and column shard) to other column cuts.

A shard on other cuts starts with the mean of the saved numbers over its columns: exact for row-wise Adagrad
from columns to the whole row, where the number is a mean over columns itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor


def mean_over_cuts(state: Tensor, cuts: Sequence[int], columns: tuple[int, int]) -> Tensor:
    """Returns the mean of row-wise state over some columns, each number weighted by the columns it is for.

    Args:
        state: [M, C], one number for each of C column shards.
        cuts: C + 1 numbers: where each column shard begins, and the end of the last.
        columns: the first column and the one after the last.

    Returns:
        [M, 1].
    """
    begin, end = columns
    total = None
    for number, (first, last) in enumerate(pairwise(cuts)):
        width = min(last, end) - max(first, begin)
        if width == end - begin:
            return state[:, number : number + 1]  # the same number, to the last bit
        if width > 0:
            part = state[:, number : number + 1].double() * (width / (end - begin))
            total = part if total is None else total + part
    assert total is not None
    return total.to(state.dtype)
