"""What changes in a table is noted in its log, if anybody asks for it (storage/change_log.py).

A log is made at the first moment that is asked for, and dropped when nobody holds a moment any more.

Legend: T tables, N rows named, M ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torchrec_dyn.storage import ChangeLog, IdMap, Moment, write_marks

if TYPE_CHECKING:
    from torchrec_dyn.table.table import DynamicTable


def moment_of(table: DynamicTable) -> Moment:
    """Begins a moment of a table; its changes are kept from now on."""
    log = changes_of(table)
    if log is None:
        log = ChangeLog(table.row_limit, table.device)
        log.reserve(table.row_numbers.high)
        table.changes = log
    return log.moment()


def changes_of(table: DynamicTable) -> ChangeLog | None:
    """Returns where changes are noted; None, and what was noted is forgotten, where nobody asks."""
    if table.changes is not None and not table.changes.is_wanted:
        table.changes = None
    return table.changes


def note_came(table: DynamicTable, rows: Tensor) -> None:
    """Takes note of rows that ids just got.

    Args:
        table: with room reserved.
        rows: [M] int64.
    """
    log = changes_of(table)
    if log is not None:
        log.came(rows)


def note_left(table: DynamicTable, ids: Tensor, rows: Tensor) -> None:
    """Takes note of ids that just left.

    Args:
        table: any.
        ids: [M] int64.
        rows: [M] int64, which they held.
    """
    log = changes_of(table)
    if log is not None:
        log.left(ids, rows)


def note_changed(
    tables: Sequence[DynamicTable],
    rows: Tensor,
    table_offsets: Tensor,
    noted: list[object] | None = None,
) -> None:
    """Takes note that rows were written to, or seen where they are scored.

    Args:
        tables: T tables.
        rows: [N] int64 in table order, -1 for none. A row that its id has left does not count.
        table_offsets: [T + 1] int64, which rows are whose.
        noted: `tokens_of` the tables when these very rows were noted before: nothing to do if no moment
            began since.
    """
    if all(table.changes is None for table in tables) or tokens_of(tables) == noted:
        return
    logs = [changes_of(table) for table in tables]
    marks = [None if log is None else log.changed for log in logs]
    numbers = [0 if log is None else log.number for log in logs]
    write_marks(marks, rows, table_offsets, numbers)


def tokens_of(tables: Sequence[DynamicTable]) -> list[object]:
    """Returns what tells this moment of each table from any other, whatever log it is of."""
    return [None if table.changes is None else table.changes.token for table in tables]


def note_all_changed(table: DynamicTable) -> None:
    """Takes note that every row was written to."""
    log = changes_of(table)
    if log is not None:
        log.changed.fill(log.number)


def note_replaced(table: DynamicTable, id_map: IdMap) -> None:
    """Takes note that the contents of a table were replaced. If this fails nothing is noted.

    Args:
        table: with its contents of now.
        id_map: that of before.
    """
    log = changes_of(table)
    if log is not None:
        log.replaced(*id_map.contents(), table.row_numbers.high)
