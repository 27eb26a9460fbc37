"""The optimizer of a sharded collection: it has all tables on every rank.

Saving and loading are collective, so every rank needs the entries of all tables. TorchRec's optimizer has the
tables of one rank only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_dyn.lookup import TableGroup
from torchrec_dyn.modules import (
    LearningRateGroup,
    saved_states,
    sharded_copy_error,
    write_updates,
)
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict import load_optimizer_state, save_optimizer_states


class ShardedOptimizer(KeyedOptimizer):
    """Optimizer state and learning rates of the tables of a sharded collection.

    Every rank has one parameter group for each distinct row optimizer of the collection, also if it has none
    of the tables. So schedulers find the same groups on all ranks, also after tables have moved
    (resharding.py).

    It is not copied or pickled: that is a ValueError.

    `placeholders` are the parameters of the tables on this rank, by key; `tables` are all tables of the
    collection, in order. `holder` is the attribute of the unsharded collection that holds the tables, and
    `where` is the collection, for messages.
    """

    def __init__(
        self,
        placeholders: Mapping[str, Any],
        tables: Sequence[tuple[str, RowOptimizer]],
        holder: str,
        table_of: Callable[[str], Table],
        where: str,
    ) -> None:
        params: dict[str, Any] = {}
        state: dict[Any, dict[str, Any]] = {}
        by_optimizer: dict[RowOptimizer, list[Tensor]] = {}
        save = partial(_save, table_of, [name for name, _ in tables], f"{where}.fused_optimizer")
        made: dict[tuple[int, str], Tensor] = {}
        for name, optimizer in tables:
            key = f"{holder}.{name}.weight"
            params[key] = placeholders.get(key, torch.empty(0, device="meta"))
            load = partial(_load, table_of, name)
            state[params[key]] = saved_states(name, optimizer, save, load, made)
            by_optimizer.setdefault(optimizer, []).append(params[key])
        self._rates = {
            optimizer: LearningRateGroup(members, optimizer.learning_rate)
            for optimizer, members in by_optimizer.items()
        }
        super().__init__(params, state, list(self._rates.values()))

    def drive(self, groups: Sequence[TableGroup]) -> None:
        """Sets `lr` of each parameter group as the learning rate of its tables, now and after each change."""
        for optimizer, rates in self._rates.items():
            rates.drive([group for group in groups if group.tables[0].optimizer == optimizer])

    def step(self, closure: Any = None) -> None:
        """Writes learning rates and deferred updates; other rows were updated in backward."""
        write_updates(self._rates.values())

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Writes learning rates to the tables, and drops deferred updates."""
        for rates in self._rates.values():
            rates.drop_updates()

    def __reduce__(self) -> tuple[Any, ...]:
        raise sharded_copy_error(type(self).__name__)


def _save(
    table_of: Callable[[str], Table], names: Sequence[str], where: str
) -> Mapping[str, Tensor]:
    return save_optimizer_states([table_of(name) for name in names], f"{where}.state_dict")


def _load(table_of: Callable[[str], Table], name: str, saved: Mapping[str, Any]) -> None:
    load_optimizer_state(table_of(name), saved)
