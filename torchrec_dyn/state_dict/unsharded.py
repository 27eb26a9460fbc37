"""The saved form of an unsharded table: plain tensors under the names that sharded tables use.

Legend: R rows, D columns, Q ids that wait, K times.

Tables of unsharded modules that DCP has read into plain tensors: verified before any of them is loaded.

There is nothing to agree on: each process holds all of them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    MODEL_TENSORS,
    OPTIMIZER_TENSORS,
    as_words,
    check_config,
    check_config_is_whole,
    check_optimizer,
    compare_sums,
    content_sum,
    from_bytes,
    mean_over_cuts,
    optimizer_config,
    saved_initializer,
    sum_of_small,
    to_bytes,
)
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.life import BY_ROW, LIFE
from torchrec_dyn.storage import cell_bits
from torchrec_dyn.table import DynamicTable, named_states

MODEL_NAMES = ("weight", "ids", *LIFE, "config", "checksum", "cells")
_SMALL = ("waiting", "clock", "step", "config")


def model_tensors(table: DynamicTable, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies out what the model's state dict has of a table.

    Args:
        table: the rows.
        config: `saved_config.table_config` of it.
    """
    ids, rows = table.id_map.contents()
    saved = {"weight": table.weights.read(rows), "ids": ids}
    if table.life is not None:
        saved |= table.life.export(rows)
    if "waiting" in saved:
        saved["waiting"] = saved["waiting"].t().contiguous()
    return _sealed(table.name, saved, config, MODEL_TENSORS)


def empty_model_tensors(
    config: Mapping[str, Any], has_life: bool, counts: bool
) -> dict[str, Tensor]:
    """Gives what the model's state dict has of a table without rows.

    Args:
        config: `saved_config.table_config` of it.
        has_life: whether it has a policy.
        counts: whether ids wait for admission.
    """
    ids = torch.empty(0, dtype=torch.int64)
    dtype = getattr(torch, config["rows"])
    saved = {"weight": torch.empty(0, config["embedding_dim"], dtype=dtype), "ids": ids}
    if has_life:
        saved |= {"last_seen": ids, "count": ids, "clock": ids.view(2, 0)}
    if counts:
        saved["waiting"] = ids.view(0, 3)
    return _sealed(config["table"], saved, config, MODEL_TENSORS)


def optimizer_tensors(table: DynamicTable) -> dict[str, Tensor]:
    """Copies out what the optimizer's state dict has of a table: its one column shard has all columns."""
    ids, rows = table.id_map.contents()
    saved = {one.name: one.store.read(rows) for one in named_states(table)}
    saved["step"] = torch.tensor(table.step)
    config = optimizer_config(table.optimizer, [0, table.columns])
    return _sealed(table.name, saved, config, OPTIMIZER_TENSORS, ids)


def checked_model_state(
    where: str, saved: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Initializer | None]:
    """Checks what a model's state dict has of a table.

    Args:
        where: the table, for messages.
        saved: tensors by name; weight and ids at least.
        config: `saved_config.table_config` of the table.

    Returns:
        The state as `DynamicTable.load_state` takes it, and the initializer that came along.

    Raises:
        ValueError: if it is damaged, or of another table.
    """
    ids = saved["ids"]
    check_shapes(where, saved["weight"], ids, config["embedding_dim"])
    verify(where, config["table"], saved, MODEL_TENSORS, ids, _absent(saved, MODEL_TENSORS))
    initializer = None
    if "config" in saved:
        of_saved = from_bytes(where, saved["config"])
        check_config(where, of_saved, dict(config))
        initializer = saved_initializer(where, of_saved)
    state = {name: saved[name] for name in ("weight", "ids", *LIFE) if name in saved}
    for name in BY_ROW:  # the load planner makes empty ones where the checkpoint has none
        if name in state and not len(state[name]) and len(ids):
            del state[name]
    if "waiting" in state:
        state["waiting"] = state["waiting"].t().contiguous()
    state["weight"] = state["weight"].detach()
    return state, initializer


def check_shapes(where: str, weight: Tensor, ids: Tensor, columns: int) -> None:
    """Raises ValueError if saved rows and ids do not fit a table, or each other.

    Args:
        where: the table, for messages.
        weight: [R, columns].
        ids: [R] int64.
        columns: of the table.
    """
    if weight.dim() != 2 or weight.shape[1] != columns:
        raise ValueError(f"{where}: expected saved rows [R, {columns}], got {list(weight.shape)}.")
    if ids.dtype != torch.int64 or ids.shape != weight.shape[:1]:
        raise ValueError(
            f"{where}: expected {len(weight)} saved ids of dtype int64, "
            f"got {list(ids.shape)} {ids.dtype}."
        )


def checked_optimizer_state(table: DynamicTable, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Checks what an optimizer's state dict has of a table.

    Args:
        table: whose rows are those that the optimizer state was saved with.
        saved: tensors by name.

    Returns:
        Optimizer state and step as `DynamicTable.load_state` takes them.

    Raises:
        ValueError: if it is damaged, or of another table or optimizer.
    """
    where, optimizer, ids = table.where, table.optimizer, table.ids()
    cuts = [0, table.columns]
    check_config_is_whole(where, table.name, saved, OPTIMIZER_TENSORS)
    if "config" in saved:
        of_saved = from_bytes(where, saved["config"])
        check_optimizer(where, of_saved, optimizer_config(optimizer, cuts))
        cuts = of_saved.get("cuts", cuts)
    for name in optimizer.state_names:
        if len(saved[name]) != ids.numel():
            raise ValueError(
                f"{where}: expected optimizer state of {ids.numel()} rows, got that of "
                f"{len(saved[name])}. Load the state dict of the module before that of its optimizer."
            )
    left_out = _absent(saved, OPTIMIZER_TENSORS)
    verify(where, table.name, saved, OPTIMIZER_TENSORS, ids, left_out)
    state = {"step": saved["step"]}
    for name, rowwise in zip(optimizer.state_names, optimizer.state_is_rowwise, strict=True):
        one = saved[name].detach().float()
        state[name] = mean_over_cuts(one, cuts, (0, table.columns)).flatten() if rowwise else one
    return state


def _sealed(
    table: str,
    saved: dict[str, Tensor],
    config: Mapping[str, Any],
    order: tuple[str, ...],
    ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """Adds config, checksum and cells."""
    saved["config"] = to_bytes(dict(config))
    ids = saved["ids"] if ids is None else ids
    sums = _sums(table, saved, ids, order)
    # Of sharded tables the chunks of "cells" are an index; here it is there so that the names are the same.
    cells = torch.empty(ids.numel() + (1 << cell_bits(ids.numel())), 0, dtype=torch.uint8)
    return {**saved, "checksum": as_words(sums, order), "cells": cells}


def verify(
    where: str,
    table: str,
    saved: Mapping[str, Tensor],
    order: tuple[str, ...],
    ids: Tensor,
    left_out: Container[str],
) -> None:
    """Raises ValueError if tensors are not those that were saved.

    Args:
        where: the table, for messages.
        table: its name.
        saved: tensors by name; without "checksum" nothing is verified.
        order: MODEL_TENSORS or OPTIMIZER_TENSORS.
        ids: [R] int64 of the rows.
        left_out: names of tensors that were saved and are not here.
    """
    if "checksum" in saved:
        names = [name for name in order if name not in left_out]
        compare_sums(where, saved["checksum"], order, names, _sums(table, saved, ids, order))


def _sums(
    table: str, saved: Mapping[str, Tensor], ids: Tensor, order: tuple[str, ...]
) -> dict[str, int]:
    return {
        name: sum_of_small(table, name, saved[name])
        if name in _SMALL
        else content_sum(table, name, ids, saved[name])
        for name in order
        if name in saved
    }


def _absent(saved: Mapping[str, Tensor], order: tuple[str, ...]) -> set[str]:
    return set(order) - saved.keys()


def verify_plain(came: Mapping[str, Tensor], saved: Mapping[str, object]) -> None:
    """Verifies tables of a model and of its optimizer.

    Args:
        came: tensors by key of the checkpoint, of unsharded tables only.
        saved: whatever, by every key of the checkpoint.

    Raises:
        ValueError: if one is damaged.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in came.items():
        prefix, _, name = key.rpartition(".")
        groups.setdefault(prefix, {})[name] = tensor
    ids_of: dict[str, list[Tensor]] = {}
    for prefix, tensors in groups.items():
        if "ids" in tensors and "config" in tensors:
            table = prefix.rpartition(".")[2]
            left_out = _left_out(prefix, tensors, saved)
            verify(prefix, table, tensors, MODEL_TENSORS, tensors["ids"], left_out)
            ids_of.setdefault(table, []).append(tensors["ids"])
    for prefix, tensors in groups.items():
        ids = ids_of.get(prefix.rpartition(".")[2], [])
        if "step" in tensors and len(ids) == 1:  # else its own load verifies it
            left_out = _left_out(prefix, tensors, saved)
            name = prefix.rpartition(".")[2]
            verify(prefix, name, tensors, OPTIMIZER_TENSORS, ids[0], left_out)


def _left_out(prefix: str, tensors: Mapping[str, Tensor], saved: Mapping[str, object]) -> set[str]:
    """Names the tensors that are in the checkpoint and were not read."""
    names = {*MODEL_TENSORS, *OPTIMIZER_TENSORS}
    return {name for name in names if f"{prefix}.{name}" in saved and name not in tensors}
