"""The rows of a batch in training. Trained tables may change, frozen tables are only read.

A forward reads `is_frozen` of all tables once, at its start; its backward uses the same values.

Legend: T tables, N ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.lookup.early_output import EarlyOutput
from torchrec_dyn.lookup.found_rows import FoundRows
from torchrec_dyn.lookup.table_lists import TableLists, TrainedTables
from torchrec_dyn.lookup.training_step import take_step
from torchrec_dyn.table import find_rows, insert_unseen


class BatchRows(NamedTuple):
    """The rows of the ids of a batch.

    Attributes:
        learning: [N] int64, the rows that the backward updates; -1 for an id without an update.
        read: [N] int64, the rows that the forward reads, -1 if absent. The same tensor as `learning` if no
            table is frozen.
        missing: number of -1 in `read`; with `times`, an id of a trained table counts `times` times.
    """

    learning: Tensor
    read: Tensor
    missing: int


class BatchPart(NamedTuple):
    """The part of a batch that belongs to chosen tables of a group.

    Attributes:
        mask: [N] bool, True for ids of the chosen tables.
        ids: [n] int64, those ids.
        table_offsets: [chosen tables + 1] int64, where the ids of each chosen table begin.
        times: [n] int64, the times of those ids; None without times.
    """

    mask: Tensor
    ids: Tensor
    table_offsets: Tensor
    times: Tensor | None


def part_of(
    is_chosen: Tensor, ids: Tensor, table_offsets: Tensor, times: Tensor | None = None
) -> BatchPart:
    """Returns the part of a batch that belongs to chosen tables.

    is_chosen [T] bool on the CPU; ids [N] int64 in table order; table_offsets [T + 1] int64 on the CPU, where
    the ids of each table begin; times [N] int64, or None.
    """
    sizes = table_offsets.diff()
    ends = torch.cat([table_offsets[:1], sizes[is_chosen].cumsum(0)])
    chosen, of_tables = (
        numbers.to(ids.device, non_blocking=True) for numbers in (is_chosen, sizes)
    )
    mask = chosen.repeat_interleave(of_tables, output_size=ids.numel())
    both = [ids] if times is None else [ids, times]
    if ids.is_cpu:
        selected = [numbers[mask] for numbers in both]
    else:  # not by the mask: the host would read how many ids it selects
        places = is_chosen.nonzero().flatten().tolist()
        parts = [numbers.split(sizes.tolist()) for numbers in both]
        selected = [torch.cat([of_tables[place] for place in places]) for of_tables in parts]
    return BatchPart(mask, selected[0], ends, None if times is None else selected[1])


def rows_in_training(
    trained: TrainedTables,
    ids: Tensor,
    table_offsets: Tensor,
    times: Tensor | None = None,
    found: FoundRows | None = None,
    early: EarlyOutput | None = None,
) -> tuple[Tensor, int]:
    """Runs one training step of trained tables and returns the rows of the batch.

    As `take_step`, but all tables may be without a life. Then every unseen id gets a row.
    """
    if trained.with_life:
        return take_step(trained, ids, table_offsets, times, found, early)
    if found is None:
        pool = None if early is None else early.pool
        rows, absent = find_rows(trained.maps, ids, table_offsets, pool)
    else:
        rows, absent = found[:2]
    is_known = not any(absent.tolist())
    if not is_known:
        new_index = insert_unseen(trained.tables, ids, rows, table_offsets)
        if early is not None:
            early.new_index = new_index
    shared = trained.shared
    shared.counted = shared.counted.after(table_offsets, None if is_known else absent)
    return rows, 0


def rows_beside_frozen(
    lists: TableLists,
    ids: Tensor,
    table_offsets: Tensor,
    times: Tensor | None = None,
) -> BatchRows:
    """Runs one training step of the trained tables, and finds the rows of the frozen tables.

    As `take_step`, with the ids of all T tables, some of which are frozen, but not all.
    """
    assert lists.trained is not None and lists.frozen_maps is not None
    part = part_of(lists.is_trained, ids, table_offsets, times)
    rows, refused = rows_in_training(lists.trained, part.ids, part.table_offsets, part.times)
    learning_rows = torch.full_like(ids, -1).masked_scatter_(part.mask, rows)
    read = part_of(~lists.is_trained, ids, table_offsets)
    rows, absent = find_rows(lists.frozen_maps, read.ids, read.table_offsets)
    read_rows = learning_rows.masked_scatter(read.mask, rows)
    return BatchRows(learning_rows, read_rows, refused + sum(absent.tolist()))
