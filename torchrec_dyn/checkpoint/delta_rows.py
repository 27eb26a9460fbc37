"""Writes the rows of a delta into one shard of a table.

Legend: M rows of a stretch, N ids that left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import CHUNK_BYTES, mean_over_cuts
from torchrec_dyn.life import Clock
from torchrec_dyn.state_dict import StagedRows
from torchrec_dyn.storage import IdMap, RowStore
from torchrec_dyn.table import DynamicTable, named_states, note_came, note_changed


def rows_replaced(shard: DynamicTable, staged: StagedRows, removed: Tensor) -> IdMap:
    """Maps the ids of a shard whose rows a delta takes out or writes anew.

    Args:
        shard: of the table.
        staged: what came for it.
        removed: [N] int64, those ids of the shard that left.
    """
    ids, rows = [removed], [shard.id_map.lookup(removed)]
    for some, _ in _stretches(staged):
        ids.append(some)
        rows.append(shard.id_map.lookup(some))
    all_ids, all_rows = torch.cat(ids), torch.cat(rows)
    is_here = all_rows >= 0
    made = IdMap(int(is_here.sum()))
    made.reserve(int(is_here.sum()))
    made.insert(all_ids[is_here], all_rows[is_here])
    return made


def reserve_rows(shard: DynamicTable, staged: StagedRows) -> None:
    """Takes the memory for ids that a shard does not have yet, whatever its limit."""
    absent = [int((shard.id_map.lookup(ids) < 0).sum()) for ids, _ in _stretches(staged)]
    shard.reserve(sum(absent))


def write_rows(
    shard: DynamicTable,
    staged: StagedRows,
    removed: Tensor,
    states: Mapping[str, RowStore],
    cuts: Sequence[int],
    clock: Tensor | None,
    step: int,
) -> None:
    """Takes ids out of a shard and writes what came, checked, with memory reserved.

    Args:
        shard: of the table.
        staged: what came for it.
        removed: [N] int64, those ids of the shard that left.
        states: optimizer state by name, in the rows of `staged`; of row-wise state all cuts.
        cuts: of the delta.
        clock: [2, K] int64, or None for none.
        step: of the table.
    """
    ids, rows = shard.id_map.erase(removed)
    shard.free(ids, rows, "erased")
    columns = (shard.first_column, shard.first_column + shard.columns)
    for ids, came in _stretches(staged):
        rows = _rows_of(shard, ids)
        shard.weights.write(rows, staged.weights.read(came))
        for one in named_states(shard):
            values = states[one.name].read(came)
            one.store.write(
                rows, mean_over_cuts(values, cuts, columns) if one.is_rowwise else values
            )
        if shard.life is not None:
            shard.life.scores.write(rows, *staged.scores.read(came))
        note_changed([shard], rows, torch.tensor([0, rows.numel()]))
    if shard.life is not None:
        shard.life.forget_listed()
        shard.life.is_unscored = False
        if staged.waiting is not None:
            shard.life.waiting = staged.waiting
        if shard.life.is_timed:
            shard.life.clock = Clock() if clock is None else Clock.load(clock)
    shard.step = step
    shard.generation += 1  # a forward of before must not write to these rows


def _rows_of(shard: DynamicTable, ids: Tensor) -> Tensor:
    """Gives the rows of ids, fresh ones to those that have none; nothing is written to these yet."""
    rows = shard.id_map.lookup(ids)
    is_new = rows < 0
    fresh = shard.row_numbers.take(int(is_new.sum()))
    shard.id_map.insert(ids[is_new], fresh)
    note_came(shard, fresh)
    shard.counters["inserted"] += fresh.numel()
    rows[is_new] = fresh
    return rows


def _stretches(staged: StagedRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Walks ids and rows of what came, some at a time."""
    most = max(1, CHUNK_BYTES // staged.weights.row_bytes)
    return staged.canonical().stretches(most)
