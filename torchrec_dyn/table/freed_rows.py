"""Removal: takes ids out of a table and frees their rows.

Legend: M ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from torchrec_dyn.storage import Reading, run_to_end
from torchrec_dyn.table.changes import changes_of

if TYPE_CHECKING:
    from torchrec_dyn.table.table import DynamicTable


class Removal:
    """A prepared removal of ids of one table; `prepare` makes it."""

    def __init__(self, table: DynamicTable, ids: Tensor, rows: Tensor, cause: str) -> None:
        self._table = table
        self._ids = ids
        self._rows = rows
        self._left = table.id_map.num_ids - ids.numel()
        self._counted = {cause: table.counters[cause] + rows.numel()}
        self._log = changes_of(table)
        self._logged = None if self._log is None else self._log.removed

    @classmethod
    def prepare(
        cls, table: DynamicTable, ids: Tensor, rows: Tensor, cause: str
    ) -> Reading[Removal]:
        """Prepares a removal and changes nothing.

        Args:
            table: the table.
            ids: [M] int64, distinct.
            rows: [M] int64, the rows of these ids.
            cause: name of the counter of `stats` that counts these ids.
        """
        removal = cls(table, ids, rows, cause)
        if removal._log is not None:
            removal._logged = yield from removal._log.with_removed(ids, rows)
        return removal

    def commit(self) -> None:
        """Removes the ids and frees their rows: of all ids or of none."""
        run_to_end(lambda _: self._table.id_map.remove(self._ids, self._left), self.free_rows)

    def free_rows(self, _: bool = False) -> None:
        """Frees the rows of ids that are not in the map; a second call directly after changes nothing.

        The rows are reused as soon as no open forward can hold them.
        """
        if self._log is not None and self._logged is not None:
            self._log.removed = self._logged
        if self._table.life is not None:
            self._table.life.forget_rows(self._rows)
        self._table.row_numbers.give_back(self._rows)
        self._table.counters.update(self._counted)
