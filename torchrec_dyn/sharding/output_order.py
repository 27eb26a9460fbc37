"""The order of a sharded collection's outputs, which TorchRec takes from the plan, stays when tables move.

TorchRec lists outputs by sharding type; a dense layer over `KeyedTensor.values()` knows columns by place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor


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
