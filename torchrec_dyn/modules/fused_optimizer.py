"""The optimizer that TorchRec sees: its learning rates and its saved state. Backward updates the rows.

KeyedOptimizer calls `state_dict()` or `load_state_dict(...)` of the entries of a table one by one, in the
same order on all ranks. In a save the first entry exports the tensors of all entries, of a sharded collection
those of all tables: ranks then agree once, not once a table. In a load the last entry of a table loads all.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from torch import Tensor
from torchrec.optim.fused import FusedOptimizer

from torchrec_dyn.checkpoint_format import OPTIMIZER_CHECKSUM
from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.lookup import TableGroup
from torchrec_dyn.optimizers import RowOptimizer


class LearningRateGroup(dict[str, Any]):
    """A parameter group that writes its `lr` to the tables as soon as it is set."""

    def __init__(self, params: Sequence[Tensor], learning_rate: float) -> None:
        super().__init__(params=list(params), lr=learning_rate)
        self.groups: list[TableGroup] = []

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "lr":
            self.push()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has no tables: only the optimizer of the tables may set their learning rate. A copied
        # optimizer gives its copied group the copied tables.
        return LearningRateGroup, ([], 0.0), None, None, iter(self.items())

    def deferring(self) -> list[TableGroup]:
        """Returns the table groups whose updates are deferred."""
        # Other groups are not asked: their locks cost a thirtieth of a small step.
        return [group for group in self.groups if group.deferred is not None]

    def push(self) -> None:
        """Writes `lr` to the tables. Needed after a tensor `lr` was changed in place."""
        for group in self.groups:
            group.learning_rate = float(self["lr"])


class TablesOptimizer(FusedOptimizer):
    """The learning rates of tables, with a parameter group for each distinct row optimizer, and their state.

    `tables` has placeholder, row optimizer and entries of state of each table, by the key of the placeholder.
    `rates` are learning rates that schedulers have set before. `lookup` is the `UnshardedLookup` of the
    tables; None if they are sharded.
    """

    def __init__(
        self,
        tables: Mapping[str, tuple[Tensor, RowOptimizer, Mapping[str, SavedState]]],
        rates: Mapping[RowOptimizer, float] | None = None,
        lookup: Any = None,
    ) -> None:
        # The lookup holds this optimizer: a cycle would keep the rows of a deleted collection.
        self._lookup = None if lookup is None else weakref.ref(lookup)
        members: dict[RowOptimizer, list[Tensor]] = {}
        for param, optimizer, _ in tables.values():
            members.setdefault(optimizer, []).append(param)
        self.rates = {
            optimizer: LearningRateGroup(
                params, (rates or {}).get(optimizer, optimizer.learning_rate)
            )
            for optimizer, params in members.items()
        }
        params = {key: param for key, (param, _, _) in tables.items()}
        state = {param: dict(states) for param, _, states in tables.values()}
        super().__init__(params, state, list(self.rates.values()))

    def drive(self, groups: Sequence[TableGroup]) -> None:
        """Sets `lr` of each parameter group as the learning rate of its tables, now and after each change."""
        for optimizer, rates in self.rates.items():
            rates.groups = [group for group in groups if group.tables[0].optimizer == optimizer]
            rates.push()

    def step(self, closure: Any = None) -> None:
        """Writes the learning rates and the deferred updates; other rows were updated in backward.

        Raises:
            RuntimeError: the tables were loaded, converted, moved or given another optimizer since a
                deferred update.
            Exception: any error of a rule in Python. The other tables are written, whatever the error.
        """
        faults: list[Exception] = []
        for rates in self.rates.values():
            rates.push()
            for group in rates.deferring():
                try:
                    group.write_updates()
                except Exception as fault:
                    faults.append(fault)
        if faults:
            raise faults[0]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Writes the learning rates to the tables, and drops deferred updates."""
        for rates in self.rates.values():
            rates.push()
            for group in rates.deferring():
                group.drop_updates()
        for param in self.params.values():
            param.grad = None  # of `init_state`: on the meta device, where no norm can be read

    @abstractmethod
    def __reduce__(self) -> tuple[Any, ...]:
        """Copies the optimizer with its tables, or raises ValueError."""


class DynamicOptimizer(TablesOptimizer):
    """The optimizer of an unsharded collection, or of a kernel.

    A copy is the optimizer of the tables that are copied with it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        lookup = None if self._lookup is None else self._lookup()
        if lookup is None or lookup.fused_optimizer is not self:
            raise ValueError(
                f"{type(self).__name__}: expected the present optimizer of an unsharded collection in a copy "
                "or a pickle, got one of before the tables were given another optimizer. Read "
                "`fused_optimizer` of the collection again, and keep this one instead."
            )
        # These very objects, because TorchRec's wrappers hold them, too, and add to them: then the wrapper's
        # copy holds those of the copied optimizer.
        names = ("defaults", "params", "state", "param_groups", "rates")
        return _optimizer_of, (lookup,), {key: getattr(self, key) for key in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = [group for rates in self.rates.values() for group in rates.groups]
        self.__dict__.update(state)
        self.drive(groups)


def _optimizer_of(lookup: Any) -> DynamicOptimizer:
    """Returns the optimizer of a copied lookup."""
    optimizer: DynamicOptimizer = lookup.fused_optimizer
    return optimizer


@dataclass(eq=False)
class SavedState:
    """A state tensor of a table, in the canonical order of its rows. Collective if it is sharded.

    `save` returns the tensors of all entries by key, `load` gets those of the table by name. `exported` and
    `given` hold the tensors that the other entries were not asked for yet.
    """

    table: str
    name: str
    save: Callable[[], Mapping[str, Tensor]]
    load: Callable[[dict[str, Tensor]], None]
    exported: dict[tuple[int, str], Tensor]
    given: dict[str, Tensor | None]

    @not_compiled
    def state_dict(self) -> Tensor:
        """Returns the tensor."""
        thread = get_ident()
        own = thread, f"{self.table}.{self.name}"
        if own not in self.exported:
            self.exported.update({(thread, key): saved for key, saved in self.save().items()})
        return self.exported.pop(own)

    def load_state_dict(self, saved: Tensor) -> None:
        """Stores the tensor; the call for the last tensor of the table loads all."""
        self.given[self.name] = saved
        given = {name: tensor for name, tensor in self.given.items() if tensor is not None}
        if len(given) == len(self.given):
            self.given.update(dict.fromkeys(given))
            self.load(given)


def saved_states(
    table: str,
    optimizer: RowOptimizer,
    save: Callable[[], Mapping[str, Tensor]],
    load: Callable[[dict[str, Tensor]], None],
    exported: dict[tuple[int, str], Tensor],
) -> dict[str, SavedState]:
    """Returns the entries of one table, keyed "{table}.momentum1" as TorchRec does."""
    names = ("optimizer_config", *optimizer.state_names, "step", OPTIMIZER_CHECKSUM)
    given: dict[str, Tensor | None] = dict.fromkeys(names)
    return {
        f"{table}.{name}": SavedState(table, name, save, load, exported, given) for name in names
    }
