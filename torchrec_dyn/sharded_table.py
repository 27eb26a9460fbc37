"""The handle on one table of a sharded collection.

Reads are this rank's shard. `assign` and `erase` are collective: every rank passes ids of
its own choice (perhaps none), which go to their owners and to all column shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_dyn.row_wise import owners
from torchrec_dyn.table import DynamicTable
from torchrec_dyn.table_configs import row_dtype
from torchrec_dyn.table_layout import Piece, TableLayout


class ShardedTableHandle:
    """One table as this rank sees it.

    Args:
        name: the table's name.
        where: the collection and the table, for messages.
        layout: where the pieces of the table lie.
        shards: this rank's pieces in column order; empty where it holds none.
        config: the table's config.
        process_group: the ranks.
    """

    def __init__(
        self,
        name: str,
        where: str,
        layout: TableLayout,
        shards: Sequence[DynamicTable],
        config: BaseEmbeddingConfig,
        process_group: dist.ProcessGroup,
    ) -> None:
        self.name = name
        self._where = where
        self._layout = layout
        self._shards = list(shards)
        self._embedding_dim = config.embedding_dim
        self._dtype = row_dtype(config)
        self._group = process_group

    @property
    def num_rows(self) -> int:
        """Rows in use on this rank; column shards of one rank count once."""
        return self._shards[0].num_rows if self._shards else 0

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """The ranges of columns on this rank as (first column, width)."""
        return tuple((shard.first_column, shard.columns) for shard in self._shards)

    def ids(self) -> Tensor:
        """Returns the ids on this rank, [R] int64 in unsigned order of mix64(id)."""
        return self._shards[0].ids() if self._shards else torch.empty(0, dtype=torch.int64)

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Reads rows of this rank's shard and changes nothing.

        Args:
            ids: [M] int64.

        Returns:
            rows: [M, C], C this rank's columns in column order; zeros where not found.
            found: [M] bool.
        """
        read = [shard.lookup(ids) for shard in self._shards]
        if not read:
            nowhere = torch.zeros(ids.numel(), dtype=torch.bool)
            return torch.empty(ids.numel(), 0, dtype=self._dtype), nowhere
        return torch.cat([rows for rows, _ in read], dim=1), read[0][1]

    def stats(self) -> dict[str, int | float]:
        """Returns the counts of this rank's shard; of several column shards, the first's."""
        return self._shards[0].stats() if self._shards else {"rows": 0, "limit": 0}

    def assign(self, ids: Tensor, rows: Tensor) -> None:
        """Writes rows, inserting ids that are absent. Collective.

        Of several rows for one id the last one of the highest rank stays.

        Args:
            ids: [M] int64; M may differ between ranks.
            rows: [M, embedding_dim] of the whole table.

        Raises:
            ValueError: on every rank if any rank passed something else; nothing is changed.
            RuntimeError: on every rank if some rank's shard could not take its rows.
        """
        fault = self._fault(ids)
        if not fault and tuple(rows.shape) != (ids.numel(), self._embedding_dim):
            expected = f"[{ids.numel()}, {self._embedding_dim}]"
            fault = f"expected rows {expected}, got {list(rows.shape)}."
        self._agree("assign", fault, ValueError)
        my_ids, my_rows = self._send(ids, rows.detach().to(self._dtype))
        problem = ""
        begin = 0
        try:
            for shard in self._shards:
                shard.assign(my_ids, my_rows[:, begin : begin + shard.columns].contiguous())
                begin += shard.columns
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        self._agree("assign", problem, RuntimeError)

    def erase(self, ids: Tensor) -> int:
        """Takes ids out on all ranks. Collective.

        Args:
            ids: [M] int64; M may differ between ranks.

        Returns:
            How many ids were there, over all ranks.
        """
        self._agree("erase", self._fault(ids), ValueError)
        my_ids, _ = self._send(ids, torch.empty(ids.numel(), 0, dtype=self._dtype))
        erased = [shard.erase(my_ids) for shard in self._shards]
        first = self._layout.pieces[0]
        counts = first.ranks if erased and self._rank in first.ranks else ()
        total = torch.tensor([erased[0] if counts else 0])
        dist.all_reduce(total, group=self._group)
        return int(total)

    def __repr__(self) -> str:
        return f"ShardedTableHandle(name='{self.name}', num_rows={self.num_rows} on this rank)"

    @property
    def _rank(self) -> int:
        return dist.get_rank(self._group)

    def _fault(self, ids: Tensor) -> str:
        if ids.dtype != torch.int64:
            return f"expected ids of dtype int64, got {ids.dtype}. Convert with ids.long()."
        return "" if ids.dim() == 1 else f"expected ids [M], got {list(ids.shape)}."

    def _agree(self, verb: str, fault: str, error: type[Exception]) -> None:
        """Raises on every rank what went wrong on any, so that no rank waits for another."""
        faults: list[str] = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(faults, fault, group=self._group)
        for rank, text in enumerate(faults):
            if text:
                raise error(f"{self._where}.{verb}(rank={rank}): {text}")

    def _send(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sends ids and rows to their owners, each rank's columns only.

        Args:
            ids: [M] int64.
            rows: [M, embedding_dim], or [M, 0] to send ids alone.

        Returns:
            The ids [K] and rows [K, C] that fell to this rank, by sending rank.
        """
        world_size = dist.get_world_size(self._group)
        parts = owners(ids, self._layout.row_ranks) if self._layout.rows_are_spread else None
        out_ids: list[Tensor] = []
        out_rows: list[Tensor] = []
        for rank in range(world_size):
            pieces = [piece for piece in self._layout.pieces if rank in piece.ranks]
            picked = torch.zeros(ids.numel(), dtype=torch.bool)
            if pieces:
                part = pieces[0].ranks.index(rank)
                picked = torch.ones_like(picked) if parts is None else parts == part
            out_ids.append(ids[picked])
            out_rows.append(_columns_of(rows[picked], pieces))
        counts = torch.tensor([part.numel() for part in out_ids])
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        width = sum(shard.columns for shard in self._shards) if rows.shape[1] else 0
        got_ids = self._exchange(torch.cat(out_ids), counts, arriving)
        flat = torch.cat([part.reshape(-1) for part in out_rows])
        sizes = torch.tensor([part.numel() for part in out_rows])
        got_rows = self._exchange(flat, sizes, arriving * width)
        return got_ids, got_rows.view(got_ids.numel(), width)

    def _exchange(self, sent: Tensor, counts: Tensor, arriving: Tensor) -> Tensor:
        got = sent.new_empty(int(arriving.sum()))
        dist.all_to_all_single(
            got, sent.contiguous(), arriving.tolist(), counts.tolist(), group=self._group
        )
        return got


def _columns_of(rows: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Picks the columns of pieces, [M, sum of their widths]; of [M, 0] nothing."""
    if not pieces or not rows.shape[1]:
        return rows[:, :0]
    return torch.cat([rows[:, p.first_column : p.first_column + p.columns] for p in pieces], 1)
