"""TableHandle: what `collection.table(name)` returns, sharded or not.

Legend: M ids, C columns on this rank, R rows on this rank.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.ranks.table import Table
from torchrec_dyn.table import check_ids


class TableOwner(Protocol):
    """Protocol of the object that a handle asks: one table in its collection."""

    @property
    def name(self) -> str:
        """The table's name."""

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features that read the table."""

    @property
    def is_frozen(self) -> bool:
        """True if the table is frozen, the same on every rank."""

    def set_frozen(self, is_frozen: bool) -> None:
        """Freezes or unfreezes the table. Collective if it is sharded."""

    def as_table(self) -> Table:
        """Returns the table as it is now."""

    def editing(self) -> AbstractContextManager[object]:
        """Returns a context in which nothing of this process replaces what `as_table` returns."""


class TableHandle:
    """Reads and edits the rows of one table, outside training.

    Reading inserts nothing. No call counts as a training step or takes part in autograd.

    Of a sharded table a handle reads this rank's shard; `assign`, `erase`, `freeze` and `unfreeze` are
    collective: every rank calls them, with any ids, perhaps none. An unsharded table is here as a whole.

    Args:
        owner: the table in its collection. The handle stays valid when the table is converted, loaded or
            moved to another plan.
    """

    def __init__(self, owner: TableOwner) -> None:
        self._owner = owner

    @property
    def name(self) -> str:
        """The table's name."""
        return self._owner.name

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features that read the table."""
        return self._owner.features

    @property
    @not_compiled
    def whole(self) -> Table:
        """The table over all ranks; all its calls by id are collective."""
        return self._owner.as_table()

    @property
    @not_compiled
    def num_rows(self) -> int:
        """Rows in use on this rank; several column shards count once."""
        return sum(shard.num_rows for shard in self.whole.shards[:1])

    @property
    @not_compiled
    def columns(self) -> tuple[tuple[int, int], ...]:
        """The ranges of columns on this rank, as (first column, number of columns)."""
        return tuple((shard.first_column, shard.columns) for shard in self.whole.shards)

    @not_compiled
    def ids(self) -> Tensor:
        """Returns the ids on this rank, [R] int64 in canonical order: by mixed id, unsigned."""
        table = self.whole
        for shard in table.shards:
            return shard.ids()
        return torch.empty(0, dtype=torch.int64, device=table.device)

    @not_compiled
    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by id. As `torchrec_dyn.lookup_rows`, for this rank's shard: rows are [M, C]."""
        return self.whole.rows_here(ids)

    @not_compiled
    def last_seen(self, ids: Tensor) -> Tensor:
        """Returns the step or time of each id's last occurrence in training.

        As `torchrec_dyn.read_last_seen`, for this rank's shard.
        """
        table = self.whole
        for shard in table.shards:
            return shard.last_seen(ids)
        return torch.full_like(_checked(table, "last_seen", ids), -1, device=table.device)

    @not_compiled
    def count(self, ids: Tensor) -> Tensor:
        """Returns each id's number of occurrences. As `torchrec_dyn.read_counts`, for this rank's shard."""
        table = self.whole
        for shard in table.shards:
            return shard.count(ids)
        return torch.zeros_like(_checked(table, "count", ids), device=table.device)

    @not_compiled
    def stats(self) -> dict[str, int | float]:
        """Returns the counts of this rank's shard; if there are several column shards, of the first.

        As `torchrec_dyn.read_stats`; a rank without a shard has rows and limit 0 only.
        """
        for shard in self.whole.shards:
            return shard.stats()
        return {"rows": 0, "limit": 0}

    @not_compiled
    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Writes rows by id, on all ranks. As `torchrec_dyn.assign_rows`."""
        with self._owner.editing():
            self.whole.assign(ids, rows)

    @not_compiled
    def erase(self, ids: Tensor) -> int:
        """Removes ids, on all ranks, and returns how many had a row. As `torchrec_dyn.erase_rows`."""
        with self._owner.editing():
            return self.whole.erase(ids)

    @property
    def is_frozen(self) -> bool:
        """True if the table is frozen: training reads it as evaluation does. The same on every rank."""
        return self._owner.is_frozen

    @not_compiled
    def freeze(self) -> None:
        """Freezes the table: until `unfreeze`, training reads it as evaluation does.

        From the next forward on no id is added, removed or counted, and the step, rows, scores and optimizer
        state do not change. Weights of bags still get gradients. The backward of an earlier forward
        still updates rows. `assign`, `erase`, loading and `set_time` work as before. Copies of the table are
        frozen too; checkpoints do not record that a table is frozen. On an unsharded table `freeze` is
        equivalent to `requires_grad_(False)` on the table's parameter.

        Raises:
            ValueError: on every rank, if some rank makes another call, or the ranks have trained the table
                for different numbers of forwards; nothing has changed then.
        """
        self._owner.set_frozen(True)

    @not_compiled
    def unfreeze(self) -> None:
        """Unfreezes the table: from the next training forward on, training updates it again.

        Step, scores and optimizer state continue from their present values.

        Raises:
            ValueError: as `freeze`.
        """
        self._owner.set_frozen(False)

    def __repr__(self) -> str:
        where = "" if self.whole.group is None else " on this rank"
        return f"TableHandle(name='{self.name}', num_rows={self.num_rows}{where})"


def _checked(table: Table, call: str, ids: Tensor) -> Tensor:
    """Returns the ids of a call on a rank without a shard, which another rank would check."""
    return check_ids(f"{table.where}.{call}", ids)
