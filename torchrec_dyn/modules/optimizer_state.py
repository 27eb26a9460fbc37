"""Entries of a KeyedOptimizer's state: the optimizer state of one table, sharded or not.

KeyedOptimizer asks the entries of a table one by one, in one order on all ranks, for `state_dict()`, and
gives each result to `load_state_dict(...)`. So nothing is exported until somebody saves; the first entry
makes the tensors of all, and the last one loads all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from torchrec_dyn.checkpoint_format import numbers_of
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.modules.unsharded_table import LocalTable
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.state_dict import optimizer_state, optimizer_tensors


class _TableState:
    """The optimizer state of one table.

    Args:
        names: of its tensors.
        save: makes all tensors, by name.
        load: loads all tensors.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        save: Callable[[], Mapping[str, Tensor]],
        load: Callable[[dict[str, Tensor]], None],
    ) -> None:
        self._names = set(names)
        self._save = save
        self._load = load
        self._made: dict[str, Tensor] = {}
        self._loaded: dict[str, Tensor] = {}

    def make(self, name: str) -> Tensor:
        """Returns one tensor."""
        if name not in self._made:
            self._made = dict(self._save())
        return self._made.pop(name)

    def add(self, name: str, saved: Tensor) -> None:
        """Keeps one tensor until all are there, and then loads them."""
        self._loaded[name] = saved
        if self._loaded.keys() >= self._names:
            loaded, self._loaded = self._loaded, {}
            self._load(loaded)


class SavedState:
    """One state tensor of one table, in the canonical order of its rows. Collective if the table is sharded.

    Args:
        state: of the table.
        name: "momentum1", "momentum2", "step", "config", "checksum" or "cells".
    """

    def __init__(self, state: _TableState, name: str) -> None:
        self._state = state
        self._name = name

    def state_dict(self) -> Tensor:
        """Exports the tensor."""
        return self._state.make(self._name)

    def load_state_dict(self, saved: Tensor) -> None:
        """Replaces the tensor, together with the last tensor of the table.

        Raises:
            ValueError: if they do not fit the rows that the table has now; nothing has changed then.
        """
        self._state.add(self._name, saved)


def saved_states(
    table: str,
    optimizer: RowOptimizer,
    save: Callable[[], Mapping[str, Any]],
    load: Callable[[dict[str, Tensor]], None],
) -> dict[str, SavedState]:
    """Makes the entries of one table, keyed "{table}.momentum1" as TorchRec does.

    Args:
        table: its name.
        optimizer: of its rows.
        save: makes all tensors, by name.
        load: loads all tensors.
    """
    names = (*optimizer.state_names, "step", "config", "checksum", "cells")
    state = _TableState(names, save, load)
    return {f"{table}.{name}": SavedState(state, name) for name in names}


def unsharded_states(table: LocalTable) -> dict[str, SavedState]:
    """Makes the entries of an unsharded table."""
    optimizer = table.rows().optimizer
    return saved_states(table.config.name, optimizer, partial(_save, table), partial(_load, table))


def _save(table: LocalTable) -> dict[str, Tensor]:
    return optimizer_tensors(table.rows())


def _load(table: LocalTable, saved: Mapping[str, Tensor]) -> None:
    rows = table.rows()
    loaded = {name: numbers_of(tensor) for name, tensor in saved.items()}
    # Scores go on from the model's state dict; a step that is behind them would not fit.
    state = {**rows.export_state(), **optimizer_state(rows, loaded)}
    if rows.life is not None and rows.life.is_unscored:
        state = {name: tensor for name, tensor in state.items() if name not in BY_ROW}
    rows.load_state(state)
