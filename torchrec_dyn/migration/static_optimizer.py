"""The optimizer that trained a static table: its update rule, for further training, and its saved state.

Legend: N rows, D columns of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from torchrec_dyn.modules import matching_optimizer
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

# FBGEMM's names of the states, by the names of torch.optim and of TorchRec's own classes.
MOMENTS = {
    "sum": "momentum1",
    "exp_avg": "momentum1",
    "exp_avg_sq": "momentum2",
}
STEPS = ("step", "iter")
# Options that row rules lack or define in another way: dense decay, e.g., also changes rows that are in no
# batch.
_WITHOUT_COUNTERPART = ("momentum", "nesterov", "weight_decay", "lr_decay", "amsgrad", "maximize")


class Trainer(NamedTuple):
    """The optimizer that trained one parameter."""

    optimizer: torch.optim.Optimizer  # without its wrappers
    # The parameter's group; None for TorchRec's placeholder optimizers, which never trained a row.
    group: Mapping[str, Any] | None

    @property
    def kind(self) -> OptimizerKind | None:
        """The row rule for the optimizer's class; None: there is no such rule."""
        try:
            matching = matching_optimizer(type(self.optimizer))
        except ValueError:
            return None
        return OptimizerKind.__members__.get(getattr(matching, "name", str(matching)))


class SavedMoments(NamedTuple):
    """The optimizer state of one table's rows."""

    # By FBGEMM's name: [N, D], [N, 1] or [N] each; empty before the first step.
    states: Mapping[str, Tensor]
    step: int  # training steps so far


def trainer_of(
    weight: Tensor, optimizer: torch.optim.Optimizer | None, where: str
) -> Trainer | None:
    """Returns the optimizer that trained a parameter: the optimizer in its backward, else `optimizer`.

    weight: [N, D], the parameter. `optimizer` may be plain, keyed, wrapped or combined, or None.
    """
    in_backward = getattr(weight, "_in_backward_optimizers", [])
    if len(in_backward) > 1:
        names = [type(one).__name__ for one in in_backward]
        raise ValueError(f"{where}: expected one optimizer on the parameter, got {names}.")
    given = in_backward if in_backward else _unwrapped(optimizer)
    for one in given:
        for group in getattr(one, "param_groups", ()):
            if any(held is weight for held in group["params"]):
                return Trainer(one, group)
    if in_backward:
        return Trainer(in_backward[0], None)
    if optimizer is None or not weight.requires_grad:
        return None
    raise ValueError(
        f"{where}: expected an optimizer that holds the parameter of every table, got "
        f"{type(optimizer).__name__} without this parameter. Pass the optimizer that trained the "
        "collection, or none to start with fresh state."
    )


def _unwrapped(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.optim.Optimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, one in optimizer.optimizers:
            yield from _unwrapped(one)
    elif isinstance(optimizer, (OptimizerWrapper, KeyedOptimizerWrapper)):
        yield from _unwrapped(optimizer._optimizer)
    elif optimizer is not None:
        yield optimizer


def row_rule(trainer: Trainer, group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the hyper-parameters for further training of the rows by the same rule.

    `group` is the optimizer's parameter group, with the present learning rate.
    """
    name = type(trainer.optimizer).__name__
    advice = 'Set the optimizer of the rows: fused_params={"optimizer": ...}.'
    if trainer.kind is None:
        known = ", ".join(kind.name for kind in OptimizerKind)
        raise ValueError(f"{where}: expected an optimizer like {known}, got {name}. {advice}")
    for option in _WITHOUT_COUNTERPART:
        if group.get(option):
            raise ValueError(
                f"{where}: expected {option} = 0 of {name}, because row optimizers have no equal "
                f"option, got {group[option]}. {advice}"
            )
    rule = {"lr": float(group["lr"])}
    if trainer.kind == OptimizerKind.ADAMW:
        rule["weight_decay"] = 0.0  # the default of ADAMW is not 0
    if group.get("initial_accumulator_value"):
        rule["initial_accumulator_value"] = float(group["initial_accumulator_value"])
    if "eps" in group:
        rule["eps"] = float(group["eps"])
    if "betas" in group:
        rule["beta1"], rule["beta2"] = (float(beta) for beta in group["betas"])
    return rule


def check_kind(trainer: Trainer, optimizer: RowOptimizer, where: str) -> None:
    """Raises ValueError if the chosen rule differs from the rule that trained the rows."""
    chosen = optimizer.kind.name if optimizer.own is None else optimizer.saved_name
    if trainer.kind is not None and trainer.kind.name != chosen:
        raise ValueError(
            f"{where}: expected fused_params with the optimizer that trained the rows, "
            f"{trainer.kind.name}, got {chosen}. Choose the same optimizer, or do not "
            "pass the old optimizer to start with fresh state."
        )


def saved_moments(
    trainer: Trainer, weight: Tensor, optimizer: RowOptimizer, table: str, where: str
) -> SavedMoments:
    """Returns the optimizer state of a table, after checking that it fits the rule and the rows.

    weight [N, D] is the parameter that `trainer` has trained; `optimizer` is the rule for further training.
    """
    state = getattr(trainer.optimizer, "state", {}).get(weight, {})
    plain = {str(name).removeprefix(f"{table}."): one for name, one in state.items()}
    found = {name: one for name, one in plain.items() if one is not None}
    steps = [found.pop(name) for name in STEPS if name in found]
    names = {MOMENTS.get(name, name): name for name in found}
    if found and sorted(names) != sorted(optimizer.state_names):
        raise ValueError(
            f"{where}: expected optimizer state {list(optimizer.state_names)} of "
            f"{optimizer.kind.name}, got {sorted(found)}."
        )
    states = {name: found[original] for name, original in names.items()}
    _check_moments(states, tuple(weight.shape), optimizer, where)
    return SavedMoments(states, max((int(step) for step in steps), default=0))


def _check_moments(
    states: Mapping[str, Tensor], shape: tuple[int, ...], optimizer: RowOptimizer, where: str
) -> None:
    """Raises ValueError unless states, by FBGEMM's name, have the shapes that the optimizer needs."""
    for name, state in states.items():
        fits = [(shape[0],), (shape[0], 1)] if optimizer.is_rowwise(name) else [shape]
        if not isinstance(state, Tensor) or tuple(state.shape) not in fits:
            got = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise ValueError(
                f"{where}: expected {name} of {optimizer.kind.name} as {list(fits[0])}, got {got}."
            )
