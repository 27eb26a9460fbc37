"""The dense part: what a model and its optimizer save beside the dynamic tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict import rows_left_out


def dense_state(model: nn.Module, optimizer: Any, tables: Sequence[Table]) -> dict[str, Any]:
    """Returns the state dicts without the dynamic tables. Collective where static tables are sharded."""
    with rows_left_out():
        return without_tables(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tables
        )


def is_state_of(name: str, table: Table) -> bool:
    """Returns True if an optimizer's state dict has the state of a table under a name.

    The name may begin below the model, as of a collection's own optimizer, or with a name of the optimizer.
    """
    key = f".{table.key}.weight"
    return key.endswith(f".{name}") or f".{name}".endswith(key)


def without_tables(state: Mapping[str, Any], tables: Sequence[Table]) -> dict[str, Any]:
    """Returns the entries of state dicts that are of no dynamic table."""
    keys = tuple(f"{table.key}." for table in tables)
    of_optimizer = {
        name: value
        for name, value in state["optimizer"]["state"].items()
        if not any(is_state_of(name, table) for table in tables)
    }
    return {
        "model": {k: v for k, v in state["model"].items() if not k.startswith(keys)},
        "optimizer": {**state["optimizer"], "state": of_optimizer},
    }
