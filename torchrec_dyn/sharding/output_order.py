"""The order of a sharded collection's outputs, which TorchRec takes from the plan, stays when tables move.

TorchRec lists outputs by sharding type; a dense layer over `KeyedTensor.values()` knows columns by place.

Column-wise stitching: which output of the ranks is which column of a feature.

Outputs arrive ordered by rank. The shards of one feature may repeat ranks, be listed in
any order and have different widths, so the order of arrival says nothing of the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor


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


def pooled_in_order(pooled: KeyedTensor, names: Sequence[str]) -> KeyedTensor:
    """Puts pooled outputs into an order.

    Args:
        pooled: [B, D].
        names: its keys, in the order that they are to have.

    Returns:
        [B, D]; the same object where it has that order.
    """
    if pooled.keys() == names:
        return pooled
    widths = dict(zip(pooled.keys(), pooled.length_per_key(), strict=True))
    values = torch.cat([pooled[name] for name in names], dim=1)
    return KeyedTensor(list(names), [widths[name] for name in names], values)


def sequences_in_order(
    sequences: Mapping[str, JaggedTensor], names: Sequence[str]
) -> dict[str, JaggedTensor]:
    """Puts the outputs of sequences into an order.

    Args:
        sequences: by name.
        names: in the order that they are to have.
    """
    return {name: sequences[name] for name in names}
