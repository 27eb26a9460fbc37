"""The saved form of a table: its contents in canonical order, whatever their history.

Legend: R rows, D columns of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchrec_dyn.id_map import IdMap
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.row_store import RowStore


class NamedState(NamedTuple):
    """One optimizer state of a table.

    Attributes:
        name: FBGEMM's name of it.
        store: its rows.
        is_rowwise: whether a row has one number of it.
    """

    name: str
    store: RowStore
    is_rowwise: bool


def named_states(optimizer: RowOptimizer, stores: Sequence[RowStore]) -> list[NamedState]:
    """Names the stores of an optimizer's states."""
    named = zip(optimizer.state_names, stores, optimizer.state_is_rowwise, strict=True)
    return [NamedState(*one) for one in named]


def read_state(id_map: IdMap, weights: RowStore, states: Sequence[NamedState]) -> dict[str, Tensor]:
    """Copies the contents out in canonical order.

    Returns:
        "ids" [R] int64, "weight" [R, D] and each optimizer state, [R, D] or [R], float32.
    """
    ids, rows = id_map.contents()
    state = {"ids": ids, "weight": weights.read(rows)}
    for one in states:
        values = one.store.read(rows)
        state[one.name] = values.flatten() if one.is_rowwise else values
    return state
