"""A static table: its rows, which become those of a dynamic table (id i has row i), and its optimizer.

The optimizer that trained the rows gives the update rule for further training, and its saved state.

Legend: N rows, D columns of the static table, M rows of a chunk, C columns of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from torchrec_dyn.checkpoint_format import RowSource, rows_at
from torchrec_dyn.modules import matching_optimizer
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict import append_rows
from torchrec_dyn.table import TableShard

ReadRows = Callable[[int, int], Tensor]  # returns rows [first, last)


class StaticRows(RowSource):
    """A static table: a dense tensor of rows, and the state of the optimizer that trained it.

    `tensors` read "weight" [M, D] and optimizer state by FBGEMM's name, [M, D] or [M, shards of `cuts`].

    Attributes:
        trained_steps: training steps so far.
    """

    def __init__(
        self,
        where: str,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        tensors: Mapping[str, ReadRows],
        optimizer: RowOptimizer,
        trained_steps: int,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self.where, self.name, self.dtype = where, name, dtype
        self._count, self.embedding_dim = shape
        self._tensors, self._optimizer, self.trained_steps = tensors, optimizer, trained_steps
        self.cuts = cuts or (0, self.embedding_dim)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors by row."""
        return ("ids", *self._tensors)

    def is_rowwise(self, name: str) -> bool:
        """Returns True for optimizer state with one number for each column shard."""
        return self._optimizer.is_rowwise(name)

    def _places(
        self, rows: int, mixed: Sequence[range], waiting: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, 0 if waiting else self._count, rows):
            ids = torch.arange(first, min(first + rows, self._count), device="cpu")
            yield ids, ids

    def _read(
        self, names: Sequence[str], ids: Tensor, places: Tensor, columns: slice, waiting: bool
    ) -> dict[str, Tensor]:
        rows = {name: rows_at(self._tensors[name], places) for name in names}
        return {
            name: values if self.is_rowwise(name) else values[:, columns]
            for name, values in rows.items()
        }

    def fill(self, table: Table, shards: Sequence[TableShard]) -> None:
        """Fills empty shards, a table's or those beside them; their scores start at the last step."""
        for shard in shards:
            shard.step = self.trained_steps  # first: policies count the rows' age from this step
            shard.reserve(self._count // table.layout.row_ranks)
        append_rows(self, table, shards, self.names)


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


def _kind_of(optimizer: torch.optim.Optimizer) -> OptimizerKind | None:
    """Returns the row rule for the class of an optimizer; None: there is no such rule."""
    try:
        matching = matching_optimizer(type(optimizer))
    except ValueError:
        return None
    return OptimizerKind.__members__.get(getattr(matching, "name", str(matching)))


def trainer_of(
    weight: Tensor, optimizer: torch.optim.Optimizer | None, where: str
) -> tuple[torch.optim.Optimizer, Mapping[str, Any] | None] | None:
    """Returns the optimizer that trained a parameter: the one in its backward, else `optimizer`, unwrapped.

    Also the parameter's group; None for TorchRec's placeholder optimizers, which never trained a row.
    weight: [N, D], the parameter. `optimizer` may be plain, keyed, wrapped or combined, or None.
    """
    in_backward = getattr(weight, "_in_backward_optimizers", [])
    if len(in_backward) > 1:
        names = [type(optimizer).__name__ for optimizer in in_backward]
        raise ValueError(f"{where}: expected one optimizer on the parameter, got {names}.")
    for plain in in_backward or _unwrapped(optimizer):
        for group in getattr(plain, "param_groups", ()):
            if any(parameter is weight for parameter in group["params"]):
                return plain, group
    if in_backward:
        return in_backward[0], None
    if optimizer is None or not weight.requires_grad:
        return None
    raise ValueError(
        f"{where}: expected an optimizer that holds the parameter of every table, got "
        f"{type(optimizer).__name__} without this parameter. Pass the optimizer that trained the "
        "collection, or none to start with fresh state."
    )


def _unwrapped(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.optim.Optimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from _unwrapped(part)
    elif isinstance(optimizer, (OptimizerWrapper, KeyedOptimizerWrapper)):
        yield from _unwrapped(optimizer._optimizer)
    elif optimizer is not None:
        yield optimizer


def row_rule(
    trainer: torch.optim.Optimizer, group: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Returns the hyper-parameters of the same rule, with the present learning rate of the group."""
    name, kind = type(trainer).__name__, _kind_of(trainer)
    advice = 'Set the optimizer of the rows: fused_params={"optimizer": ...}.'
    if kind is None:
        known = ", ".join(kind.name for kind in OptimizerKind)
        raise ValueError(f"{where}: expected an optimizer like {known}, got {name}. {advice}")
    for option in _WITHOUT_COUNTERPART:
        if group.get(option):
            raise ValueError(
                f"{where}: expected {option} = 0 of {name}, because row optimizers have no equal "
                f"option, got {group[option]}. {advice}"
            )
    rule = {"lr": float(group["lr"])}
    if kind == OptimizerKind.ADAMW:
        rule["weight_decay"] = 0.0  # the default of ADAMW is not 0
    if group.get("initial_accumulator_value"):
        rule["initial_accumulator_value"] = float(group["initial_accumulator_value"])
    if "eps" in group:
        rule["eps"] = float(group["eps"])
    if "betas" in group:
        rule["beta1"], rule["beta2"] = (float(beta) for beta in group["betas"])
    return rule


def check_kind(trainer: torch.optim.Optimizer, optimizer: RowOptimizer, where: str) -> None:
    """Raises ValueError if the chosen rule differs from the rule that trained the rows."""
    chosen = optimizer.kind.name if optimizer.own is None else optimizer.saved_name
    kind = _kind_of(trainer)
    if kind is not None and kind.name != chosen:
        raise ValueError(
            f"{where}: expected fused_params with the optimizer that trained the rows, "
            f"{kind.name}, got {chosen}. Choose the same optimizer, or do not "
            "pass the old optimizer to start with fresh state."
        )


def saved_moments(
    trainer: torch.optim.Optimizer, weight: Tensor, optimizer: RowOptimizer, table: str, where: str
) -> tuple[dict[str, Tensor], int]:
    """Returns checked states by FBGEMM's names, [N, D], [N, 1] or [N], and the training steps."""
    saved = getattr(trainer, "state", {}).get(weight, {})
    plain = {str(name).removeprefix(f"{table}."): state for name, state in saved.items()}
    states = {MOMENTS.get(name, name): state for name, state in plain.items() if state is not None}
    steps = [int(states.pop(name)) for name in STEPS if name in states]
    if states:
        check_states(states, weight.shape, 1, optimizer, where)
    return states, max(steps, default=0)


def check_states(
    states: Mapping[str, Any],
    shape: Sequence[int],
    shards: int,
    optimizer: RowOptimizer,
    where: str,
    advice: str = "",
) -> None:
    """Raises ValueError unless an optimizer has these states: [N, D], by row [N, 1] or [N * shards]."""
    if sorted(states) != sorted(optimizer.state_names):
        raise ValueError(
            f"{where}: expected optimizer state {list(optimizer.state_names)} of {optimizer.kind.name}, got "
            f"{sorted(states)}.{advice}"
        )
    rows, columns = shape
    by_row = [(rows * shards,), (rows, 1)][: 2 if shards == 1 else 1]
    for name, state in states.items():
        fits = by_row if optimizer.is_rowwise(name) else [(rows, columns)]
        if tuple(getattr(state, "shape", ())) not in fits:
            got = list(state.shape) if hasattr(state, "shape") else type(state).__name__
            raise ValueError(
                f"{where}: expected {name} of {optimizer.kind.name} as {list(fits[0])}, got {got}."
            )
