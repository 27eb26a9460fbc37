"""The handle on one unsharded table that `collection.table(name)` returns."""

from __future__ import annotations

from torch import Tensor

from torchrec_dyn.modules.unsharded_table import UnshardedTable


class TableHandle:
    """Reads and edits the rows of one table, outside training.

    Reading inserts nothing; no call counts as a step or takes part in autograd.

    Args:
        table: the table. The handle stays valid through conversions and loads.
    """

    def __init__(self, table: UnshardedTable) -> None:
        self._table = table

    @property
    def name(self) -> str:
        """The table's name."""
        return self._table.config.name

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return self._table.rows().num_rows

    def ids(self) -> Tensor:
        """Returns the ids that have a row. As `torchrec_dyn.read_ids`, of this table."""
        return self._table.rows().ids()

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by id. As `torchrec_dyn.lookup_rows`, of this table."""
        return self._table.rows().lookup(ids)

    def last_seen(self, ids: Tensor) -> Tensor:
        """Returns when training last saw each id. As `torchrec_dyn.read_last_seen`, of this table."""
        return self._table.rows().last_seen(ids)

    def count(self, ids: Tensor) -> Tensor:
        """Returns how often training has seen each id. As `torchrec_dyn.read_counts`, of this table."""
        return self._table.rows().count(ids)

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Writes rows by id. As `torchrec_dyn.assign_rows`, of this table."""
        self._table.rows().assign(ids, rows)

    def erase(self, ids: Tensor) -> int:
        """Drops rows by id and returns how many ids had one. As `torchrec_dyn.erase_rows`, of this table."""
        return self._table.rows().erase(ids)

    @property
    def is_frozen(self) -> bool:
        """True if training reads the table as evaluation does."""
        return self._table.is_frozen

    def freeze(self) -> None:
        """Makes training read the table as evaluation does, until `unfreeze`.

        From the next forward on no id is added, removed or counted, the step stays, and no row, score or
        optimizer state changes; weights of bags still get gradients. The backward of an earlier forward
        still updates rows. `assign`, `erase`, loading and `set_time` work as before. Copies are frozen too;
        a checkpoint does not record it. The same as `requires_grad_(False)` on the table's parameter.
        """
        self._table.weight.requires_grad_(False)

    def unfreeze(self) -> None:
        """Makes the table learn again from the next training forward on, from where it was frozen."""
        self._table.weight.requires_grad_(True)

    def stats(self) -> dict[str, int | float]:
        """Returns the table's counts. As `torchrec_dyn.read_stats`, of this table."""
        return self._table.rows().stats()

    def __repr__(self) -> str:
        return f"TableHandle(name='{self.name}', num_rows={self.num_rows})"
