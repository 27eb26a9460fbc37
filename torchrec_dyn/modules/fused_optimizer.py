"""The optimizer that TorchRec sees. It holds the learning rate; the rows are updated in backward.

Unsharded collections and compute kernels use the same class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torchrec.optim.fused import FusedOptimizer

from torchrec_dyn.lookup import TableGroup
from torchrec_dyn.modules.wrapper_checks import check_step


class LearningRateGroup(dict[str, Any]):
    """A parameter group that writes its `lr` to the tables as soon as it is set."""

    def __init__(self, params: Sequence[Tensor], learning_rate: float) -> None:
        super().__init__(params=list(params), lr=learning_rate)
        self._groups: tuple[TableGroup, ...] = ()

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "lr":
            self.push()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is plain data: only the optimizer of the tables may set their learning rate.
        return dict, (dict(self),)

    def drive(self, groups: Sequence[TableGroup]) -> None:
        """Sets `lr` as the learning rate of these table groups, now and after each change of `lr`."""
        self._groups = tuple(groups)
        self.push()

    def drop_updates(self) -> None:
        """Writes `lr` to the tables and forgets their deferred updates."""
        self.push()
        for group in self.deferring():
            group.drop_updates()

    def deferring(self) -> list[TableGroup]:
        """Returns the table groups whose updates are deferred."""
        # Other groups are not asked: their locks cost a thirtieth of a small step.
        return [group for group in self._groups if group.deferred is not None]

    def push(self) -> None:
        """Writes `lr` to the tables. Needed after a tensor `lr` was changed in place."""
        for group in self._groups:
            group.learning_rate = float(self["lr"])


def write_updates(rates: Iterable[LearningRateGroup]) -> None:
    """Writes learning rates and deferred updates to all tables.

    Raises:
        RuntimeError, ValueError: as `TableGroup.write_updates`, the first error, after the other groups have
            written.
    """
    faults: list[Exception] = []
    for one in rates:
        one.push()
        for group in one.deferring():
            try:
                group.write_updates()
            except (RuntimeError, ValueError) as fault:
                faults.append(fault)
    if faults:
        raise faults[0]


class DynamicOptimizer(FusedOptimizer):
    """Sets the learning rate of dynamic tables from `param_groups[0]["lr"]`.

    Schedulers, WarmupOptimizer and assignments take effect at the next backward.

    Args:
        groups: the table groups that this optimizer updates in backward.
        params: one placeholder per table on the meta device, [num_embeddings, columns],
            by "{table}.weight".
        learning_rate: the initial learning rate.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        params: Mapping[str, Tensor],
        learning_rate: float,
    ) -> None:
        group = LearningRateGroup(list(params.values()), learning_rate)
        super().__init__(dict(params), {param: {} for param in params.values()}, [group])
        self._rates = group
        group.drive(groups)

    def step(self, closure: Any = None) -> None:
        """Writes the learning rate and the deferred updates; other rows were updated in backward.

        Raises:
            ValueError: torch's GradScaler calls this method, which has scaled the gradients, or TorchRec's
                GradientClippingOptimizer, which does not clip rows.
            RuntimeError: the tables were loaded, converted, moved or given another optimizer since a
                deferred update.
        """
        check_step(type(self).__name__)
        write_updates([self._rates])

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Writes the learning rate to the tables, and drops deferred updates."""
        self._rates.drop_updates()
        for param in self.params.values():
            param.grad = None  # of `init_state`: on the meta device, where no norm can be read
