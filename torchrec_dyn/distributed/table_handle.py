"""The handle on one table of a sharded collection.

Its methods read this rank's shard; whole_model/by_id.py reads the whole table. `assign` and `erase` are
collective: every rank passes any ids, perhaps none. The ids are sent to their owners in all column shards.

Legend: M ids, C columns on this rank, R rows on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_dyn.distributed.whole_table import WholeTable, read_rows
from torchrec_dyn.modules import row_dtype
from torchrec_dyn.ranks import TableLayout
from torchrec_dyn.table import DynamicTable


class ShardedTableHandle:
    """Reads this rank's shard of one table; edits and freezes the table on all ranks.

    Args:
        name: the table's name.
        where: the collection and the table, for messages.
        layout: the pieces of the table and their ranks.
        shards: this rank's column shards in column order; may be empty.
        config: the table's config.
        process_group: the ranks.
        frozen: names of the frozen tables of the collection, on every rank; `freeze` and `unfreeze` change
            this set.
        device: device of the rows and of the tensors that methods return; arguments may be on any device.

    Attributes:
        features: names of the features that read the table.
        whole: the table over all ranks; all its methods are collective.
    """

    def __init__(
        self,
        name: str,
        where: str,
        layout: TableLayout,
        shards: Sequence[DynamicTable],
        config: BaseEmbeddingConfig,
        process_group: dist.ProcessGroup,
        frozen: set[str],
        device: torch.device,
    ) -> None:
        self.name = name
        self._frozen = frozen
        self.features = tuple(config.feature_names)
        self._shards = list(shards)
        self._dtype, self._device = row_dtype(config), device
        self.whole = WholeTable(
            where, layout, self._shards, config.embedding_dim, self._dtype, process_group, device
        )

    def update_from(self, other: ShardedTableHandle) -> None:
        """Sets this handle and `whole` to the shards of another handle. Called after the table has moved."""
        whole = self.whole
        self.__dict__.update(other.__dict__)
        whole.__dict__.update(other.whole.__dict__)
        self.whole = whole

    @property
    def num_rows(self) -> int:
        """Rows in use on this rank; several column shards count once."""
        return self._shards[0].num_rows if self._shards else 0

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """The ranges of columns on this rank, as (first column, number of columns)."""
        return tuple((shard.first_column, shard.columns) for shard in self._shards)

    def ids(self) -> Tensor:
        """Returns the ids on this rank, [R] int64 in unsigned order of mix64(id)."""
        if self._shards:
            return self._shards[0].ids()
        return torch.empty(0, dtype=torch.int64, device=self._device)

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows by id. As `torchrec_dyn.lookup_rows`, for this rank's shard: rows are [M, C]."""
        return read_rows(self._shards, ids, self._dtype, self._device)

    def last_seen(self, ids: Tensor) -> Tensor:
        """Returns the step or time of each id's last occurrence in training.

        As `torchrec_dyn.read_last_seen`, for this rank's shard.
        """
        if self._shards:
            return self._shards[0].last_seen(ids)
        return torch.full_like(ids, -1, device=self._device)

    def count(self, ids: Tensor) -> Tensor:
        """Returns each id's number of occurrences. As `torchrec_dyn.read_counts`, for this rank's shard."""
        if self._shards:
            return self._shards[0].count(ids)
        return torch.zeros_like(ids, device=self._device)

    def stats(self) -> dict[str, int | float]:
        """Returns the counts of this rank's shard; if there are several column shards, of the first."""
        return self._shards[0].stats() if self._shards else {"rows": 0, "limit": 0}

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
