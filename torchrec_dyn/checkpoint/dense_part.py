"""The dense part: what a model and its optimizer save beside the dynamic tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict import rows_left_out


def dense_state(model: nn.Module, optimizer: Any, tables: Sequence[Table]) -> dict[str, Any]:
    """Returns the state dicts without the dynamic tables. Collective where static tables are sharded."""
    with rows_left_out():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    check_has_all(state["optimizer"], optimizer)
    return without_tables(state, tables)


def check_optimizer(optimizer: Any, call: str) -> None:
    """Raises ValueError unless an optimizer names its parameters, as those of TorchRec do."""
    if not isinstance(optimizer, KeyedOptimizer):
        raise ValueError(
            f"{call}: expected TorchRec's KeyedOptimizer, got {type(optimizer).__name__}. Pass "
            "model.fused_optimizer, or a CombinedOptimizer of it and a KeyedOptimizerWrapper of the dense "
            "optimizer."
        )


def optimizers_in(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer and those that it combines or wraps, also torch's."""
    yield optimizer
    for _, one in getattr(optimizer, "optimizers", ()):
        yield from optimizers_in(one)
    if hasattr(optimizer, "_optimizer"):  # of TorchRec's wrappers
        yield from optimizers_in(optimizer._optimizer)


def check_has_all(saved: Mapping[str, Any], optimizer: Any) -> None:
    """Raises ValueError if an optimizer has state that its state dict lacks.

    TorchRec's wrappers copy the dict of states of a CombinedOptimizer. What is added to one of the two later
    is missing in the other: the step of a WarmupOptimizer around it, the state that torch's optimizers make.
    """
    names = {id(parameter): name for name, parameter in optimizer.params.items()}
    held = {id(parameter) for one in optimizers_in(optimizer) for parameter in one.state}
    if lost := sorted({names.get(one, "a parameter") for one in held} - saved["state"].keys()):
        raise ValueError(
            f"Checkpoints.save: expected an optimizer whose state dict has all of its state, got a "
            f"{type(optimizer).__name__} without that of {', '.join(lost)}: a restored job would begin it "
            "again. Put one WarmupOptimizer around each part inside the CombinedOptimizer, not one around "
            "all, with a param_name of its own."
        )


def names_of_states(states: Mapping[str, Any], tables: Sequence[Table]) -> dict[str, list[str]]:
    """Returns by table the names under which an optimizer's state dict has its state.

    A name may begin below the model, as of a collection's own optimizer, or with a name of the optimizer. The
    name of a dense parameter may end as one of a table, too, but its state has no config of the table.
    """
    by_config = {f"{table.name}.optimizer_config": table for table in tables}
    names: dict[str, list[str]] = {table.name: [] for table in tables}
    for name, state in states.items():
        for table in (by_config[one] for one in state if one in by_config):
            key = f".{table.key}.weight"
            if key.endswith(f".{name}") or f".{name}".endswith(key):
                names[table.name].append(name)
    return names


def without_tables(state: Mapping[str, Any], tables: Sequence[Table]) -> dict[str, Any]:
    """Returns the entries of state dicts that are of no dynamic table."""
    keys = {table.key for table in tables}
    states = state["optimizer"]["state"]
    left_out = {name for names in names_of_states(states, tables).values() for name in names}
    return {
        "model": {k: v for k, v in state["model"].items() if k.rpartition(".")[0] not in keys},
        "optimizer": {
            **state["optimizer"],
            "state": {name: one for name, one in states.items() if name not in left_out},
        },
    }
