"""Finds the rows of ids and inserts unseen ids: into all tables of a lookup, or into none.

Legend: T tables, N ids, M distinct unseen ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.storage import arrays_of

if TYPE_CHECKING:
    from torchrec_dyn.table.table import DynamicTable


def find_rows(
    tables: Sequence[DynamicTable], ids: Tensor, table_offsets: Tensor
) -> tuple[Tensor, list[int]]:
    """Finds the rows of ids.

    Args:
        tables: T tables.
        ids: [N] int64 in table order.
        table_offsets: [T + 1] int64, where the ids of each table begin.

    Returns:
        rows: [N] int64, -1 for an absent id.
        absent: [T], number of absent ids of each table, repeats counted.
    """
    rows, absent = ops.lookup(ids, table_offsets, *arrays_of([table.id_map for table in tables]))
    counts: list[int] = absent.tolist()
    return rows, counts


def split_by_table(new_ids: Tensor, new_offsets: Tensor) -> tuple[Tensor, ...]:
    """Returns the new ids of `ops.collect_new`, split by table.

    Args:
        new_ids: [M] int64.
        new_offsets: [T + 1] int64, where the new ids of each table begin.
    """
    return new_ids.split(new_offsets.diff().tolist())


def insert_unseen(
    tables: Sequence[DynamicTable], ids: Tensor, rows: Tensor, table_offsets: Tensor
) -> None:
    """Inserts the absent ids of a lookup, whatever the policies, and writes their rows into `rows`.

    Args:
        tables: T tables.
        ids: [N] int64 in table order.
        rows: [N] int64 of `ops.lookup`; -1 becomes the new row, in place.
        table_offsets: [T + 1] int64, where the ids of each table begin.

    Raises:
        RuntimeError: a table is full or memory is out; all tables hold the same ids as before.
    """
    new_ids, _, new_offsets, new_index = ops.collect_new(ids, rows, table_offsets)
    per_table = split_by_table(new_ids, new_offsets)
    for table, fresh in zip(tables, per_table, strict=True):
        table.check_room(fresh.numel())
    for table, fresh in zip(tables, per_table, strict=True):
        table.reserve(fresh.numel())
    new_rows = torch.cat(
        [table.add_rows(fresh) for table, fresh in zip(tables, per_table, strict=True)]
    )
    ops.insert(new_ids, new_rows, new_offsets, *arrays_of([table.id_map for table in tables]))
    ops.fill_new_(rows, new_index, new_rows)
