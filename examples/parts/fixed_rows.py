"""Raw ids in static tables of TorchRec: by a modulo, by managed collision (MCH), or by a vocabulary.

Each map turns the ids of a batch into row numbers of the tables. `StaticRows` reads and trains those rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def with_values(features: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    """Returns the same bags with other values."""
    return KeyedJaggedTensor(features.keys(), values, lengths=features.lengths())


class Modulo(nn.Module):
    """Row `id % rows`: ids of the same remainder share a row."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the batch with row numbers."""
        return with_values(features, features.values().remainder(self._rows))


class Vocabulary(nn.Module):
    """The position of the id among all ids that the stream will have, one id a bag.

    Args:
        ids: [F, N], all ids of each feature, with repetitions.

    Attributes:
        sizes: number of distinct ids of each feature.
    """

    def __init__(self, ids: np.ndarray) -> None:
        super().__init__()
        for number, of_feature in enumerate(ids):
            self.register_buffer(f"ids_{number}", torch.from_numpy(np.unique(of_feature)))
        self.sizes = [known.numel() for known in self.buffers()]

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the batch with row numbers."""
        of_features = features.values().view(len(self.sizes), -1)
        rows = [
            torch.searchsorted(known, of_feature)
            for known, of_feature in zip(self.buffers(), of_features, strict=True)
        ]
        return with_values(features, torch.cat(rows))


class ManagedCollision(nn.Module):
    """TorchRec's MCH, which evicts ids by count and recency; ids without a row share the last row.

    Of TorchRec's three policies this one has the highest AUC on the generated stream of compare.py.

    Args:
        tables: configs of the tables.
        interval: batches from one admission and eviction to the next. A new id waits for it; with 1 it gets
            a row in its own batch.
    """

    def __init__(self, tables: list[EmbeddingBagConfig], interval: int) -> None:
        super().__init__()
        modules = {
            table.name: MCHManagedCollisionModule(
                table.num_embeddings, torch.device("cpu"), DistanceLFU_EvictionPolicy(), interval
            )
            for table in tables
        }
        self._modules_of_tables = ManagedCollisionCollection(modules, tables)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the batch with row numbers."""
        return self._modules_of_tables(features)

    def reassigned(self) -> dict[str, torch.Tensor]:
        """Returns the rows that got another id since the last call, by table."""
        evicted = self._modules_of_tables.evict().items()
        return {table: rows.long() for table, rows in evicted if rows is not None}


class StaticRows(nn.Module):
    """Static tables behind a map of ids to rows. Their optimizer is FBGEMM's row-wise Adagrad.

    Args:
        tables: configs of the tables, one feature each.
        to_rows: the map.
        learning_rate: of the rows.

    Attributes:
        num_rows: number of rows of all tables together, in use or not.
    """

    def __init__(
        self, tables: list[EmbeddingBagConfig], to_rows: nn.Module, learning_rate: float
    ) -> None:
        super().__init__()
        self._to_rows = to_rows
        self._ebc = FusedEmbeddingBagCollection(
            tables, RowWiseAdagrad, {"lr": learning_rate, "eps": 1e-8}
        )
        states = self._ebc.fused_optimizer().state_dict()["state"]
        self._states = {
            table.name: states[f"{table.name}.weight"][f"{table.name}.weight.momentum_1"]
            for table in tables
        }
        self._tables = tables
        self._lives = {table.name: torch.zeros(table.num_embeddings).long() for table in tables}
        self.num_rows = sum(table.num_embeddings for table in tables)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the pooled rows, [B, F * dim]."""
        features = self._to_rows(features)
        if isinstance(self._to_rows, ManagedCollision):
            self._reset(self._to_rows.reassigned())
        self._rows = features.values()
        return self._ebc(features).values()

    def rows_read(self) -> np.ndarray:
        """Returns the rows of the ids of the last batch, [F, B].

        A row that got another id, and was reset for it, has another number.
        """
        rows = self._rows.view(len(self._tables), -1).clone()
        for table, of_table in zip(self._tables, rows, strict=True):
            of_table += self._lives[table.name][of_table] * table.num_embeddings
        return rows.numpy()

    def num_bytes(self) -> int:
        """Returns the bytes of rows, optimizer state and map."""
        held = (*self._ebc.parameters(), *self._states.values(), *self._to_rows.buffers())
        return sum(one.nbytes for one in held)

    @torch.no_grad()
    def _reset(self, reassigned: dict[str, torch.Tensor]) -> None:
        """Resets rows and their state, as TorchRec's sharded collection does (on a GPU only)."""
        for table in self._tables:
            rows = reassigned.get(table.name)
            if rows is None:
                continue
            fresh = torch.empty(len(rows), table.embedding_dim)
            fresh.uniform_(table.get_weight_init_min(), table.get_weight_init_max())
            self._ebc.embedding_bags[table.name].weight[rows] = fresh
            self._states[table.name][rows] = 0.0
            self._lives[table.name][rows] += 1


def measure_sharing(ids: np.ndarray, rows: np.ndarray) -> dict[str, float]:
    """Returns how ids share rows.

    Args:
        ids: [N] ids of one table, with repetitions.
        rows: [N], the row of each.

    Returns:
        ids: number of distinct ids that shared a row with another id at any of their occurrences.
        of_ids: their share of the distinct ids.
        of_views: share of the occurrences in shared rows.
        lost: 1 - rows in use / distinct ids, the "collision rate" of the paper of Monolith.
    """
    distinct_ids, id_ = np.unique(ids, return_inverse=True)
    distinct_rows, row = np.unique(rows, return_inverse=True)
    pairs = np.unique(row * len(distinct_ids) + id_)
    ids_of_row = np.bincount(pairs // len(distinct_ids))
    shares = ids_of_row[row] > 1
    sharing = len(np.unique(id_[shares]))
    return {
        "ids": sharing,
        "of_ids": sharing / len(distinct_ids),
        "of_views": float(shares.mean()),
        "lost": 1 - len(distinct_rows) / len(distinct_ids),
    }
