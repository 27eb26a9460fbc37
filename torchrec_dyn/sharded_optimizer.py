"""The optimizer of a sharded collection: all its tables on every rank, for saving and loading are collective.

TorchRec's holds the tables of one rank only. Learning rates are driven by the optimizers of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_dyn.agreement import done_together, told_together
from torchrec_dyn.aligned_state import AlignedState
from torchrec_dyn.content_sums import add_sums
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.saved_places import Share, runs_of, share_of
from torchrec_dyn.saved_tensor import SavedTensor
from torchrec_dyn.shard_optimizer_entry import SMALL, OptimizerEntry
from torchrec_dyn.shard_optimizer_source import OptimizerSource, Told
from torchrec_dyn.shard_pieces import ShardPieces

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

            told = told_together(pieces.group, f"{pieces.where}.state_dict", tell)
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
        entry = done_together(pieces.group, where, lambda: _entry(saved, pieces, self._optimizer))
        if entry is None:
            return
        if entry.session is not None:
            entry.session.verify(where)
        shares = told_together(pieces.group, where, lambda: _share(pieces))
        runs = runs_of([share for share in shares if share is not None], pieces.part)
        aligned = done_together(pieces.group, where, lambda: AlignedState(entry, runs))
        aligned.compare(add_sums(*told_together(pieces.group, where, aligned.check)))
        aligned.take_over()
        # Given again, it is the table's own.
        entry.source = OptimizerSource(pieces, self._optimizer, entry)


def _share(pieces: ShardPieces) -> Share | None:
    if pieces.part is None:
        return None
    return share_of(pieces.canonical(pieces.shards[0]), pieces.part, pieces.ranks)


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

    Args:
        local: TorchRec's, of the kernels on this rank.
        tables: name and row optimizer of every table of the collection, in order.
        holder: the name under which the unsharded collection holds its tables.
        pieces: gives what this rank holds of a table.
    """

    def __init__(
        self,
        local: KeyedOptimizer,
        tables: Sequence[tuple[str, RowOptimizer]],
        holder: str,
        pieces: Callable[[str], ShardPieces],
    ) -> None:
        here = dict(local.params)
        params: dict[str, Any] = {}
        state: dict[Any, dict[str, Any]] = {}
        for name, optimizer in tables:
            key = f"{holder}.{name}.weight"
            params[key] = here.get(key, torch.empty(0, device="meta"))
            table = _TableState(partial(pieces, name), optimizer)
            state[params[key]] = {f"{name}.{one}": _Saved(table, one) for one in table.names}
        self._local = local
        super().__init__(params, state, [])

    @property
    def param_groups(self) -> Collection[Mapping[str, Any]]:
        """The groups of this rank's kernels: their `lr` reaches the rows."""
        return self._local.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        pass  # KeyedOptimizer's constructor sets them; they are the kernels'

    def step(self, closure: Any = None) -> None:
        """Hands learning rates on; the rows were updated in backward."""
        self._local.step(closure)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Hands learning rates on; there are no gradients to clear."""
        self._local.zero_grad(set_to_none)
