"""The optimizer state of a local table, as entries of a KeyedOptimizer's state.

KeyedOptimizer asks each entry for `state_dict()` and hands it to `load_state_dict(...)`: so nothing
is exported until somebody saves, and a table is loaded when all its entries have come.
"""

from __future__ import annotations

from torch import Tensor

from torchrec_dyn.checkpoint_format import numbers_of
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.modules.unsharded_table import LocalTable
from torchrec_dyn.state_dict import optimizer_state, optimizer_tensors


class _TableState:
    """The optimizer state of one table: its tensors are made together, and loaded together.

    Args:
        table: the table.
    """

    def __init__(self, table: LocalTable) -> None:
        self._table = table
        self._made: dict[str, Tensor] = {}
        self._came: dict[str, Tensor] = {}
        self.names = (*table.rows().optimizer.state_names, "step", "config", "checksum", "cells")

    def give(self, name: str) -> Tensor:
        """Gives one tensor; the first one that is asked for makes all."""
        if name not in self._made:
            self._made = optimizer_tensors(self._table.rows())
        return self._made.pop(name)

    def take(self, name: str, saved: Tensor) -> None:
        """Takes one tensor, and loads all when they have come."""
        self._came[name] = numbers_of(saved)
        if self._came.keys() >= set(self.names):
            came, self._came = self._came, {}
            rows = self._table.rows()
            # Scores go on from the model's state dict; a step that is behind them would not fit.
            state = {**rows.export_state(), **optimizer_state(rows, came)}
            if rows.life is not None and rows.life.is_unscored:
                state = {name: one for name, one in state.items() if name not in BY_ROW}
            rows.load_state(state)


class SavedState:
    """One state tensor of one table, in the canonical order of its rows.

    Args:
        state: of the table.
        name: a state of the optimizer, "step", "config", "checksum" or "cells".
    """

    def __init__(self, state: _TableState, name: str) -> None:
        self._state = state
        self._name = name

    def state_dict(self) -> Tensor:
        """Exports the tensor."""
        return self._state.give(self._name)

    def load_state_dict(self, saved: Tensor) -> None:
        """Puts a saved tensor in place of this one, with the last tensor of the table.

        Raises:
            ValueError: if they do not fit the rows that the table has now; nothing has changed then.
        """
        self._state.take(self._name, saved)


def saved_states(table: LocalTable) -> dict[str, SavedState]:
    """Gives one entry per state tensor of the table, keyed "{table}.momentum1" as TorchRec does."""
    state = _TableState(table)
    return {f"{table.config.name}.{name}": SavedState(state, name) for name in state.names}
