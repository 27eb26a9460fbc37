"""The handle on one table of a sharded collection.

Its methods read this rank's shard; whole_model/by_id.py reads the whole table. `assign` and `erase` are
collective: every rank passes any ids, perhaps none. The ids are sent to their owners in all column shards.

Legend: M ids, C columns on this rank, R rows on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_dyn.ranks import Table


class ShardedTableHandle:
    """Reads this rank's shard of one table; edits and freezes the table on all ranks.

    Args:
        whole: the table.
        features: names of the features that read the table.
        frozen: names of the frozen tables of the collection, on every rank; `freeze` and `unfreeze` change
            this set.

    Attributes:
        features: names of the features that read the table.
        whole: the table over all ranks; all its calls by id are collective.
    """

    def __init__(self, whole: Table, features: Sequence[str], frozen: set[str]) -> None:
        self.whole = whole
        self.features = tuple(features)
        self._frozen = frozen

    @property
    def name(self) -> str:
        """The table's name."""
        return self.whole.name

    @property
    def num_rows(self) -> int:
        """Rows in use on this rank; several column shards count once."""
        return sum(shard.num_rows for shard in self.whole.shards[:1])

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """The ranges of columns on this rank, as (first column, number of columns)."""
        return tuple((shard.first_column, shard.columns) for shard in self.whole.shards)

    def ids(self) -> Tensor:
        """Returns the ids on this rank, [R] int64 in unsigned order of mix64(id)."""
        for shard in self.whole.shards:
            return shard.ids()
        return torch.empty(0, dtype=torch.int64, device=self.whole.device)

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by id. As `torchrec_dyn.lookup_rows`, for this rank's shard: rows are [M, C]."""
        return self.whole.rows_here(ids)

    def last_seen(self, ids: Tensor) -> Tensor:
        """Returns the step or time of each id's last occurrence in training.

        As `torchrec_dyn.read_last_seen`, for this rank's shard.
        """
        for shard in self.whole.shards:
            return shard.last_seen(ids)
        return torch.full_like(ids, -1, device=self.whole.device)

    def count(self, ids: Tensor) -> Tensor:
        """Returns each id's number of occurrences. As `torchrec_dyn.read_counts`, for this rank's shard."""
        for shard in self.whole.shards:
            return shard.count(ids)
        return torch.zeros_like(ids, device=self.whole.device)

    def stats(self) -> dict[str, int | float]:
        """Returns the counts of this rank's shard; if there are several column shards, of the first."""
        for shard in self.whole.shards:
            return shard.stats()
        return {"rows": 0, "limit": 0}

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Writes rows by id on all ranks. Collective. As `torchrec_dyn.assign_rows`."""
        self.whole.assign(ids, rows)

    def erase(self, ids: Tensor) -> int:
        """Removes ids on all ranks. Collective. As `torchrec_dyn.erase_rows`."""
        return self.whole.erase(ids)

    @property
    def is_frozen(self) -> bool:
        """True if the table is frozen: training reads it as evaluation does. The same on every rank."""
        return self.name in self._frozen

    def freeze(self) -> None:
        """Freezes the table on all ranks: until `unfreeze`, training reads it as evaluation does. Collective.

        As `TableHandle.freeze` of an unsharded table.

        Raises:
            ValueError: on every rank, if some rank makes another call, or the ranks have trained the table
                for different numbers of forwards; nothing has changed then.
        """
        self.whole.set_frozen(True)
        self._frozen.add(self.name)

    def unfreeze(self) -> None:
        """Unfreezes the table: from the next training forward on, training updates it again. Collective.

        Step, scores and optimizer state continue from their present values.

        Raises:
            ValueError: as `freeze`.
        """
        self.whole.set_frozen(False)
        self._frozen.discard(self.name)

    def __repr__(self) -> str:
        return f"ShardedTableHandle(name='{self.name}', num_rows={self.num_rows} on this rank)"
