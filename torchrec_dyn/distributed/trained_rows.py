"""Rows trained before sharding move into the shards; each rank takes its own part.

The unsharded collection is replicated, so nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_dyn.life import NOT_BY_ROW
from torchrec_dyn.ranks import Piece, TableLayout, owners
from torchrec_dyn.table import DynamicTable, state_for_copy, without_optimizer


def carry_over(
    source: DynamicTable | None, shards: Sequence[DynamicTable], layout: TableLayout, rank: int
) -> None:
    """Fills this rank's shards of one table with its part of the unsharded rows.

    Scores, counters and clock come along, optimizer state where the shards have the same optimizer; a
    number per row is taken over by every column shard.

    Args:
        source: the unsharded table, None where nothing has used it.
        shards: this rank's column shards of it.
        layout: where the pieces of the table lie.
        rank: this rank.
    """
    if source is None:
        return
    for shard in shards:
        shard.start_as(source.initializer)  # perhaps that of a checkpoint
    state = state_for_copy(source)
    if not state["ids"].numel() and not int(state["step"]) and source.time is None:
        return
    parts = owners(state["ids"], layout.row_ranks) if layout.rows_are_spread else None
    pieces = {piece.first_column: piece for piece in layout.pieces}
    for shard in shards:
        piece = pieces[shard.first_column]
        part = piece.ranks.index(rank)
        kept = None if parts is None else torch.eq(parts, part)
        taken = state
        if source.optimizer.kind != shard.optimizer.kind:
            taken = without_optimizer(state, source.optimizer)
        mine = {name: _part(taken[name], kept, piece) for name in set(taken) - set(NOT_BY_ROW)}
        if "clock" in taken:
            mine["clock"] = taken["clock"]
        if "waiting" in taken:
            waiting = taken["waiting"]
            if layout.rows_are_spread:
                waiting = waiting[:, owners(waiting[0].contiguous(), layout.row_ranks) == part]
            mine["waiting"] = waiting
        shard.load_state(mine)


def _part(saved: Tensor, kept: Tensor | None, piece: Piece) -> Tensor:
    """Cuts a saved tensor, [R, columns], [R] or [], down to the rows and columns of a shard."""
    if saved.dim() and kept is not None:
        saved = saved[kept]
    if saved.dim() == 2:
        saved = saved[:, piece.first_column : piece.first_column + piece.columns]
    return saved.contiguous()
