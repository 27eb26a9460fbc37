"""Fills a load with the tensors of a state dict that DCP has not read.

They are plain tensors of the whole table, as of an unsharded collection, or copies of saved tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    MODEL_CHECKSUM,
    SUMMED,
    ChunkedTensor,
    SavedTensor,
    is_canonical,
    numbers_of,
)
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict.loading import TableLoad
from torchrec_dyn.storage import canonical_order, to_host
from torchrec_dyn.table import ROW_DTYPES, check_state


def fill(load: TableLoad, saved: Mapping[str, Any]) -> None:
    """Stages this rank's rows of tensors by name; raises ValueError if they do not fit."""
    table = load.table
    load.unread = set(saved) - {*load.row_names, *load.small_names}
    if table.group is None:  # a load of an unsharded table may lack parts
        load.unread |= {*SUMMED} - set(saved)
    given = {name: saved[name] for name in load.row_names if name in saved}
    small = {name: numbers_of(saved[name]) for name in load.small_names if name in saved}
    if load.has_rows and not isinstance(saved["weight"], SavedTensor):
        given = _canonical_rows(table, given, small, MODEL_CHECKSUM in saved)
    for name in saved.keys() & {*load.checksums}:  # a copy has this rank's row, a plain tensor all
        if isinstance(saved[name], SavedTensor) or not table.rank:
            given[name] = saved[name]
    load.tensors = {name: _held(load, name, tensor) for name, tensor in (given | small).items()}
    load.stage()
    is_copy = isinstance(saved.get("optimizer_config"), SavedTensor)
    if is_copy and load.fault is None and load.cuts != table.cuts:
        raise ValueError(
            f"{table.where}: expected optimizer state cut at columns {table.cuts}, got a copy of "
            f"state cut at {load.cuts}. Save and load it with torch.distributed.checkpoint."
        )


def _held(load: TableLoad, name: str, tensor: Tensor) -> ChunkedTensor:
    """Returns a tensor of which this rank has the parts that it reads."""
    shape, blocks = list(tensor.shape), [((0,) * tensor.dim(), tensor.detach())]
    if isinstance(tensor, SavedTensor):
        blocks = tensor.local()
        if (
            load.has_rows or name in load.checksums
        ):  # the rows of this rank are a table of their own
            heights = {offset[0]: len(block) for offset, block in blocks}
            places, shape[0] = {}, 0
            for row in sorted(heights):
                places[row], shape[0] = shape[0], shape[0] + heights[row]
            blocks = [((places[offset[0]], *offset[1:]), block) for offset, block in blocks]
    held = ChunkedTensor(f"{load.table.where}, {name}", name, shape, tensor.dtype)
    for offset, block in blocks:
        held.put(offset, block)
    return held


def _canonical_rows(
    table: Table, given: Mapping[str, Tensor], small: Mapping[str, Tensor], is_summed: bool
) -> dict[str, Tensor]:
    """Returns plain tensors by row, which hold the rows of all ranks in any order, in canonical order."""
    weight, ids = given["weight"].detach(), to_host(given["ids"]).contiguous()
    _check_shapes(table, weight, ids)
    # The load planner makes empty scores if the checkpoint lacks them.
    rows = {
        name: one for name, one in given.items() if name not in BY_ROW or len(one) or not len(ids)
    }
    if not is_summed:  # not as a table has saved it
        state = {name: to_host(one) for name, one in rows.items() if name != "weight"}
        state |= {"waiting": state["waiting"].t()} if "waiting" in state else {}
        state |= {name: to_host(one) for name, one in small.items()}
        check_state(table.where, {"weight": weight, **state}, table.embedding_dim, {})
    rows["weight"] = weight if weight.dtype in ROW_DTYPES else weight.float()
    for name, one in rows.items():
        listed = to_host(one[:, 0].contiguous()) if name == "waiting" and one.dim() == 2 else ids
        if not is_canonical(listed):
            rows[name] = one[canonical_order(listed).to(one.device)]
    return rows


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
