"""What this rank holds of one table of a collection, sharded or not.

Legend: M ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.distributed import (
    ShardedDynamicEmbeddingBagCollection,
    ShardedDynamicEmbeddingCollection,
)
from torchrec_dyn.modules import DynamicEmbeddingBagCollection, LocalTable
from torchrec_dyn.ranks import owners
from torchrec_dyn.table import DynamicTable
from torchrec_dyn.whole_model.by_id import Collection

_SHARDED = (ShardedDynamicEmbeddingBagCollection, ShardedDynamicEmbeddingCollection)


@dataclass(frozen=True)
class RowsHere:
    """The rows of one table on this rank.

    Attributes:
        shards: in column order, all with the same ids; empty where this rank holds none.
        group: the ranks, None of a collection that is not sharded.
        part: which of the ranks that share the rows this one is.
        parts: how many share them.
    """

    shards: Sequence[DynamicTable]
    group: dist.ProcessGroup | None
    part: int = 0
    parts: int = 1

    @property
    def rank(self) -> int:
        """This rank, 0 where there is only one."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def of(self, ids: Tensor) -> Tensor:
        """Gives the ids that belong here, in their order.

        Args:
            ids: [M] int64.
        """
        if not self.shards:
            return ids[:0]
        return ids if self.parts == 1 else ids[torch.eq(owners(ids, self.parts), self.part)]


def rows_here(collection: Collection) -> dict[str, RowsHere]:
    """Finds what this rank holds of each table; not collective.

    Args:
        collection: sharded or not.
    """
    if isinstance(collection, _SHARDED):
        return {
            one.name: RowsHere(one.shards, one.group, one.part or 0, one.ranks)
            for one in collection._shards.pieces()
        }
    pooled = isinstance(collection, DynamicEmbeddingBagCollection)
    tables = collection.embedding_bags if pooled else collection.embeddings
    return {
        name: RowsHere([one.rows()], None)
        for name, one in tables.items()
        if isinstance(one, LocalTable)
    }
