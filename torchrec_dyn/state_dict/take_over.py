"""What was read of a checkpoint becomes a table's contents: staged stores take the place of its own.

Legend: R rows that came.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn.initializers import Initializer
from torchrec_dyn.life import Clock, RowLife
from torchrec_dyn.state_dict.staged_rows import StagedRows
from torchrec_dyn.storage import RowNumbers, RowStore
from torchrec_dyn.table import DynamicTable, note_replaced


def take_over(
    table: DynamicTable,
    staged: StagedRows,
    clock: Tensor | None,
    initializer: Initializer | None,
    step: int,
) -> None:
    """Replaces a table's contents; optimizer state starts afresh until its own state dict is loaded.

    Args:
        table: one shard.
        staged: checked and verified; not to be used afterwards.
        clock: [2, K] int64 as saved, or None.
        initializer: of the checkpoint, for ids to come; None: the table's own.
        step: the last one that any rank's rows know of; only scores need one.
    """
    rows, shift = staged.close_up(), table.weights.shift
    columns, dtype, device = table.columns, table.dtype, table.device
    weights = staged.weights
    if weights.dtype != dtype:
        weights = weights.converted(columns, dtype, lambda block: block)
    before = table.id_map
    table.reset(dtype, device)
    table.id_map, table.weights = staged.id_map, weights
    table.row_numbers = RowNumbers(table.forwards)
    table.row_numbers.high = rows
    table.row_numbers.give_back(torch.cat([torch.empty(0, dtype=torch.int64), *staged.others]))
    states = [RowStore(state.columns, shift, state.dtype, device) for state in table.states]
    for state in states:
        state.reserve_zeros(rows)
    table.states = tuple(states)
    table.step = 0
    if table.life is not None:
        table.step = step
        _take_over_life(table.life, table, staged, clock, rows)
    note_replaced(table, before)
    if initializer is not None:
        table.start_as(initializer)


def _take_over_life(
    life: RowLife, table: DynamicTable, staged: StagedRows, clock: Tensor | None, rows: int
) -> None:
    if clock is not None and life.is_timed:
        life.clock = Clock.load(clock)
    if life.waiting is not None and staged.waiting is not None:
        life.waiting = staged.waiting
    table.step = max(table.step, life.clock.present_step - 1)
    life.is_unscored = not staged.has_scores
    if staged.has_scores:
        life.scores = staged.scores
    else:
        life.scores.store.reserve_zeros(rows)
        life.catch_up(max(table.step, life.clock.present_step), rows)
    for others in staged.others:
        life.scores.forget(others)
