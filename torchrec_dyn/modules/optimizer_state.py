"""Entries of a KeyedOptimizer's state: the optimizer state of one table, sharded or not.

KeyedOptimizer calls `state_dict()` or `load_state_dict(...)` of the entries of a table one by one, in the
same order on all ranks. Nothing is exported before a save. In a save the first entry exports the tensors of
all entries, of a sharded collection those of all tables: ranks then agree once, not once a table. In a load
the last entry of a table loads the tensors of all entries of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor

from torchrec_dyn.checkpoint_format import OPTIMIZER_CHECKSUM
from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.modules.unsharded_table import UnshardedTable
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.state_dict import load_optimizer_state, save_optimizer_states
from torchrec_dyn.storage import turn_of


class SavedState:
    """A state tensor of a table, in the canonical order of its rows. Collective if it is sharded."""

    def __init__(
        self,
        table: str,
        name: str,
        save: Callable[[], Mapping[str, Tensor]],
        load: Callable[[dict[str, Tensor]], None],
        made: dict[tuple[int, str], Tensor],
        given: dict[str, Tensor | None],
    ) -> None:
        self._name = name
        self._key = f"{table}.{name}"
        self._save = save
        self._load = load
        self._made = made
        self._given = given

    @not_compiled
    def state_dict(self) -> Tensor:
        """Returns the tensor."""
        thread = get_ident()
        saved = self._made.pop((thread, self._key), None)
        if saved is None:
            made = {(thread, key): tensor for key, tensor in self._save().items()}
            # Without this tensor: what an interrupt leaves here is then made anew by the next state dict.
            saved = made.pop((thread, self._key))
            self._made.update(made)
        return saved

    def load_state_dict(self, saved: Tensor) -> None:
        """Stores the tensor; the call for the last tensor of the table loads all."""
        self._given[self._name] = saved
        given = {name: tensor for name, tensor in self._given.items() if tensor is not None}
        if len(given) == len(self._given):
            self._given.update(dict.fromkeys(given))
            self._load(given)


def saved_states(
    table: str,
    optimizer: RowOptimizer,
    save: Callable[[], Mapping[str, Tensor]],
    load: Callable[[dict[str, Tensor]], None],
    made: dict[tuple[int, str], Tensor],
) -> dict[str, SavedState]:
    """Returns the entries of one table, keyed "{table}.momentum1" as TorchRec does."""
    names = ("optimizer_config", *optimizer.state_names, "step", OPTIMIZER_CHECKSUM)
    given: dict[str, Tensor | None] = dict.fromkeys(names)
    return {f"{table}.{name}": SavedState(table, name, save, load, made, given) for name in names}


def unsharded_states(table: UnshardedTable) -> dict[str, SavedState]:
    """Returns the entries of an unsharded table."""
    # No closures: wrappers of TorchRec pickle the entries with their tables.
    save, load = partial(_save, table), partial(_load, table)
    return saved_states(table.config.name, table.rows().optimizer, save, load, _Exported())


def _save(table: UnshardedTable) -> Mapping[str, Tensor]:
    with turn_of(table, also_torn=True):  # all tensors at one moment, or the places of a load
        one = table.as_table()
        return save_optimizer_states([one], f"{one.where}.state_dict")


def _load(table: UnshardedTable, saved: dict[str, Tensor]) -> None:
    with turn_of(table):
        load_optimizer_state(table.as_table(), saved)


class _Exported(dict[tuple[int, str], Tensor]):
    """Exported tensors not returned yet. A copy has none: another thread may be saving the original."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Exported, ()
