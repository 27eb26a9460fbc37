"""What this rank holds of one sharded table, and what DCP's metadata says of a saved one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from torchrec_dyn.ranks import TableLayout, owners
from torchrec_dyn.state_dict.places import Places, ranges_of_part
from torchrec_dyn.storage import CanonicalRows, IdMap
from torchrec_dyn.table import DynamicTable, stamp_of


@dataclass(frozen=True)
class ShardPieces:
    """The column shards of a table on this rank.

    Attributes:
        name: the table's.
        where: the table, for messages.
        layout: where the pieces of the table lie.
        shards: this rank's, in column order; empty where it holds none.
        rank: this rank.
        group: the ranks.
        config: `saved_config.table_config` of the table.
        has_life: whether the table has a policy.
        counts: whether ids wait for admission.
        maps: some rows of each shard, where only these are meant (checkpoint/delta_export.py); None: all.
    """

    name: str
    where: str
    layout: TableLayout
    shards: Sequence[DynamicTable]
    rank: int
    group: dist.ProcessGroup
    config: dict[str, Any]
    has_life: bool
    counts: bool
    maps: tuple[IdMap, ...] | None = None

    @property
    def part(self) -> int | None:
        """The number of this rank among those that share the rows, None where it holds none."""
        for piece in self.layout.pieces:
            if self.shards and piece.first_column == self.shards[0].first_column:
                return piece.ranks.index(self.rank)
        return None

    @property
    def ranks(self) -> int:
        """How many ranks share the rows."""
        return self.layout.row_ranks if self.layout.rows_are_spread else 1

    @property
    def has_first_column(self) -> bool:
        """Whether ids and scores are saved here: one of several column shards saves them."""
        return bool(self.shards) and self.shards[0].first_column == 0

    @property
    def cuts(self) -> list[int]:
        """Where the column shards of the table begin, and the end of the last."""
        return [
            *(piece.first_column for piece in self.layout.pieces),
            self.config["embedding_dim"],
        ]

    def has_shards_of(self, other: ShardPieces) -> bool:
        """Whether these are the very shards of the same table."""
        return list(self.shards) == list(other.shards) and self.where == other.where

    def owns(self, ids: Tensor) -> Tensor:
        """Says which ids belong to this rank, [M] bool.

        Args:
            ids: [M] int64.
        """
        if not self.layout.rows_are_spread:
            return torch.full(ids.shape, bool(self.shards))
        return torch.eq(
            owners(ids.contiguous(), self.ranks), -1 if self.part is None else self.part
        )

    def canonical(self, shard: DynamicTable) -> CanonicalRows:
        """Gives the rows of a shard in canonical order, as long as it does not change."""
        id_map = shard.id_map if self.maps is None else self.maps[list(self.shards).index(shard)]
        return CanonicalRows(id_map, self.where, lambda: stamp_of(shard))

    def places(self, saved: Mapping[str, TensorStorageMetadata], total: int) -> Places:
        """Returns which places of a saved table are read here.

        Args:
            saved: its tensors in DCP's metadata, by name.
            total: its rows.
        """
        if self.part is None:
            return Places([])
        return Places(ranges_of_part(_cells(saved, total), total, self.part, self.ranks))


def check_same_shards(came: ShardPieces, own: ShardPieces) -> None:
    """Raises ValueError if what came for one model is given to another.

    Args:
        came: the shards for which it was read.
        own: those of the model that loads.
    """
    if not came.has_shards_of(own):
        raise ValueError(
            f"{own.where}: expected what was loaded into this model's own state dict, got that of another "
            "model's. Make the state dict with this model, then call dcp.load."
        )


def _cells(saved: Mapping[str, TensorStorageMetadata], total: int) -> list[int] | None:
    """Reads the rows per cell of mixed ids from the sizes of the chunks of "cells", None if not there."""
    if "cells" not in saved:
        return None
    chunks = sorted(saved["cells"].chunks, key=lambda chunk: chunk.offsets[0])
    cells = [chunk.sizes[0] - 1 for chunk in chunks]
    return cells if sum(cells) == total and not len(cells) & (len(cells) - 1) else None


def blocks_of(
    saved: TensorStorageMetadata, places: Places, columns: tuple[int, int] | None
) -> Iterator[ChunkStorageMetadata]:
    """Cuts what is to be read of a tensor along the chunks in which it was saved.

    Args:
        saved: the tensor in DCP's metadata.
        places: the rows to be read.
        columns: first column and the one after the last; None: all, or one dimension only.
    """
    for chunk in saved.chunks:
        begin, size = chunk.offsets, chunk.sizes
        beyond = list(zip(begin[1:], size[1:], strict=True))
        if beyond and columns is not None:
            first = max(columns[0], begin[1])
            beyond = [(first, min(columns[1], begin[1] + size[1]) - first)]
        if any(width <= 0 for _, width in beyond):
            continue
        for low, high, _ in places.within(begin[0], begin[0] + size[0]):
            # Not cut any further: DCP's reader loads a whole chunk each time it is asked for some of it.
            yield ChunkStorageMetadata(
                torch.Size([low, *(first for first, _ in beyond)]),
                torch.Size([high - low, *(width for _, width in beyond)]),
            )
