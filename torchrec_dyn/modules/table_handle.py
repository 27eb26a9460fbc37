"""What `collection.table(name)` gives: one unsharded table, to look into and to edit."""

from __future__ import annotations

from torch import Tensor

from torchrec_dyn.modules.unsharded_table import LocalTable


class TableHandle:
    """Reads and edits the rows of one table, outside training.

    Nothing here inserts by looking, counts as a step, or takes part in autograd.

    Args:
        table: the table. The handle follows it through conversions and loads.
    """

    def __init__(self, table: LocalTable) -> None:
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
        """Gives the ids that have a row, [R] int64, in the unsigned order of their mixed ids."""
        return self._table.rows().ids()

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads the rows of ids.

        Args:
            ids: [M] int64. Any value is legal.

        Returns:
            rows: [M, embedding_dim] in the table's dtype; zeros where there is no row.
            found: [M] bool, True where the id has a row.
        """
        return self._table.rows().lookup(ids)

    def last_seen(self, ids: Tensor) -> Tensor:
        """Tells when training last saw each id.

        Args:
            ids: [M] int64.

        Returns:
            [M] int64, training steps (clock values with `ExpireAfter(time=...)`); -1 where an id
            has no row.

        Raises:
            ValueError: if the table has no policy that keeps this.
        """
        return self._table.rows().last_seen(ids)

    def count(self, ids: Tensor) -> Tensor:
        """Tells how often training has seen each id.

        Args:
            ids: [M] int64.

        Returns:
            [M] int64; of an id that waits for admission its counter; 0 otherwise.

        Raises:
            ValueError: if the table has no policy that keeps this.
        """
        return self._table.rows().count(ids)

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Writes rows; an id without one gets one, with fresh optimizer state.

        Args:
            ids: [M] int64.
            rows: [M, embedding_dim].
        """
        self._table.rows().assign(ids, rows)

    def erase(self, ids: Tensor) -> int:
        """Drops rows by id; such an id starts anew when training sees it next.

        Args:
            ids: [M] int64; ids without a row are passed over.

        Returns:
            how many ids had a row.
        """
        return self._table.rows().erase(ids)

    @property
    def is_frozen(self) -> bool:
        """Whether training reads the table as evaluation does."""
        return self._table.is_frozen

    def freeze(self) -> None:
        """Lets training read the table as evaluation does, until `unfreeze`.

        From the next forward on no id comes or goes or is counted, the step stays, and no row, score or
        optimizer state changes; weights of bags still get gradients. A forward from before still
        learns in its backward. `assign`, `erase`, loading and `set_time` go on as ever. Copies are
        frozen too; a checkpoint says nothing of it. The same as `requires_grad_(False)` on the
        table's parameter.
        """
        self._table.weight.requires_grad_(False)

    def unfreeze(self) -> None:
        """Lets the table learn from the next training forward on, from where it was frozen."""
        self._table.weight.requires_grad_(True)

    def stats(self) -> dict[str, int | float]:
        """Gives the table's counts."""
        return self._table.rows().stats()

    def __repr__(self) -> str:
        return f"TableHandle(name='{self.name}', num_rows={self.num_rows})"
