"""What one sharded table saves in the model's state dict.

Letters: R rows of the whole table, D its columns, Q ids that wait, K times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    CHUNK_BYTES,
    MODEL_TENSORS,
    Part,
    SavedTensor,
    add_sums,
    content_sum,
    sum_of_small,
    to_bytes,
)
from torchrec_dyn.state_dict.pieces import ShardPieces
from torchrec_dyn.state_dict.places import Runs, Share, runs_of, share_of
from torchrec_dyn.state_dict.saving import ShardSource, reader_of, shifted
from torchrec_dyn.storage import CELL_BITS, CanonicalRows
from torchrec_dyn.table import DynamicTable, read_tensor, stamp_of


class Told(NamedTuple):
    """What a rank tells the others of its shards of one table before it is saved.

    Attributes:
        share: of the rows.
        cells: [2^CELL_BITS] int64, its rows in each; None where the table's first column is not here.
        waiting: of the ids that wait, likewise.
        clock: [2, K] int64 or None.
        sums: of its tensors.
    """

    share: Share
    cells: Tensor | None
    waiting: Share | None
    clock: Tensor | None
    sums: dict[str, int]


class ModelSource(ShardSource):
    """Reads rows, ids, scores, counters, clock, config and checksum of one table.

    Args:
        pieces: what this rank holds.
        entry: what the tensors are loaded by.
    """

    def __init__(self, pieces: ShardPieces, entry: Any) -> None:
        super().__init__(pieces, entry)
        self._waiting: CanonicalRows | None = None

    def tell(self) -> Told | None:
        """Sums this rank's shards and says what they hold, None where it has none."""
        pieces = self.pieces
        if pieces.part is None:
            return None
        shares, sums = [], []
        for shard, rows in zip(pieces.shards, self._canonical, strict=True):
            shares.append(share_of(rows, pieces.part, pieces.ranks))
            sums.append(_sums_of(shard, rows))
        cells = waiting = clock = None
        first = pieces.shards[0]
        if first.life is not None:
            clock = first.life.clock.export()
        if first.life is not None and first.life.waiting is not None:
            self._waiting = CanonicalRows(
                first.life.waiting.id_map, pieces.where, lambda: stamp_of(first)
            )
        if pieces.has_first_column:
            cells = self._canonical[0].cells(CELL_BITS)
            if self._waiting is not None:
                waiting = share_of(self._waiting, pieces.part, pieces.ranks)
                for start in range(0, self._waiting.count, _WAITING_ROWS):
                    stop = min(self._waiting.count, start + _WAITING_ROWS)
                    some = self._read_waiting(start, stop)
                    sums.append({"waiting": sum_of_small(pieces.name, "waiting", some)})
        return Told(shares[0], cells, waiting, clock, add_sums(*sums))

    def tensors(self, told: Sequence[Told | None]) -> dict[str, SavedTensor]:
        """Makes the tensors of the state dict, by name.

        Args:
            told: by each rank.
        """
        pieces, known = self.pieces, [one for one in told if one is not None]
        small = {"config": to_bytes(pieces.config)}
        if pieces.has_life:
            small["clock"] = next((one.clock for one in known if one.clock is not None), _NO_CLOCK)
        made = self._by_row(self.runs(known))
        if pieces.counts:
            waiting = [one.waiting for one in known if one.waiting is not None]
            made["waiting"] = self._waiting_tensor(waiting)
        return {**made, **self.not_by_row(small, known, MODEL_TENSORS)}

    def _by_row(self, runs: Runs) -> dict[str, SavedTensor]:
        pieces = self.pieces
        parts: dict[str, list[Part]] = {"weight": [], "ids": []}
        if pieces.has_life:
            parts |= {"last_seen": [], "count": []}
        for shard, rows in zip(pieces.shards, self._canonical, strict=True):
            for run in runs.mine:
                size = (run.rows, shard.columns)
                read = reader_of(rows, run, shard, "weight")
                parts["weight"].append(Part((run.place, shard.first_column), size, read))
                for name in parts.keys() - {"weight"} if shard is pieces.shards[0] else ():
                    read = reader_of(rows, run, shard, name)
                    is_saved = shard.first_column == 0
                    parts[name].append(Part((run.place,), (run.rows,), read, is_saved))
        dtype = getattr(torch, pieces.config["rows"])
        columns = pieces.config["embedding_dim"]
        return {
            name: SavedTensor((runs.total, columns), dtype, held, self._entry)
            if name == "weight"
            else SavedTensor((runs.total,), torch.int64, held, self._entry)
            for name, held in parts.items()
        }

    def _waiting_tensor(self, shares: Sequence[Share]) -> SavedTensor:
        runs = runs_of(shares, self.pieces.part)
        is_saved = self.pieces.has_first_column
        parts = [
            Part((run.place, 0), (run.rows, 3), shifted(run, self._read_waiting), is_saved)
            for run in runs.mine
        ]
        return SavedTensor((runs.total, 3), torch.int64, parts, self._entry)

    def _read_waiting(self, start: int, stop: int) -> Tensor:
        life = self.pieces.shards[0].life
        assert self._waiting is not None and life is not None and life.waiting is not None
        ids, rows = self._waiting.read(start, stop)
        return torch.stack([ids, *life.waiting.read(rows)], dim=1)


_NO_CLOCK = torch.empty(2, 0, dtype=torch.int64)
_WAITING_ROWS = CHUNK_BYTES // 24


def _sums_of(shard: DynamicTable, rows: CanonicalRows) -> dict[str, int]:
    """Sums the rows of one shard, and its ids and scores if it has the first column."""
    names = ["weight"]
    if shard.first_column == 0:
        names += ["ids"] if shard.life is None else ["ids", "last_seen", "count"]
    sums: list[dict[str, int]] = []
    for ids, places in rows.stretches(max(1, CHUNK_BYTES // shard.weights.row_bytes)):
        held = {name: ids if name == "ids" else read_tensor(shard, name, places) for name in names}
        first = shard.first_column
        sums.append(
            {
                name: content_sum(shard.name, name, ids, one, first if name == "weight" else 0)
                for name, one in held.items()
            }
        )
    return add_sums(*sums)
