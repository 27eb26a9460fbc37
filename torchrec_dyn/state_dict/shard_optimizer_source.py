"""What one sharded table saves in the optimizer's state dict.

Letters: R rows of the whole table, D its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    CHUNK_BYTES,
    OPTIMIZER_TENSORS,
    Part,
    SavedTensor,
    add_sums,
    content_sum,
    optimizer_config,
    to_bytes,
)
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.state_dict.pieces import ShardPieces
from torchrec_dyn.state_dict.places import Runs, Share, share_of
from torchrec_dyn.state_dict.saving import ShardSource, reader_of
from torchrec_dyn.storage import CELL_BITS
from torchrec_dyn.table import DynamicTable, NamedState, named_states


class Told(NamedTuple):
    """What a rank tells the others of the optimizer state of one table.

    Attributes:
        share: of the rows.
        cells: [2^CELL_BITS] int64, its rows in each; None where the table's first column is not here.
        step: training forwards.
        sums: of its tensors.
    """

    share: Share
    cells: Tensor | None
    step: int
    sums: dict[str, int]


class OptimizerSource(ShardSource):
    """Reads optimizer state, step, config and checksum of one table.

    Args:
        pieces: what this rank holds.
        optimizer: how the rows learn.
        entry: what the tensors are loaded by.
    """

    def __init__(self, pieces: ShardPieces, optimizer: RowOptimizer, entry: Any) -> None:
        super().__init__(pieces, entry)
        self.optimizer = optimizer

    @property
    def config(self) -> dict[str, Any]:
        """What is told of the optimizer state."""
        return optimizer_config(self.optimizer, self.pieces.cuts)

    def _columns(self, shard: DynamicTable, one: NamedState) -> tuple[int, int]:
        """Returns where a shard's state lies in the saved tensor: first column and width."""
        if one.is_rowwise:
            return self.pieces.cuts.index(shard.first_column), 1
        return shard.first_column, shard.columns

    def tell(self) -> Told | None:
        """Sums this rank's shards and says what they hold, None where it has none."""
        pieces = self.pieces
        if pieces.part is None:
            return None
        sums = []
        for shard, rows in zip(pieces.shards, self._canonical, strict=True):
            for ids, places in rows.stretches(max(1, CHUNK_BYTES // shard.weights.row_bytes)):
                for one in named_states(shard):
                    first, _ = self._columns(shard, one)
                    summed = content_sum(pieces.name, one.name, ids, one.store.read(places), first)
                    sums.append({one.name: summed})
        first_rows = self._canonical[0]
        cells = first_rows.cells(CELL_BITS) if pieces.has_first_column else None
        share = share_of(first_rows, pieces.part, pieces.ranks)
        return Told(share, cells, pieces.shards[0].step, add_sums(*sums))

    def tensors(self, told: Sequence[Told | None]) -> dict[str, SavedTensor]:
        """Makes the tensors of the state dict, by name.

        Args:
            told: by each rank.
        """
        known = [one for one in told if one is not None]
        small = {"step": torch.tensor(known[0].step), "config": to_bytes(self.config)}
        made = dict(self._by_row(self.runs(known)))
        return {**made, **self.not_by_row(small, known, OPTIMIZER_TENSORS)}

    def _by_row(self, runs: Runs) -> Iterator[tuple[str, SavedTensor]]:
        widths = {True: len(self.pieces.cuts) - 1, False: self.pieces.cuts[-1]}
        for number, name in enumerate(self.optimizer.state_names):
            parts = []
            for shard, rows in zip(self.pieces.shards, self._canonical, strict=True):
                first, columns = self._columns(shard, named_states(shard)[number])
                for run in runs.mine:
                    read = reader_of(rows, run, shard, name)
                    parts.append(Part((run.place, first), (run.rows, columns), read))
            width = widths[self.optimizer.state_is_rowwise[number]]
            yield name, SavedTensor((runs.total, width), torch.float32, parts, self._entry)
