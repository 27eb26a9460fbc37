"""The optimizer that TorchRec sees. Rows are updated in backward; it holds their learning rate.

Unsharded collections and compute kernels use the same class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torchrec.optim.fused import FusedOptimizer

from torchrec_dyn.lookup import TableGroup


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
        """Makes `lr` the learning rate of these table groups from now on."""
        self._groups = tuple(groups)
        self.push()

    def push(self) -> None:
        """Writes `lr` to the tables; needed after a change in place of a tensor `lr`."""
        for group in self._groups:
            group.learning_rate = float(self["lr"])


class DynamicOptimizer(FusedOptimizer):
    """Drives the learning rate of dynamic tables from `param_groups[0]["lr"]`.

    Schedulers, WarmupOptimizer and plain assignment take effect at the next backward.

    Args:
        groups: the table groups whose rows this optimizer updates in backward.
        params: a placeholder on the meta device per table, [num_embeddings, columns],
            keyed "{table}.weight".
        learning_rate: the first learning rate.
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
        """Writes the learning rate to the tables; the rows were updated in backward."""
        self._rates.push()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Writes the learning rate to the tables; there are no gradients to clear."""
        self._rates.push()
