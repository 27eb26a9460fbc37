"""The optimizer of a sharded collection: all its tables on every rank, for saving and loading are collective.

TorchRec's holds the tables of one rank only. Learning rates are driven by the optimizers of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_dyn.checkpoint_format import SavedTensor
from torchrec_dyn.lookup import TableGroup
from torchrec_dyn.modules import LearningRateGroup
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks import gather_results, run_together
from torchrec_dyn.state_dict import (
    SMALL,
    OptimizerEntry,
    OptimizerSource,
    ShardPieces,
    Told,
    commit_state,
)

_NAMES = (*SMALL, "cells")


class _TableState:
    """The optimizer state of one table: its tensors are made together, and loaded together.

    KeyedOptimizer asks for them one by one, in one order on all ranks; the first makes all.

    Args:
        pieces: gives what this rank holds.
        optimizer: of the table.
    """

    def __init__(self, pieces: Callable[[], ShardPieces], optimizer: RowOptimizer) -> None:
        self._pieces = pieces
        self._optimizer = optimizer
        self._made: dict[str, SavedTensor] = {}
        self._came: dict[str, Tensor] = {}
        self.names = (*optimizer.state_names, *_NAMES)

    def give(self, name: str) -> Tensor:
        """Gives one tensor. Collective."""
        if name not in self._made:
            pieces = self._pieces()
            made: list[OptimizerEntry] = []

            def tell() -> Told | None:
                made.append(OptimizerEntry(pieces, self._optimizer))
                return made[0].source.tell()

            told = gather_results(pieces.group, f"{pieces.where}.state_dict", tell)
            self._made = made[0].source.tensors(told)
        return self._made.pop(name)

    def take(self, name: str, saved: Tensor) -> None:
        """Takes one tensor; loads all when they have come. Collective."""
        self._came[name] = saved
        if self._came.keys() >= set(self.names):
            came, self._came = self._came, {}
            self._load(came)

    def _load(self, saved: Mapping[str, Any]) -> None:
        pieces = self._pieces()
        where = f"{pieces.where}.load_state_dict"
        entry = run_together(pieces.group, where, lambda: _entry(saved, pieces, self._optimizer))
        if entry is None:
            return
        if entry.session is not None:
            entry.session.verify(where)
        commit_state(entry, where)
        # Given again, it is the table's own.
        entry.source = OptimizerSource(pieces, self._optimizer, entry)


def _entry(
    saved: Mapping[str, Any], pieces: ShardPieces, optimizer: RowOptimizer
) -> OptimizerEntry | None:
    """Gives an entry with all that was saved staged; None where these are the table's own tensors."""
    config = saved["config"]
    came = config.entry if isinstance(config, SavedTensor) else None
    if isinstance(came, OptimizerEntry):
        if came.staged is not None:
            came.check_is_for(pieces)
            return came
        if came.pieces.has_shards_of(pieces):
            if not came.is_left_out:
                came.source.check_unchanged()
            return None
    entry = OptimizerEntry(pieces, optimizer)
    entry.fill(saved)
    return entry


class _Saved:
    """One tensor of one table, as KeyedOptimizer takes it."""

    def __init__(self, state: _TableState, name: str) -> None:
        self._state = state
        self._name = name

    def state_dict(self) -> Tensor:
        """Gives the tensor. Collective."""
        return self._state.give(self._name)

    def load_state_dict(self, saved: Tensor) -> None:
        """Takes the tensor. Collective with the last one of a table."""
        self._state.take(self._name, saved)


class ShardedOptimizer(KeyedOptimizer):
    """Optimizer state and learning rates of the tables of a sharded collection.

    Every rank has one parameter group for each optimizer that the tables were given, whichever tables lie
    there: schedulers find the same groups on all ranks, and after tables have moved (resharding.py).

    Args:
        placeholders: of the tables on this rank, by key.
        tables: name and row optimizer of every table of the collection, in order.
        holder: the name under which the unsharded collection holds its tables.
        pieces: gives what this rank holds of a table.
    """

    def __init__(
        self,
        placeholders: Mapping[str, Any],
        tables: Sequence[tuple[str, RowOptimizer]],
        holder: str,
        pieces: Callable[[str], ShardPieces],
    ) -> None:
        params: dict[str, Any] = {}
        state: dict[Any, dict[str, Any]] = {}
        alike: dict[RowOptimizer, list[Tensor]] = {}
        for name, optimizer in tables:
            key = f"{holder}.{name}.weight"
            params[key] = placeholders.get(key, torch.empty(0, device="meta"))
            table = _TableState(partial(pieces, name), optimizer)
            state[params[key]] = {f"{name}.{one}": _Saved(table, one) for one in table.names}
            alike.setdefault(optimizer, []).append(params[key])
        self._rates = {
            optimizer: LearningRateGroup(its_params, optimizer.learning_rate)
            for optimizer, its_params in alike.items()
        }
        super().__init__(params, state, list(self._rates.values()))

    def drive(self, groups: Sequence[TableGroup]) -> None:
        """Makes `lr` of each parameter group the learning rate of its tables here, from now on.

        Args:
            groups: the table groups of this rank.
        """
        for optimizer, rates in self._rates.items():
            rates.drive([group for group in groups if group.tables[0].optimizer == optimizer])

    def step(self, closure: Any = None) -> None:
        """Hands learning rates on; the rows were updated in backward."""
        for rates in self._rates.values():
            rates.push()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Hands learning rates on; there are no gradients to clear."""
        self.step()
