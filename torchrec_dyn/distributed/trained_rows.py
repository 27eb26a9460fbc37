"""Copies rows that were trained before sharding into the shards.

Every rank has the whole unsharded collection and copies its part, so nothing is sent.

Legend: R rows.
"""

from __future__ import annotations

from torch import Tensor

from torchrec_dyn.life import NOT_BY_ROW
from torchrec_dyn.ranks import Table
from torchrec_dyn.table import DynamicTable, state_for_copy, without_optimizer


def copy_trained_rows(source: DynamicTable, table: Table) -> None:
    """Fills this rank's shards of one table with its part of the unsharded rows.

    Scores, admission counters and clock are copied too. Optimizer state is copied if the shards have the same
    kind of optimizer; state of one number per row is copied to every column shard.

    Args:
        source: the unsharded table.
        table: the sharded table, without rows.
    """
    for shard in table.shards:
        shard.start_as(source.initializer)  # a loaded checkpoint may have set it
    state = state_for_copy(source, on_host=True)
    if not state["ids"].numel() and not int(state["step"]) and source.time is None:
        return
    if table.shards and source.optimizer.kind != table.optimizer.kind:
        state = without_optimizer(state, source.optimizer)
    mask = table.owns(state["ids"]) if table.layout.rows_are_spread else None
    if "waiting" in state and mask is not None:
        state["waiting"] = state["waiting"][:, table.owns(state["waiting"][0])]
    for shard in table.shards:
        mine = {name: state[name] for name in NOT_BY_ROW if name in state}
        for name in state.keys() - mine:
            mine[name] = _part(state[name], mask, shard)
        shard.load_state(mine)


def _part(values: Tensor, mask: Tensor | None, shard: DynamicTable) -> Tensor:
    """Returns the rows and columns of one shard from values [R, columns], [R] or []."""
    if values.dim() and mask is not None:
        values = values[mask]
    if values.dim() == 2:
        values = values[:, shard.first_column : shard.first_column + shard.columns]
    return values.contiguous()
