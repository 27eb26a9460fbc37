"""What one sharded table saves in the optimizer's state dict.

Letters: R rows of the whole table, D its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.canonical_rows import CELL_BITS, CanonicalRows
from torchrec_dyn.content_sums import (
    OPTIMIZER_TENSORS,
    add_sums,
    as_words,
    content_sum,
    sum_of_small,
)
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.saved_config import optimizer_config, to_bytes
from torchrec_dyn.saved_places import Run, Runs, Share, runs_of, share_of
from torchrec_dyn.saved_tensor import CHUNK_BYTES, Part, SavedTensor
from torchrec_dyn.shard_model_source import cells_tensor, whole_tensor
from torchrec_dyn.shard_pieces import ShardPieces
from torchrec_dyn.table import DynamicTable
from torchrec_dyn.table_state import NamedState, named_states, read_tensor


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


class OptimizerSource:
    """Reads optimizer state, step, config and checksum of one table.

    Args:
        pieces: what this rank holds.
        optimizer: how the rows learn.
        entry: what the tensors are loaded by.
    """

    def __init__(self, pieces: ShardPieces, optimizer: RowOptimizer, entry: Any) -> None:
        self.pieces = pieces
        self.optimizer = optimizer
        self._entry = entry
        self._canonical = [pieces.canonical(shard) for shard in pieces.shards]

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
        pieces, known = self.pieces, [one for one in told if one is not None]
        runs = runs_of([one.share for one in known], pieces.part)
        small = {"step": torch.tensor(known[0].step), "config": to_bytes(self.config)}
        sums = add_sums(
            *(one.sums for one in known),
            {name: sum_of_small(pieces.name, name, one) for name, one in small.items()},
        )
        small["checksum"] = as_words(sums, OPTIMIZER_TENSORS)
        made = dict(self._by_row(runs))
        for name, one in small.items():
            made[name] = whole_tensor(one, pieces.rank == 0, self._entry)
        counts = torch.stack([one.cells for one in known if one.cells is not None]).sum(0)
        made["cells"] = cells_tensor(counts, runs.total, pieces.rank == 0, self._entry)
        return made

    def _by_row(self, runs: Runs) -> Iterator[tuple[str, SavedTensor]]:
        widths = {True: len(self.pieces.cuts) - 1, False: self.pieces.cuts[-1]}
        for number, name in enumerate(self.optimizer.state_names):
            parts = []
            for shard, rows in zip(self.pieces.shards, self._canonical, strict=True):
                first, columns = self._columns(shard, named_states(shard)[number])
                for run in runs.mine:
                    read = _reader(rows, run, shard, name)
                    parts.append(Part((run.place, first), (run.rows, columns), read))
            width = widths[self.optimizer.state_is_rowwise[number]]
            yield name, SavedTensor((runs.total, width), torch.float32, parts, self._entry)

    def check_unchanged(self) -> None:
        """Raises RuntimeError if a shard has changed since this was made."""
        for rows in self._canonical:
            rows.check_unchanged()


def _reader(rows: CanonicalRows, run: Run, shard: DynamicTable, name: str) -> Any:
    def read(start: int, stop: int) -> Tensor:
        _, places = rows.read(run.here + start, run.here + stop)
        return read_tensor(shard, name, places)

    return read
