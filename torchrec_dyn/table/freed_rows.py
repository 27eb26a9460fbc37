"""Removal: frees the rows of ids that leave the map of a table.

Legend: M ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from torchrec_dyn.table.changes import changes_of

if TYPE_CHECKING:
    from torchrec_dyn.table.table import DynamicTable


class Removal:
    """A prepared removal of ids of one table. Preparing changes nothing.

    Args:
        table: the table.
        ids: [M] int64, distinct.
        rows: [M] int64, the rows of these ids.
        cause: name of the counter of `stats` that counts these ids.
    """

    def __init__(self, table: DynamicTable, ids: Tensor, rows: Tensor, cause: str) -> None:
        self._table = table
        self._rows = rows
        self._counted = {cause: table.counters[cause] + rows.numel()}
        self._log = changes_of(table)
        self._logged = None if self._log is None else self._log.with_removed(ids, rows)

    def free_rows(self) -> None:
        """Frees the rows; a second call directly after changes nothing.

        The caller removes the ids from the map. The rows are reused as soon as no open forward can hold them.
        """
        if self._log is not None and self._logged is not None:
            self._log.removed = self._logged
        if self._table.life is not None:
            self._table.life.forget_rows(self._rows)
        self._table.row_numbers.give_back(self._rows)
        self._table.counters.update(self._counted)
