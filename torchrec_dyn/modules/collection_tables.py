"""The tables of one unsharded collection, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.life import time_fault
from torchrec_dyn.modules.table_handle import TableHandle
from torchrec_dyn.modules.unsharded_table import LocalTable


def local_tables(
    configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig],
    dynamic: Mapping[str, DynamicTableConfig],
    fused_params: Mapping[str, Any] | None,
    device: torch.device | str | None,
    where: str,
) -> nn.ModuleDict:
    """Makes the tables of one collection, by name.

    Args:
        configs: checked configs.
        dynamic: how each table's rows start and live.
        fused_params: the collection's, or None.
        device: where the rows live; None: cpu.
        where: the collection's class name, for messages.
    """
    place = torch.device(device if device is not None else "cpu")
    return nn.ModuleDict(
        {
            one.name: LocalTable(one, dynamic[one.name], fused_params, place, where)
            for one in configs
        }
    )


def mark_alike(made: Iterable[LocalTable], others: Iterable[LocalTable]) -> None:
    """Gives tables without rows the optimizers of others, and whether they learn."""
    for one, other in zip(made, others, strict=True):
        weight: Any = other.weight
        one.weight.requires_grad_(weight.requires_grad)
        if hasattr(weight, "_optimizer_classes"):
            one.mark_optimizer(weight._optimizer_classes, weight._optimizer_kwargs)


def check_saved_rows(tables: nn.ModuleDict, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Checks all saved rows of a collection before any is loaded.

    Raises:
        ValueError: if rows of some table do not fit; nothing has changed then.
    """
    problems = []
    for name, table in tables.items():
        if isinstance(table, LocalTable):
            try:
                table.checked_state(state_dict, f"{prefix}{name}.")
            except ValueError as fault:
                problems.append(str(fault))
    if problems:
        raise ValueError("\n".join(problems))


def handle_of(tables: nn.ModuleDict, name: str, where: str) -> TableHandle:
    """Gives the handle of one of these tables.

    Raises:
        ValueError: if there is no such table.
    """
    table = dict(tables.items()).get(name)
    if not isinstance(table, LocalTable):
        raise ValueError(f"{where}.table: expected a name among {list(tables)}, got {name!r}.")
    return TableHandle(table)


def set_time(tables: nn.ModuleDict, time: int) -> None:
    """Sets the clocks of all tables of a collection.

    Raises:
        ValueError: if one of them cannot be set; none is then.
    """
    rows = [table.rows() for table in tables.values() if isinstance(table, LocalTable)]
    for one in rows:
        if fault := time_fault(time, one.time):
            raise ValueError(f"{one.where}.set_time: {fault}")
    for one in rows:
        one.set_time(time)
