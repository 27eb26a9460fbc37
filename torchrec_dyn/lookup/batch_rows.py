"""The rows of a batch in training: tables that learn take it in, frozen ones are only read.

A forward asks once which tables are frozen, before anything else, and its backward goes by that answer.

Legend: T tables, N ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.lookup.table_blocks import TableBlocks, scores_of
from torchrec_dyn.lookup.training_step import count_step, take_step
from torchrec_dyn.table import DynamicTable, find_rows, insert_unseen


class BatchRows(NamedTuple):
    """The rows of the ids of a batch.

    Attributes:
        learning: [N] int64, those that a backward may write to; -1: none, it learns nothing.
        read: [N] int64, those that are read; -1: none. The same tensor where no table is frozen.
        missing: how many of `read` are -1.
    """

    learning: Tensor
    read: Tensor
    missing: int


class BatchPart(NamedTuple):
    """What some tables of a group have of a batch.

    Attributes:
        places: [N] bool, which ids are theirs.
        ids: theirs.
        table_offsets: [some + 1] int64, which of these are whose.
        bounds: the same as numbers.
    """

    places: Tensor
    ids: Tensor
    table_offsets: Tensor
    bounds: list[int]


def part_of(
    some: Sequence[DynamicTable],
    tables: Sequence[DynamicTable],
    ids: Tensor,
    bounds: Sequence[int],
) -> BatchPart:
    """Cuts out of a batch what some of the tables have of it.

    Args:
        some: of the tables, in their order.
        tables: T tables.
        ids: [N] int64 in table order.
        bounds: [T + 1], which ids are whose.
    """
    chosen = [table in some for table in tables]
    sizes = [end - begin for begin, end in pairwise(bounds)]
    places = torch.tensor(chosen).repeat_interleave(torch.tensor(sizes))
    of_some = [size for size, is_chosen in zip(sizes, chosen, strict=True) if is_chosen]
    ends = list(accumulate(of_some, initial=0))
    return BatchPart(places, ids[places], torch.tensor(ends), ends)


def take_in(
    tables: Sequence[DynamicTable],
    ids: Tensor,
    table_offsets: Tensor,
    bounds: Sequence[int],
    scores: Callable[[], TableBlocks],
    times: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Counts a training step of all tables, gives rows to unseen ids as the policies say, and finds the rows.

    Args:
        tables: T tables, none frozen.
        ids: [N] int64 in table order.
        table_offsets: [T + 1] int64, which ids are whose.
        bounds: the same as numbers.
        scores: lists the scores of the tables as they are by then.
        times: [N] int64, how often ids of tables with a life occurred; None: once.

    Returns:
        rows: [N] int64, -1 of an id that was not admitted.
        refused: how many of them are -1.

    Raises:
        RuntimeError: a table is full, or memory is out; no table has changed.
    """
    if any(table.life is not None for table in tables):
        return take_step(tables, ids, table_offsets, bounds, scores, times)
    rows, absent = find_rows(tables, ids, table_offsets)
    if any(absent):
        insert_unseen(tables, ids, rows, table_offsets)
    for table, (begin, end), missing in zip(tables, pairwise(bounds), absent, strict=True):
        count_step(table, end - begin, missing)
    return rows, 0


def take_in_beside_frozen(
    tables: Sequence[DynamicTable],
    learning: Sequence[DynamicTable],
    ids: Tensor,
    bounds: Sequence[int],
    times: Tensor | None = None,
) -> BatchRows:
    """Lets the tables that are not frozen take a batch in, and finds the rows of the frozen ones.

    Args:
        tables: T tables.
        learning: those not frozen, in their order; some, not all.
        ids: [N] int64 in table order.
        bounds: [T + 1], which ids are whose.
        times: as `take_in`.

    Raises:
        RuntimeError: a table is full, or memory is out; no table has changed.
    """
    taken = part_of(learning, tables, ids, bounds)
    rows, refused = take_in(
        learning,
        taken.ids,
        taken.table_offsets,
        taken.bounds,
        lambda: scores_of(learning),
        None if times is None else times[taken.places],
    )
    learnt = torch.full_like(ids, -1).masked_scatter_(taken.places, rows)
    frozen = [table for table in tables if table not in learning]
    found = part_of(frozen, tables, ids, bounds)
    rows, absent = find_rows(frozen, found.ids, found.table_offsets)
    return BatchRows(learnt, learnt.masked_scatter(found.places, rows), refused + sum(absent))
