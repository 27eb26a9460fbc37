"""Converts row-wise optimizer state (one number per row and column shard) to other column cuts.

A shard on other cuts starts with the mean of the saved numbers over its columns. For row-wise Adagrad, whose
number is itself a mean over columns, the conversion from column shards to whole rows is exact.

Legend: M rows, C column shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor


def mean_over_cuts(state: Tensor, cuts: Sequence[int], columns: tuple[int, int]) -> Tensor:
    """Returns the mean of row-wise state over some columns, [M, 1], weighted by the widths of column shards.

    Args:
        state: [M, C], one number for each column shard.
        cuts: C + 1 numbers: the first column of each column shard, and the end of the last.
        columns: the first column and the column after the last.
    """
    begin, end = columns
    total = None
    for number, (first, last) in enumerate(pairwise(cuts)):
        width = min(last, end) - max(first, begin)
        if width == end - begin:
            return state[:, number : number + 1]  # the saved number, to the last bit
        if width > 0:
            part = state[:, number : number + 1].double() * (width / (end - begin))
            total = part if total is None else total + part
    assert total is not None
    return total.to(state.dtype)
