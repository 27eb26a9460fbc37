"""Raw ids in a table of a fixed number of rows: by a modulo, and by TorchRec's managed collision (ZCH).

Each of them turns the ids of a batch into row numbers below `rows`. The rows themselves are in the same
dynamic tables as in the other runs of drifting_ids.py, so only the ids differ. Their number and bytes are
told as those of the fixed table, which has all its rows from the start.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagConfig
from torchrec.modules.mc_modules import (
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_dyn as dyn

EVERY = 10  # batches from one eviction of ZCH to the next


class FixedRows(nn.Module):
    """Turns ids into row numbers.

    Args:
        rows: rows of each table.

    Attributes:
        ids_seen: number of ids of this process so far.
        hits: number of those that had a row of their own; NaN if rows are shared without a record of it.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.ids_seen, self.hits = rows, 0, 0.0

    def counts(self, tables: list[EmbeddingBagConfig]) -> dict[str, float]:
        """Returns the numbers of fixed tables, with one number of optimizer state a row. Collective."""
        rows = self.rows * len(tables)
        of_rows = sum(self.rows * (table.embedding_dim + 1) * 4 for table in tables)
        of_ids = sum(one.nbytes for one in self.buffers())
        counted = torch.tensor([self.ids_seen, self.hits], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(counted)
        ids_seen, hits = counted.tolist()
        return {"rows": rows, "bytes": of_rows + of_ids, "ids_seen": int(ids_seen), "hits": hits}

    def reset_evicted(self, collection: dyn.DynamicEmbeddingBagCollection) -> None:
        """Makes the rows of evicted ids fresh; without eviction there are none."""


class Modulo(FixedRows):
    """Row `id % rows`: ids of the same remainder share a row."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.hits = math.nan

    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the batch with row numbers."""
        self.ids_seen += ids.values().numel()
        numbers = ids.values().remainder(self.rows)
        return KeyedJaggedTensor(ids.keys(), numbers, lengths=ids.lengths())


class ManagedCollision(FixedRows):
    """TorchRec's MCH, which evicts the least recently used ids; ids without a slot share the last row."""

    def __init__(self, rows: int, tables: list[EmbeddingBagConfig]) -> None:
        super().__init__(rows)
        modules = {
            table.name: MCHManagedCollisionModule(
                rows, torch.device("cpu"), LRU_EvictionPolicy(), eviction_interval=EVERY
            )
            for table in tables
        }
        self.mch = ManagedCollisionCollection(modules, tables)

    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the batch with row numbers."""
        found = self.mch(ids)
        self.ids_seen += found.values().numel()
        self.hits += int((found.values() != self.rows - 1).sum())
        return found

    def reset_evicted(self, collection: dyn.DynamicEmbeddingBagCollection) -> None:
        """Makes the rows of evicted ids fresh, as TorchRec's sharded collection does."""
        for table, rows in self.mch.evict().items():
            if rows is not None:
                collection.table(table).erase(rows.long())
