"""Copies rows that were trained before sharding into the shards.

Every rank has the whole unsharded collection and copies its part, so nothing is sent.

Legend: R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_dyn.life import NOT_BY_ROW
from torchrec_dyn.ranks import Piece, TableLayout, owners
from torchrec_dyn.table import DynamicTable, state_for_copy, without_optimizer


def copy_trained_rows(
    source: DynamicTable, shards: Sequence[DynamicTable], layout: TableLayout, rank: int
) -> None:
    """Fills this rank's shards of one table with its part of the unsharded rows.

    Scores, admission counters and clock are copied too. Optimizer state is copied if the shards have the same
    kind of optimizer; state of one number per row is copied to every column shard.

    Args:
        source: the unsharded table.
        shards: this rank's column shards of the table.
        layout: the pieces of the table and their ranks.
        rank: this rank.
    """
    for shard in shards:
        shard.start_as(source.initializer)  # a loaded checkpoint may have set it
    state = state_for_copy(source, on_host=True)
    if not state["ids"].numel() and not int(state["step"]) and source.time is None:
        return
    parts = owners(state["ids"], layout.row_ranks) if layout.rows_are_spread else None
    pieces = {piece.first_column: piece for piece in layout.pieces}
    for shard in shards:
        piece = pieces[shard.first_column]
        part = piece.ranks.index(rank)
        mask = None if parts is None else torch.eq(parts, part)
        copied = state
        if source.optimizer.kind != shard.optimizer.kind:
            copied = without_optimizer(state, source.optimizer)
        mine = {name: _part(copied[name], mask, piece) for name in set(copied) - set(NOT_BY_ROW)}
        if "clock" in copied:
            mine["clock"] = copied["clock"]
        if "waiting" in copied:
            waiting = copied["waiting"]
            if layout.rows_are_spread:
                waiting = waiting[:, owners(waiting[0].contiguous(), layout.row_ranks) == part]
            mine["waiting"] = waiting
        shard.load_state(mine)


def _part(values: Tensor, mask: Tensor | None, piece: Piece) -> Tensor:
    """Returns the rows and columns of one shard from values [R, columns], [R] or []."""
    if values.dim() and mask is not None:
        values = values[mask]
    if values.dim() == 2:
        values = values[:, piece.first_column : piece.first_column + piece.columns]
    return values.contiguous()
