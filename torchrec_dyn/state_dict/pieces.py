"""ShardPieces: the column shards of one sharded table on this rank, with the data to save and load them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks import Piece, TableLayout, owners
from torchrec_dyn.state_dict.places import Places, Share, ranges_of_part, saved_cells, share_of
from torchrec_dyn.storage import CanonicalRows, IdMap, TableLock
from torchrec_dyn.table import DynamicTable, stamp_of


@dataclass(frozen=True)
class ShardPieces:
    """The column shards of a table on this rank.

    Attributes:
        name: name of the table.
        where: the table, for messages.
        layout: layout of the table: its pieces and their ranks.
        shards: the shards on this rank, in column order; may be empty.
        collection: the collection's object on this rank, which stays the same when tables move; of an
            unsharded table the table's object.
        rank: number of this rank.
        group: process group of the ranks.
        config: `saved_config.table_config` of the table.
        optimizer: optimizer of the rows.
        has_life: True if the table has a policy.
        has_waiting: True if ids wait for admission.
        maps: chosen ids and rows of each shard, for deltas (checkpoint/delta_export.py); None: all rows.
    """

    name: str
    where: str
    layout: TableLayout
    shards: Sequence[DynamicTable]
    collection: object
    rank: int
    group: dist.ProcessGroup
    config: dict[str, Any]
    optimizer: RowOptimizer
    has_life: bool
    has_waiting: bool
    maps: tuple[IdMap, ...] | None = None

    @property
    def lock(self) -> TableLock:
        """The lock of the shards."""
        return self.shards[0].lock if self.shards else TableLock()

    @property
    def device(self) -> torch.device:
        """The device of the shards."""
        return self.shards[0].device if self.shards else torch.device("cpu")

    @property
    def part(self) -> int | None:
        """The number of this rank among the ranks that share the rows; None if it holds no rows."""
        for piece in self.layout.pieces:
            if self.shards and piece.first_column == self.shards[0].first_column:
                return piece.ranks.index(self.rank)
        return None

    @property
    def ranks(self) -> int:
        """The number of ranks that share the rows."""
        return self.layout.row_ranks if self.layout.rows_are_spread else 1

    @property
    def has_first_column(self) -> bool:
        """True if this rank has the first column shard, the only shard that saves ids and scores."""
        return bool(self.shards) and self.shards[0].first_column == 0

    @property
    def cuts(self) -> list[int]:
        """The first column of each column shard of the table, and the end of the last."""
        pieces = self.layout.pieces
        end = pieces[-1].first_column + pieces[-1].columns
        return [*(piece.first_column for piece in pieces), end]

    @property
    def columns(self) -> list[tuple[int, int]]:
        """The first column of each shard on this rank, and the column after its last."""
        return [(one.first_column, one.first_column + one.columns) for one in self.shards]

    def has_shards_of(self, other: ShardPieces) -> bool:
        """Returns True if both have the same shard objects of the same table of the same collection."""
        # A rank without shards of the table has equal lists for any two collections.
        is_same_table = self.collection is other.collection and self.name == other.name
        return is_same_table and list(self.shards) == list(other.shards)

    def check_model(self, model: ShardPieces) -> None:
        """Raises ValueError if tensors loaded for these shards are passed to another model."""
        if not self.has_shards_of(model):
            raise ValueError(
                f"{model.where}: expected tensors loaded into this model's own state dict, got tensors of "
                "another model's state dict. Make the state dict with this model, then call dcp.load."
            )

    def owns(self, ids: Tensor) -> Tensor:
        """Returns a mask of the ids that belong to this rank, [M] bool.

        Args:
            ids: [M] int64.
        """
        if not self.layout.rows_are_spread:
            return torch.full(ids.shape, bool(self.shards), device=ids.device)
        return torch.eq(
            owners(ids.contiguous(), self.ranks), -1 if self.part is None else self.part
        )

    def canonical(self, shard: DynamicTable) -> CanonicalRows:
        """Returns the rows of a shard in canonical order; valid until the shard changes."""
        id_map = shard.id_map if self.maps is None else self.maps[list(self.shards).index(shard)]
        return CanonicalRows(id_map, self.where, lambda: stamp_of(shard))

    def share(self, rows: CanonicalRows) -> Share:
        """Returns this rank's share of the rows; the rank must hold a part of the table."""
        assert self.part is not None
        return share_of(rows, self.part, self.ranks)

    def places(self, saved: Mapping[str, TensorStorageMetadata], total: int) -> Places:
        """Returns the places of a saved table that this rank reads.

        Args:
            saved: DCP's metadata of the saved tensors, by name.
            total: number of rows of the saved table.
        """
        if self.part is None:
            return Places([])
        return Places(ranges_of_part(saved_cells(saved, total), total, self.part, self.ranks))


def whole_pieces(
    table: DynamicTable, where: str, collection: object, config: dict[str, Any]
) -> ShardPieces:
    """Returns the pieces of an unsharded table: one shard, in one process.

    Args:
        table: the table.
        where: the table, for messages.
        collection: object that stays the same when the rows are replaced.
        config: `saved_config.table_config` of the table.
    """
    return ShardPieces(
        table.name,
        where,
        TableLayout((Piece(0, table.embedding_dim, (0,)),), False),
        [table],
        collection,
        0,
        None,  # type: ignore[arg-type]  # the group of one rank is never used
        config,
        table.optimizer,
        table.life is not None,
        table.life is not None and table.life.waiting is not None,
    )
