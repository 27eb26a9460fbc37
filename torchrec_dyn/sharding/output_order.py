"""The order of a sharded collection's outputs: the columns of a feature, and the features.

*Columns.* The outputs of column shards arrive ordered by rank. The shards of one feature may repeat ranks,
be listed in any order and have different widths, so their order of arrival is not the order of the columns.

*Features.* TorchRec lists outputs by sharding type, so their order depends on the plan. But a dense layer
over `KeyedTensor.values()` depends on the position of each column. So the order of the first plan is kept
when tables move.

Legend: B examples, D columns of all outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor


def outputs_by_column(names: Sequence[str], first_columns: Sequence[int]) -> dict[str, list[int]]:
    """Returns, for each name in order of first arrival, the positions of its outputs in column order.

    `names` and `first_columns` are those of the outputs as they arrive. Example: column shards of width d on
    ranks [0, 1, 0] give outputs of ranks [0, 0, 1] with first columns [0, 2d, d]; the result is [0, 2, 1].
    """
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    return {
        name: sorted(positions_of_name, key=lambda position: first_columns[position])
        for name, positions_of_name in positions.items()
    }


def pooled_in_order(pooled: KeyedTensor, names: Sequence[str]) -> KeyedTensor:
    """Returns pooled outputs [B, D] in the order of `names`; `pooled` itself if it has that order."""
    if pooled.keys() == names:
        return pooled
    widths = dict(zip(pooled.keys(), pooled.length_per_key(), strict=True))
    values = torch.cat([pooled[name] for name in names], dim=1)
    return KeyedTensor(list(names), [widths[name] for name in names], values)


def sequences_in_order(
    sequences: Mapping[str, JaggedTensor], names: Sequence[str]
) -> dict[str, JaggedTensor]:
    """Puts sequence outputs in the order of `names`."""
    return {name: sequences[name] for name in names}
