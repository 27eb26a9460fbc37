"""RowRule: a custom update rule, in Python, for `fused_params["optimizer"]`.

Sources of the examples: Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023 (Lion);
You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017 (LARS).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class RuleState:
    """An optimizer state of a `RowRule`.

    Attributes:
        rowwise: True for one number per row, False for one number per column.
        initial: the number in a new row.
    """

    rowwise: bool = False
    initial: float = 0.0


class ByValue:
    """Equal objects have the same class and attributes, which are plain numbers."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(vars(self)))))

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({numbers})"


class RowRule(ByValue, ABC):
    """An update rule of rows in Python. Subclass it, and pass an object as `fused_params["optimizer"]`.

    A checkpoint contains the names of the rule and of its states, never the class; loading it into a model
    with another rule is an error. Two objects are the same rule if their classes and attributes are equal;
    attributes are plain numbers.

    Attributes:
        name: name of the rule in checkpoints and messages.
        states: at most two optimizer states, by name.
    """

    name: ClassVar[str] = ""
    states: ClassVar[Mapping[str, RuleState]] = {}

    @abstractmethod
    def update(
        self,
        rows: Tensor,
        grads: Tensor,
        states: Mapping[str, Tensor],
        learning_rate: float,
        step: int,
    ) -> None:
        """Updates rows and states in place, without autograd.

        It is called once per step for each table, or column shard of a table, whose rows have gradients. Each
        rank runs it for its own rows, so it must not communicate. A rule that treats each element alike gives
        the same bits under every plan; a rule that uses whole rows sees only the columns of its column shard.

        Args:
            rows: [M, columns] float32, the distinct rows of the step, in no particular order.
            grads: [M, columns] float32, the sum of each row's gradients.
            states: [M, columns] float32, or [M, 1] for a row-wise state, by name.
            learning_rate: the present learning rate.
            step: number of training steps of the table, starting at 1.
        """


class Lion(RowRule):
    """Lion: the sign of a momentum, with decoupled weight decay. Needs a tenth of Adam's learning rate.

    For a row w with gradient g, momentum m, which begins with 0, learning rate lr and weight decay wd:

        w <- (1 - lr wd) w - lr sign(beta1 m + (1 - beta1) g)
        m <- beta2 m + (1 - beta2) g

    `fused_params` may name it "LION", with its arguments as keys beside `learning_rate`.

    Source: Chen et al., "Symbolic discovery of optimization algorithms", algorithm 2.

    Args:
        beta1: weight of the momentum in the direction of an update, in [0, 1).
        beta2: weight of the old momentum in the new one, in [0, 1).
        weight_decay: wd.
    """

    name = "lion"
    states: ClassVar[Mapping[str, RuleState]] = {"momentum": RuleState()}

    def __init__(self, beta1: float = 0.9, beta2: float = 0.99, weight_decay: float = 0.0) -> None:
        self.beta1, self.beta2, self.weight_decay = beta1, beta2, weight_decay

    def update(
        self,
        rows: Tensor,
        grads: Tensor,
        states: Mapping[str, Tensor],
        learning_rate: float,
        step: int,
    ) -> None:
        """Updates rows and momentum."""
        momentum = states["momentum"]
        direction = (momentum * self.beta1).add_(grads, alpha=1 - self.beta1).sign_()
        rows.mul_(1 - learning_rate * self.weight_decay).sub_(direction, alpha=learning_rate)
        momentum.mul_(self.beta2).add_(grads, alpha=1 - self.beta2)


class LarsSGD(RowRule):
    """SGD with momentum and a learning rate for each row relative to the row's norm (FBGEMM's LARS_SGD).

    For a row w with gradient g, momentum m, which begins with 0, learning rate lr and weight decay wd:

        rate <- eta norm(w) / (norm(g) + wd norm(w)), or 1 if one of the norms is 0
        m <- momentum m + lr rate (g + wd w)
        w <- w - m

    Norms are over the columns of a column shard. `fused_params` may name it "LARS_SGD", or by `EmbOptimType`,
    with its arguments as keys beside `learning_rate`.

    Source: You, Gitman, Ginsburg, "Large batch training of convolutional networks", equations 6 and 7.

    Args:
        eta: how far an update moves a row, relative to the norm of the row.
        momentum: weight of the old momentum in the new one.
        weight_decay: wd.
    """

    name = "lars_sgd"
    states: ClassVar[Mapping[str, RuleState]] = {"momentum": RuleState()}

    def __init__(
        self, eta: float = 0.001, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        self.eta, self.momentum, self.weight_decay = eta, momentum, weight_decay

    def update(
        self,
        rows: Tensor,
        grads: Tensor,
        states: Mapping[str, Tensor],
        learning_rate: float,
        step: int,
    ) -> None:
        """Updates rows and momentum."""
        row_norms, grad_norms = (values.norm(dim=1, keepdim=True) for values in (rows, grads))
        rate = self.eta * row_norms / (grad_norms + self.weight_decay * row_norms)
        rate = torch.where((row_norms > 0) & (grad_norms > 0), rate, 1.0)
        change = (grads + self.weight_decay * rows) * (rate * learning_rate)
        momentum = states["momentum"].mul_(self.momentum).add_(change)
        rows.sub_(momentum)
