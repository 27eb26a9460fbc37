"""Saves and loads unsharded tables: plain tensors under the names that sharded tables use.

Each process holds whole tables and verifies them by itself.

Legend: R rows, D columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    numbers_of,
    optimizer_config,
    saved_initializer,
    sum_of_small,
    to_bytes,
)
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.life import BY_ROW, LIFE
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict.saving import ModelSource, OptimizerSource, ShardSource
from torchrec_dyn.storage import cell_bits, locked
from torchrec_dyn.table import DynamicTable, named_states

_SMALL = ("waiting", "clock", "step", "config")
# The order in a state dict, hence in files.
_LAST = ("clock", "waiting", "step", "config", "checksum", "cells")


@locked
def model_tensors(table: DynamicTable, config: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a table for the model's state dict, copied to the CPU.

    Args:
        table: the table with its rows.
        config: `saved_config.table_config` of the table.
    """
    if table.device.type != "cpu":
        return _by_chunks(ModelSource(Table.of_one(table, table.where, config), None))
    ids, rows = table.id_map.contents()
    saved = {"weight": table.weights.read(rows), "ids": ids}
    if table.life is not None:
        saved |= table.life.export(rows)
    if "waiting" in saved:
        saved["waiting"] = saved["waiting"].t().contiguous()
    return _sealed(table.name, saved, config, MODEL_TENSORS)


def empty_model_tensors(
    config: Mapping[str, Any], has_life: bool, has_waiting: bool
) -> dict[str, Tensor]:
    """Returns the tensors of a table without rows for the model's state dict.

    Args:
        config: `saved_config.table_config` of the table.
        has_life: True if the table has a policy.
        has_waiting: True if ids wait for admission.
    """
    ids = torch.empty(0, dtype=torch.int64, device="cpu")
    dtype = getattr(torch, config["rows"])
    weight = torch.empty(0, config["embedding_dim"], dtype=dtype, device="cpu")
    saved = {"weight": weight, "ids": ids}
    if has_life:
        saved |= {"last_seen": ids, "count": ids, "clock": ids.view(2, 0)}
    if has_waiting:
        saved["waiting"] = ids.view(0, 3)
    return _sealed(config["table"], saved, config, MODEL_TENSORS)


@locked
def optimizer_tensors(table: DynamicTable) -> dict[str, Tensor]:
    """Returns the tensors of a table for the optimizer's state dict, copied to the CPU.

    All columns are one shard.
    """
    if table.device.type != "cpu":
        return _by_chunks(OptimizerSource(Table.of_one(table, table.where, {}), None))
    ids, rows = table.id_map.contents()
    saved = {one.name: one.store.read(rows) for one in named_states(table)}
    saved["step"] = torch.tensor(table.step, device="cpu")
    config = optimizer_config(table.optimizer, [0, table.columns])
    return _sealed(table.name, saved, config, OPTIMIZER_TENSORS, ids)


def _by_chunks(source: ShardSource) -> dict[str, Tensor]:
    """Returns the tensors of a source, read and summed in chunks: a GPU may lack memory for a second copy."""
    tensors = source.tensors([source.summary()])
    names = [*(name for name in tensors if name not in _LAST), *_LAST]
    return {name: numbers_of(tensors[name]) for name in names if name in tensors}


def checked_model_state(
    where: str, saved: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Initializer | None]:
    """Checks the tensors of a table from a model's state dict.

    Args:
        where: the table, for messages.
        saved: tensors by name, with at least "weight" and "ids".
        config: `saved_config.table_config` of the table.

    Returns:
        The state for `DynamicTable.load_state`, and the saved initializer, None without a saved config.

    Raises:
        ValueError: if the state is damaged, or of another table.
    """
    ids = saved["ids"]
    check_shapes(where, saved["weight"], ids, config["embedding_dim"])
    _check_sums(where, config["table"], saved, MODEL_TENSORS, ids, _present(saved, MODEL_TENSORS))
    initializer = None
    if "config" in saved:
        of_saved = from_bytes(where, saved["config"])
        check_config(where, of_saved, dict(config))
        initializer = saved_initializer(where, of_saved)
    state = {name: saved[name] for name in ("weight", "ids", *LIFE) if name in saved}
    for name in BY_ROW:  # the load planner makes empty tensors if the checkpoint lacks them
        if name in state and not len(state[name]) and len(ids):
            del state[name]
    if "waiting" in state:
        state["waiting"] = state["waiting"].t().contiguous()
    state["weight"] = state["weight"].detach()
    return state, initializer


def check_shapes(where: str, weight: Tensor, ids: Tensor, columns: int) -> None:
    """Raises ValueError if saved rows and ids do not match a table, or each other.

    Args:
        where: the table, for messages.
        weight: [R, columns].
        ids: [R] int64.
        columns: number of columns of the table.
    """
    if weight.dim() != 2 or weight.shape[1] != columns:
        raise ValueError(f"{where}: expected saved rows [R, {columns}], got {list(weight.shape)}.")
    if ids.dtype != torch.int64 or ids.shape != weight.shape[:1]:
        raise ValueError(
            f"{where}: expected {len(weight)} saved ids of dtype int64, "
            f"got {list(ids.shape)} {ids.dtype}."
        )


def checked_optimizer_state(table: DynamicTable, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Checks the tensors of a table from an optimizer's state dict.

    Args:
        table: the table, with the rows with which the optimizer state was saved.
        saved: tensors by name.

    Returns:
        Optimizer state and step for `DynamicTable.load_state`.

    Raises:
        ValueError: if the state is damaged, or of another table or optimizer.
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
                f"{len(saved[name])}. Load the state dict of the module before the state dict of its "
                "optimizer."
            )
    present = _present(saved, OPTIMIZER_TENSORS)
    try:
        _check_sums(where, table.name, saved, OPTIMIZER_TENSORS, ids, present)
    except ValueError as error:  # the sums are of ids and state: other ids read as damage
        raise ValueError(
            f"{where}: expected the rows that the optimizer state was saved with, got other rows, or damaged "
            "state. Load the state dict of the module before that of its optimizer; if that was done, use "
            "the checkpoint before."
        ) from error
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
    """Returns the tensors with config, checksum and cells added."""
    saved["config"] = to_bytes(dict(config))
    ids = saved["ids"] if ids is None else ids
    sums = _sums(table, saved, ids, order)
    # The chunks of "cells" are an index of sharded tables. Unsharded tables save the tensor too, so that the
    # names are the same.
    places = ids.numel() + (1 << cell_bits(ids.numel()))
    cells = torch.empty(places, 0, dtype=torch.uint8, device="cpu")
    return {**saved, "checksum": as_words(sums, order), "cells": cells}


def _check_sums(
    where: str,
    table: str,
    saved: Mapping[str, Tensor],
    order: tuple[str, ...],
    ids: Tensor,
    names: Iterable[str],
) -> None:
    """Raises ValueError if a content sum differs from the saved sum; without "checksum" checks nothing."""
    if "checksum" in saved:
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


def _present(saved: Mapping[str, Tensor], order: tuple[str, ...]) -> list[str]:
    return [name for name in order if name in saved]


def verify_tables(loaded: Mapping[str, Tensor], saved: Mapping[str, object]) -> None:
    """Verifies unsharded tables of a model and of its optimizer, before any of them is loaded.

    Args:
        loaded: tensors by key of the checkpoint, of unsharded tables only.
        saved: any value, by every key of the checkpoint.

    Raises:
        ValueError: if a table is damaged.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in loaded.items():
        prefix, _, name = key.rpartition(".")
        groups.setdefault(prefix, {})[name] = tensor

    def check(prefix: str, order: tuple[str, ...], ids: Tensor) -> None:
        tensors = groups[prefix]
        # A tensor that is in the checkpoint and was not read cannot be compared.
        names = [name for name in order if name in tensors or f"{prefix}.{name}" not in saved]
        _check_sums(prefix, prefix.rpartition(".")[2], tensors, order, ids, names)

    ids_of: dict[str, list[Tensor]] = {}
    for prefix, tensors in groups.items():
        if "ids" in tensors and "config" in tensors:
            check(prefix, MODEL_TENSORS, tensors["ids"])
            ids_of.setdefault(prefix.rpartition(".")[2], []).append(tensors["ids"])
    for prefix, tensors in groups.items():
        ids = ids_of.get(prefix.rpartition(".")[2], [])
        if "step" in tensors and len(ids) == 1:  # else `checked_optimizer_state` verifies it
            check(prefix, OPTIMIZER_TENSORS, ids[0])
