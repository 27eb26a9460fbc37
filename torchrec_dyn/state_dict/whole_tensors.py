"""Fills a load with the tensors of a state dict that DCP has not read.

They are plain tensors of the whole table, as of an unsharded collection, or copies of saved tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import MODEL_CHECKSUM, SavedTensor, is_canonical, numbers_of
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict.loading import TENSORS, TableLoad
from torchrec_dyn.state_dict.places import Places
from torchrec_dyn.storage import canonical_order, to_host
from torchrec_dyn.table import ROW_DTYPES, check_state


def fill(load: TableLoad, saved: Mapping[str, Any]) -> None:
    """Stages this rank's rows of tensors by name; raises ValueError if they do not fit."""
    load.unread = set(saved) - load.names
    if load.table.group is None:  # a load of an unsharded table may lack parts
        names = (TENSORS[checksum] for checksum in load.checksums)
        load.unread |= {name for of_checksum in names for name in of_checksum} - set(saved)
    for name in load.checksums:
        if name in saved:
            load.words[name] = _words_in(load.table, saved[name])
    for name in load.small_names:
        if name in saved:
            load.small[name] = to_host(numbers_of(saved[name]))
    by_row = {name: saved[name] for name in load.row_names if name in saved}
    if not load.has_rows:
        _fill_state(load, by_row, isinstance(saved["optimizer_config"], SavedTensor))
    elif isinstance(saved["weight"], SavedTensor):
        # Copies of this rank's saved tensors: they need the same plan on the same number of ranks.
        load.stage(Places(_row_ranges_of(saved["ids"])), saved["weight"].dtype, {})
        _receive_copies(load, by_row)
    else:
        _fill_rows(load, by_row)


def _words_in(table: Table, checksum: Tensor) -> list[list[int]]:
    """Returns this rank's rows of a checksum: a copy has one, a plain tensor those of all ranks."""
    if isinstance(checksum, SavedTensor):
        return [row for _, block in checksum.local() for row in block.tolist()]
    ranks = 1 if table.group is None else table.group.size()
    rows: list[list[int]] = checksum[table.rank :: ranks].tolist()
    return rows


def _receive_copies(load: TableLoad, by_row: Mapping[str, SavedTensor]) -> None:
    for name, tensor in by_row.items():
        for offset, block in tensor.local():
            load.receive(name, offset, block)


def _fill_rows(load: TableLoad, by_row: Mapping[str, Tensor]) -> None:
    """Stages this rank's rows of plain tensors, which hold the rows of all ranks in any order."""
    table = load.table
    weight = by_row["weight"].detach()
    _check_shapes(table, weight, by_row["ids"])
    given = {
        name: to_host(values)
        for name, values in by_row.items()
        # The load planner makes empty scores if the checkpoint lacks them.
        if name != "weight" and (name not in BY_ROW or len(values))
    }
    ids = given["ids"].contiguous()
    if MODEL_CHECKSUM not in load.words:  # not as a table has saved it
        state = {"weight": weight, **given, **load.small}
        state |= {"waiting": given["waiting"].t()} if "waiting" in given else {}
        check_state(table.where, state, table.embedding_dim, {})
    given["weight"] = weight if weight.dtype in ROW_DTYPES else weight.float()
    order = _order_here(table, ids)
    count = len(ids) if order is None else order.numel()
    load.stage(Places([(0, count)]), given["weight"].dtype, {})
    if "waiting" in given:
        load.receive("waiting", (0, 0), given.pop("waiting"))
    for name, rows in given.items():
        step = max(1, knobs.CHUNK_BYTES // max(1, rows[:1].nbytes))
        for start in range(0, count, step):
            span = slice(start, start + step)
            chosen = span if order is None else order[span].to(rows.device)
            load.receive(name, (start, 0), rows[chosen])


def _order_here(table: Table, ids: Tensor) -> Tensor | None:
    """Returns the places of this rank's ids in canonical order; None if all are its own, in that order."""
    order = None if is_canonical(ids) else canonical_order(ids)
    if table.layout.rows_are_spread or not table.shards:
        order = torch.arange(len(ids), device="cpu") if order is None else order
        order = order[table.owns(ids[order])]
    return order


def _fill_state(load: TableLoad, by_row: Mapping[str, Any], are_copies: bool) -> None:
    table = load.table
    if are_copies and load.cuts != table.cuts:
        raise ValueError(
            f"{table.where}: expected optimizer state cut at columns {table.cuts}, got a copy of state "
            f"cut at {load.cuts}. Save and load it with torch.distributed.checkpoint."
        )
    first = next(iter(by_row.values()), torch.empty(0, device="cpu"))
    widths = {name: tensor.shape[1] for name, tensor in by_row.items()}
    load.total = len(first)
    load.stage(Places(_row_ranges_of(first)), torch.float32, widths, not are_copies)
    if are_copies:
        _receive_copies(load, by_row)
    else:
        for name, tensor in by_row.items():
            load.receive(name, (0, 0), tensor)


def _check_shapes(table: Table, weight: Tensor, ids: Tensor) -> None:
    """Raises ValueError if saved rows and ids do not match a table, or each other."""
    columns = table.embedding_dim
    if weight.dim() != 2 or weight.shape[1] != columns:
        raise ValueError(
            f"{table.where}: expected saved rows [R, {columns}], got {list(weight.shape)}."
        )
    if ids.dtype != torch.int64 or ids.shape != weight.shape[:1]:
        raise ValueError(
            f"{table.where}: expected {len(weight)} saved ids of dtype int64, "
            f"got {list(ids.shape)} {ids.dtype}."
        )


def _row_ranges_of(value: Tensor) -> list[tuple[int, int]]:
    """Returns the ranges of rows of a saved tensor that this rank has; a plain tensor has all rows."""
    if not isinstance(value, SavedTensor):
        return [(0, len(value))]
    return [(part.offset[0], part.offset[0] + part.size[0]) for part in value.parts]
