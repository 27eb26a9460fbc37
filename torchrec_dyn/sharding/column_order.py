"""Column-wise stitching: which output of the ranks is which column of a feature.

Outputs arrive ordered by rank. The shards of one feature may repeat ranks, be listed in
any order and have different widths, so the order of arrival says nothing of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence


def outputs_by_column(names: Sequence[str], first_columns: Sequence[int]) -> dict[str, list[int]]:
    """Orders the outputs of each name by the column they begin at.

    Shard ranks [0, 1, 0] of a feature give outputs of ranks [0, 0, 1], beginning at
    columns [0, 2d, d], and the answer [0, 2, 1].

    Args:
        names: output name of each arriving output.
        first_columns: column at which each arriving output begins.

    Returns:
        For each name, in order of first arrival, its positions in column order.
    """
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    return {
        name: sorted(found, key=lambda position: first_columns[position])
        for name, found in positions.items()
    }
