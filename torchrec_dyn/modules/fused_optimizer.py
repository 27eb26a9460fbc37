"""The optimizer that TorchRec sees. It holds the learning rate; the rows are updated in backward.

Unsharded collections and compute kernels use the same class.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torchrec.optim.fused import FusedOptimizer

from torchrec_dyn.lookup import TableGroup


class LearningRateGroup(dict[str, Any]):
    """A parameter group that writes its `lr` to the tables as soon as it is set."""

    def __init__(self, params: Sequence[Tensor], learning_rate: float) -> None:
        super().__init__(params=list(params), lr=learning_rate)
        self.groups: tuple[TableGroup, ...] = ()

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "lr":
            self.push()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has no tables: only the optimizer of the tables may set their learning rate. A copied
        # optimizer gives its copied group the copied tables.
        return LearningRateGroup, ([], 0.0), None, None, iter(self.items())

    def drive(self, groups: Sequence[TableGroup]) -> None:
        """Sets `lr` as the learning rate of these table groups, now and after each change of `lr`."""
        self.groups = tuple(groups)
        self.push()

    def drop_updates(self) -> None:
        """Writes `lr` to the tables and forgets their deferred updates."""
        self.push()
        for group in self.deferring():
            group.drop_updates()

    def deferring(self) -> list[TableGroup]:
        """Returns the table groups whose updates are deferred."""
        # Other groups are not asked: their locks cost a thirtieth of a small step.
        return [group for group in self.groups if group.deferred is not None]

    def push(self) -> None:
        """Writes `lr` to the tables. Needed after a tensor `lr` was changed in place."""
        for group in self.groups:
            group.learning_rate = float(self["lr"])


def write_updates(rates: Iterable[LearningRateGroup]) -> None:
    """Writes learning rates and deferred updates to all tables."""
    faults: list[Exception] = []
    for rate_group in rates:
        rate_group.push()
        for group in rate_group.deferring():
            try:
                group.write_updates()
            except Exception as fault:
                faults.append(fault)
    if faults:
        raise faults[0]


class Lookup(Protocol):
    """Protocol of the lookup of an unsharded collection, of which a copied optimizer is a part."""

    def optimizers(self) -> list[DynamicOptimizer]:
        """Returns the optimizers of the tables, one for each distinct row optimizer."""


class DynamicOptimizer(FusedOptimizer):
    """Sets the learning rate of dynamic tables from `param_groups[0]["lr"]`.

    Schedulers, WarmupOptimizer and assignments take effect at the next backward. A copy or a pickle has the
    tables with it, as one of torch's optimizers has its parameters: it is the optimizer of the copied tables.
    For a sharded collection, and if the tables have another optimizer since, it is a ValueError.

    `groups` are the table groups that this optimizer updates in backward, `params` one placeholder per table
    on the meta device, [num_embeddings, columns], by "{table}.weight". `lookup` is that of an unsharded
    collection; None if the tables are sharded.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        params: Mapping[str, Tensor],
        learning_rate: float,
        lookup: Lookup | None = None,
    ) -> None:
        group = LearningRateGroup(list(params.values()), learning_rate)
        super().__init__(dict(params), {param: {} for param in params.values()}, [group])
        self._rates = group
        # The lookup holds this optimizer: a cycle would keep the rows of a collection that nobody holds.
        self._lookup = None if lookup is None else weakref.ref(lookup)
        group.drive(groups)

    def step(self, closure: Any = None) -> None:
        """Writes the learning rate and the deferred updates; other rows were updated in backward.

        Raises:
            RuntimeError: the tables were loaded, converted, moved or given another optimizer since a
                deferred update.
            Exception: any error of a rule in Python. The other tables are written, whatever the error.
        """
        write_updates([self._rates])

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Writes the learning rate to the tables, and drops deferred updates."""
        self._rates.drop_updates()
        for param in self.params.values():
            param.grad = None  # of `init_state`: on the meta device, where no norm can be read

    # Copies.

    def __reduce__(self) -> tuple[Any, ...]:
        name = type(self).__name__
        if self._lookup is None:
            raise sharded_copy_error(name)
        lookup = self._lookup()
        present = [] if lookup is None else lookup.optimizers()
        number = next((i for i, other in enumerate(present) if other is self), None)
        if number is None:
            raise ValueError(
                f"{_copy_rule(name)}, got one of before the tables were given another optimizer. Read "
                "`fused_optimizer` of the collection again, and keep this one instead."
            )
        # These very objects, because TorchRec's wrappers hold them, too, and add to them: then the wrapper's
        # copy holds those of the copied optimizer.
        names = ("defaults", "params", "state", "param_groups", "_rates")
        return _optimizer_of, (lookup, number), {key: getattr(self, key) for key in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = self._rates.groups
        self.__dict__.update(state)
        self._rates.drive(groups)


def _optimizer_of(lookup: Lookup, number: int) -> DynamicOptimizer:
    """Returns an optimizer of a copied lookup, by its number."""
    return lookup.optimizers()[number]


def sharded_copy_error(name: str) -> ValueError:
    """Returns the error for a copy of the optimizer of a sharded collection, of the class `name`."""
    return ValueError(
        f"{_copy_rule(name)}, got one of a sharded collection: its rows are on several ranks. Save state "
        "dicts with torch.distributed.checkpoint."
    )


def _copy_rule(name: str) -> str:
    return (
        f"{name}: expected the present optimizer of an unsharded collection in a copy or a pickle"
    )
