"""What saves one sharded table in the model's state dict, and what does in the optimizer's, have in common.

Letters: R rows of the whole table.

What one sharded table saves in the model's state dict.

Letters: R rows of the whole table, D its columns, Q ids that wait, K times.

What one sharded table saves in the optimizer's state dict.

Letters: R rows of the whole table, D its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    CHUNK_BYTES,
    MODEL_TENSORS,
    OPTIMIZER_TENSORS,
    Part,
    SavedTensor,
    add_sums,
    as_words,
    content_sum,
    optimizer_config,
    sum_of_small,
    to_bytes,
)
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.state_dict.pieces import ShardPieces
from torchrec_dyn.state_dict.places import Run, Runs, Share, fewer_cells, runs_of, share_of
from torchrec_dyn.storage import CELL_BITS, CanonicalRows, cell_bits
from torchrec_dyn.table import DynamicTable, NamedState, named_states, read_tensor, stamp_of

Reader = Callable[[int, int], Tensor]


class ToldOfShards(Protocol):
    """What a rank tells the others of its shards of one table before it is saved."""

    @property
    def share(self) -> Share:
        """Of the rows."""
        ...

    @property
    def cells(self) -> Tensor | None:
        """[2^CELL_BITS] int64, its rows in each; None where the table's first column is not here."""
        ...

    @property
    def sums(self) -> dict[str, int]:
        """Of its tensors."""
        ...


class ShardSource:
    """Reads the shards of one table, as long as they do not change.

    Args:
        pieces: what this rank holds.
        entry: what the tensors are loaded by.
    """

    def __init__(self, pieces: ShardPieces, entry: Any) -> None:
        self.pieces = pieces
        self._entry = entry
        self._canonical = [pieces.canonical(shard) for shard in pieces.shards]

    def check_unchanged(self) -> None:
        """Raises RuntimeError if a shard has changed since this was made."""
        for rows in self._canonical:
            rows.check_unchanged()

    def runs(self, told: Sequence[ToldOfShards]) -> Runs:
        """Tells where this rank's rows are in the whole table.

        Args:
            told: by each rank that holds any.
        """
        return runs_of([one.share for one in told], self.pieces.part)

    def not_by_row(
        self,
        small: Mapping[str, Tensor],
        told: Sequence[ToldOfShards],
        order: tuple[str, ...],
    ) -> dict[str, SavedTensor]:
        """Makes the tensors that are not by row: those given, "checksum" and "cells".

        Args:
            small: by name.
            told: by each rank that holds any rows.
            order: of the sums in the checksum.
        """
        name, saves, total = self.pieces.name, self.pieces.rank == 0, self.runs(told).total
        of_small = {one: sum_of_small(name, one, tensor) for one, tensor in small.items()}
        checksum = as_words(add_sums(*(one.sums for one in told), of_small), order)
        whole = {**small, "checksum": checksum}
        made = {one: whole_tensor(tensor, saves, self._entry) for one, tensor in whole.items()}
        counts = torch.stack([one.cells for one in told if one.cells is not None]).sum(0)
        return {**made, "cells": cells_tensor(counts, total, saves, self._entry)}


def whole_tensor(value: Tensor, is_saved: bool, entry: Any) -> SavedTensor:
    """Makes a small tensor that every rank has, and one saves.

    Args:
        value: the tensor.
        is_saved: whether this rank saves it.
        entry: of the tensor.
    """

    def read(start: int, stop: int) -> Tensor:
        return value[start:stop] if value.dim() else value

    part = Part((0,) * value.dim(), tuple(value.shape), read, is_saved)
    return SavedTensor(value.shape, value.dtype, [part] if value.numel() else [], entry)


def cells_tensor(counts: Tensor, total: int, is_saved: bool, entry: Any) -> SavedTensor:
    """Makes "cells", [total + K, 0]: without numbers, but DCP's metadata tells the sizes of its chunks.

    Args:
        counts: [2^CELL_BITS] int64, rows of the whole table in each.
        total: rows of the whole table.
        is_saved: whether this rank saves it.
        entry: of the tensor.
    """
    cells = fewer_cells(counts, cell_bits(total)).tolist()
    parts, begin = [], 0
    for rows in cells:
        parts.append(Part((begin, 0), (rows + 1, 0), _no_numbers))
        begin += rows + 1
    return SavedTensor((begin, 0), torch.uint8, parts if is_saved else [], entry)


def _no_numbers(start: int, stop: int) -> Tensor:
    return torch.empty(stop - start, 0, dtype=torch.uint8)


def shifted(run: Run, read: Reader) -> Reader:
    """Reads rows [start, stop) of a run by reading those of this rank."""
    return lambda start, stop: read(run.here + start, run.here + stop)


def reader_of(rows: CanonicalRows, run: Run, shard: DynamicTable, name: str) -> Reader:
    """Reads rows [start, stop) of a run of one tensor of a shard."""

    def read(start: int, stop: int) -> Tensor:
        ids, places = rows.read(start, stop)
        return ids if name == "ids" else read_tensor(shard, name, places)

    return shifted(run, read)


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


class ToldOptimizer(NamedTuple):
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

    def tell(self) -> ToldOptimizer | None:
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
        return ToldOptimizer(share, cells, pieces.shards[0].step, add_sums(*sums))

    def tensors(self, told: Sequence[ToldOptimizer | None]) -> dict[str, SavedTensor]:
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
