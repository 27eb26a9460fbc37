"""Records the changes of tables in their logs (storage/change_log.py), as long as a moment is held.

A table gets a log with its first moment. After its last moment was dropped, the next change drops the log.

Legend: T tables, N rows in table order, M ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torchrec_dyn.storage import ChangeLog, IdMap, Moment, list_bits, locked, write_marks

if TYPE_CHECKING:
    from torchrec_dyn.table.table import DynamicTable


@locked
def moment_of(table: DynamicTable) -> Moment:
    """Starts and returns a moment of a table. Changes of the table are recorded from now on."""
    log = changes_of(table)
    if log is None:
        log = ChangeLog(table.row_limit, table.device)
        log.reserve(table.row_numbers.high)
        table.changes = log
    return log.moment()


def changes_of(table: DynamicTable) -> ChangeLog | None:
    """Returns the log of a table. If no moment is held, drops the log and returns None."""
    if table.changes is not None and not table.changes.is_in_use:
        table.changes = None
    return table.changes


def note_added(table: DynamicTable, rows: Tensor) -> None:
    """Records rows that were just given to ids.

    Args:
        table: the table, with room reserved for the rows.
        rows: [M] int64.
    """
    log = changes_of(table)
    if log is not None:
        log.add(rows)


def note_changed(tables: Sequence[DynamicTable], rows: Tensor, table_offsets: Tensor) -> None:
    """Records rows that were written, or whose scores were written.

    Args:
        tables: T tables.
        rows: [N] int64 in table order; -1 is skipped. Rows of removed ids may be among them.
        table_offsets: [T + 1] int64, where the rows of each table begin.
    """
    logs = [changes_of(table) for table in tables]
    if any(log is not None for log in logs):
        marks = [None if log is None else log.changed for log in logs]
        numbers = [0 if log is None else log.number for log in logs]
        write_marks(marks, rows, table_offsets, numbers)


def marks_of_update(
    tables: Sequence[DynamicTable], noted: list[object] | None
) -> tuple[Sequence[Tensor], Tensor | None]:
    """Returns the arguments of `ops.update_rows_` with which the updated rows are recorded.

    Args:
        tables: T tables.
        noted: `tokens_of` the tables when the same rows were recorded before, else None. If no moment started
            since then, nothing is to be recorded.
    """
    if tokens_of(tables) == (noted or [None] * len(tables)):
        return (), None
    logs = [changes_of(table) for table in tables]
    return list_bits([None if log is None else log.changed for log in logs])


def tokens_of(tables: Sequence[DynamicTable]) -> list[object]:
    """Returns a token of each table's latest moment, new for each log and moment; None without a log."""
    return [None if table.changes is None else table.changes.token for table in tables]


def note_all_changed(table: DynamicTable) -> None:
    """Records that every row was written."""
    log = changes_of(table)
    if log is not None:
        log.changed.fill(log.number)


def note_replaced(table: DynamicTable, id_map: IdMap) -> None:
    """Records that the contents of a table were replaced. If this fails nothing is recorded.

    Args:
        table: the table, with its new contents.
        id_map: the former id map.
    """
    log = changes_of(table)
    if log is not None:
        log.replace_all(*id_map.contents(), table.row_numbers.high, table.device)
