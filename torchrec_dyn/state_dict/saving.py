"""Sources: read the shards of one table for the model's and the optimizer's state dict, as SavedTensors.

Each rank sums its shards, the summaries are all-gathered, and each rank makes tensors of its parts. Rows are
read when the tensors are saved. `saved_sums` makes the checksums alone, which need not read all rows.

Legend: R rows of the whole table, K times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.checkpoint_format import (
    CHUNK_BYTES,
    MODEL_TENSORS,
    OPTIMIZER_TENSORS,
    LeftSums,
    Part,
    SavedTensor,
    add_sums,
    as_words,
    content_sum,
    optimizer_config,
    sum_of_small,
    tensor_of_left_sums,
    to_bytes,
    whole_tensor,
)
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict.places import Run, Share, runs_of, share_of
from torchrec_dyn.state_dict.row_index import CellCounts, index_tensor
from torchrec_dyn.state_dict.row_sums import RowTensor, present_sums, sums_of_shard
from torchrec_dyn.storage import CanonicalRows, to_host, turn_of
from torchrec_dyn.table import TableShard, named_states, read_tensor, stamp_of

_Whole = tuple[tuple[int, ...], torch.dtype]  # columns and dtype of a whole tensor by row
_WAITING_ROWS = CHUNK_BYTES // 24
# What the state dicts that are made are for.
_ANYTHING, _LOAD, _SAVE = "anything", "load", "save"
_made_for: ContextVar[str] = ContextVar("_made_for", default=_ANYTHING)


@contextmanager
def only_to_load() -> Iterator[None]:
    """State dicts of sharded tables that this thread makes in the block are only to be loaded into.

    Their rows are not summed, which takes most of the time of `state_dict()` of a table with rows. To save or
    copy such a state dict is a RuntimeError. Every rank makes a state dict in such a block, or none::

        with only_to_load():
            state = {"model": dmp.state_dict()}
        dcp.load(state, planner=LoadPlanner(path=path), checkpoint_id=path)
    """
    with _made_only_for(_LOAD):
        yield


@contextmanager
def only_to_save() -> Iterator[None]:
    """State dicts of sharded tables that this thread makes in the block are only saved by `TableWriter`.

    Their rows are summed while they are written, and not by `state_dict()` before. Another writer, a copy and
    a load into a model are a RuntimeError::

        with only_to_save():
            state = {"model": dmp.state_dict(), "optimizer": dmp.fused_optimizer.state_dict()}
        dcp.save(state, storage_writer=TableWriter(path))
    """
    with _made_only_for(_SAVE):
        yield


@contextmanager
def _made_only_for(use: str) -> Iterator[None]:
    token = _made_for.set(use)
    try:
        yield
    finally:
        _made_for.reset(token)


class ShardSums(NamedTuple):
    """One rank's part of the checksum of a table; all-gathered.

    Attributes:
        by_name: content sums of its tensors by row, and of "waiting".
        step: number of training forwards.
        clock: numbers [2, K], from the first rank that holds the table, as all have the same; else None. Not
            a tensor: those who got it would make it alone, and another rank would wait if one cannot.
        made_for: what the state dict is for. Unless it is for anything, the rows were not summed: they are
            summed while they are written, or never.
    """

    by_name: dict[str, int]
    step: int
    clock: list[list[int]] | None = None
    made_for: str = _ANYTHING


class ShardSummary(NamedTuple):
    """One rank's rows, counts and sums of a table; all-gathered before saving.

    Attributes:
        sums: its part of the checksum.
        share: the rank's share of the rows.
        cells: its rows in each cell; None if the rank lacks the table's first column.
        waiting: share of the waiting ids; None if the rank lacks the first column, or no ids wait.
        waiting_cells: its waiting ids in each cell, likewise.
    """

    sums: ShardSums
    share: Share
    cells: CellCounts | None = None
    waiting: Share | None = None
    waiting_cells: CellCounts | None = None


class ShardSource(ABC):
    """A reader of the shards of one table, for one state dict; valid until the shards change.

    `entry` loads the tensors of this source; None: they are not loaded.

    Attributes:
        canonical: the rows of each shard in canonical order.
    """

    order: ClassVar[tuple[str, ...]]  # tensor names in the order of their sums in the checksum

    def __init__(self, table: Table, entry: Any) -> None:
        self.table = table
        self._entry = entry
        is_sharded = entry is not None and table.group is not None
        self._made_for = _made_for.get() if is_sharded else _ANYTHING
        for shard in table.shards[:1]:
            ops.raise_errors(shard.id_map.slots)  # of earlier ops on a GPU: no save hides them
        self.canonical = [table.canonical(shard) for shard in table.shards]

    @abstractmethod
    def tensors(self, summaries: Sequence[ShardSummary | None]) -> dict[str, SavedTensor]:
        """Returns the tensors of the state dict, by name, from the summary of each rank; None: no shards."""

    @abstractmethod
    def tensors_of(self, shard: TableShard) -> list[RowTensor]:
        """Returns the tensors by row of a shard."""

    @abstractmethod
    def _with_life(self, sums: ShardSums) -> ShardSums:
        """Returns sums with clock and waiting ids added, if this state dict has them."""

    @abstractmethod
    def _small(self, known: Sequence[ShardSums]) -> dict[str, Tensor]:
        """Returns the tensors that are not by row, but for the checksum."""

    @property
    @abstractmethod
    def _waiting(self) -> CanonicalRows | None:
        """The waiting ids, if this state dict has them."""

    def summary(self) -> ShardSummary | None:
        """Returns the summary of this rank's shards; None if it holds no shards."""
        table = self.table
        if table.part is None:
            return None
        if self._made_for == _LOAD:
            return self._unsummed(table.part)
        sums: dict[str, int] = {}
        if self._made_for == _ANYTHING:
            for shard, rows in zip(table.shards, self.canonical, strict=True):
                sums = add_sums(sums, sums_of_shard(shard, rows, self.tensors_of(shard)))
        rows = self.canonical[0]
        of_rank = self.with_small(sums)._replace(made_for=self._made_for)
        summary = ShardSummary(of_rank, share_of(rows, table))
        if not table.has_first_column:
            return summary
        summary = summary._replace(cells=CellCounts.of(rows))
        waiting = self._waiting
        if waiting is None:
            return summary
        cells = CellCounts.of(waiting)
        return summary._replace(waiting=share_of(waiting, table), waiting_cells=cells)

    def _unsummed(self, part: int) -> ShardSummary:
        """Returns a summary that tells the numbers of rows only."""
        sums = ShardSums({}, self.table.shards[0].step, made_for=_LOAD)
        summary = ShardSummary(sums, Share(part, self.canonical[0].count, []))
        if self._waiting is None or not self.table.has_first_column:
            return summary
        return summary._replace(waiting=Share(part, self._waiting.count, []))

    def note(self, summaries: Sequence[ShardSummary | None]) -> None:
        """Notes in the entry if the tensors cannot be saved: some rank has not summed its rows."""
        if self._entry is not None:
            known = (one.sums for one in summaries if one is not None)
            self._entry.is_only_to_load = any(one.made_for == _LOAD for one in known)

    def with_small(self, by_row: Mapping[str, int]) -> ShardSums:
        """Returns this rank's part of the checksum, from the sums of its tensors by row."""
        return self._with_life(ShardSums(dict(by_row), self.table.shards[0].step))

    def checksum(self, known: Sequence[ShardSums]) -> Tensor:
        """Returns the words of the checksum, from the sums of the ranks that hold rows."""
        return as_words(self._sums(known), self.order)

    def _sums(self, known: Sequence[ShardSums]) -> dict[str, int]:
        """Returns the sums in the checksum, by tensor; of rows those that are known."""
        name = self.table.name
        small = self._small(known).items()
        of_small = {one: sum_of_small(name, one, tensor) for one, tensor in small}
        # Also the state of a table without rows has a sum.
        nothing = dict.fromkeys(self.table.optimizer.state_names, 0)
        return add_sums(nothing, *(one.by_name for one in known), of_small)

    def _by_row(
        self, known: Sequence[ShardSummary], wholes: Mapping[str, _Whole]
    ) -> dict[str, SavedTensor]:
        """Returns the tensors by row, from the summaries of the ranks that hold rows."""
        runs = runs_of([one.share for one in known], self.table.part)
        parts: dict[str, list[Part]] = {name: [] for name in wholes}
        for shard, rows in zip(self.table.shards, self.canonical, strict=True):
            for name, first, columns, is_saved in self.tensors_of(shard):
                reader = _RowReader(rows, shard, name, first)
                for run in runs.mine:
                    read = _shifted(run, reader.read)
                    summed = _shifted(run, reader.read_summed) if self._made_for == _SAVE else None
                    size = (run.rows, *columns)
                    part = Part((run.place, *first), size, read, is_saved, None, summed)
                    parts[name].append(part)
        return {
            name: SavedTensor((runs.total, *columns), dtype, parts[name], self._entry)
            for name, (columns, dtype) in wholes.items()
        }

    def _not_by_row(self, known: Sequence[ShardSummary]) -> dict[str, SavedTensor]:
        """Returns the tensors that are not by row: "cells", the small tensors and "checksum"."""
        sums, is_saved = [one.sums for one in known], self.table.rank == 0
        whole = self._small(sums)
        made = {one: whole_tensor(tensor, is_saved, self._entry) for one, tensor in whole.items()}
        summed = self._sums(sums)
        words = as_words(summed, self.order)
        if any(one.made_for == _SAVE for one in sums):
            left = LeftSums(summed, self.order)
            made["checksum"] = tensor_of_left_sums(left, len(words), is_saved, self._entry)
        else:
            made["checksum"] = whole_tensor(words, is_saved, self._entry)
        cells = [one.cells for one in known if one.cells is not None]
        waiting = [one.waiting_cells for one in known if one.waiting_cells is not None]
        return {"cells": index_tensor(cells, waiting, is_saved, self._entry), **made}


class ModelSource(ShardSource):
    """A reader of rows, ids, scores, counters, clock, config and checksum of one table."""

    order = MODEL_TENSORS

    def _with_life(self, sums: ShardSums) -> ShardSums:
        table, life = self.table, self.table.shards[0].life
        if life is None:
            return sums
        if table.has_first_column and table.part == 0:
            sums = sums._replace(clock=life.clock.export().tolist())
        waiting = self._waiting
        if waiting is None or not table.has_first_column:
            return sums
        parts = [sums.by_name]
        for start in range(0, waiting.count, _WAITING_ROWS):
            read = self._read_waiting(start, min(waiting.count, start + _WAITING_ROWS))
            parts.append({"waiting": sum_of_small(table.name, "waiting", read)})
        return sums._replace(by_name=add_sums(*parts))

    def _small(self, known: Sequence[ShardSums]) -> dict[str, Tensor]:
        small = {"config": to_bytes(self.table.config)}
        if self.table.options.has_life:
            clock: list[list[int]] = next(
                (one.clock for one in known if one.clock is not None), [[], []]
            )
            small["clock"] = torch.tensor(clock, dtype=torch.int64, device="cpu")
        return small

    def tensors(self, summaries: Sequence[ShardSummary | None]) -> dict[str, SavedTensor]:
        """Returns the tensors of the state dict, by name."""
        table, known = self.table, [one for one in summaries if one is not None]
        dtype = table.dtype
        columns = (table.embedding_dim,)
        wholes: dict[str, _Whole] = {"weight": (columns, dtype)}
        wholes |= dict.fromkeys(self._one_a_row, ((), torch.int64))
        made = self._by_row(known, wholes)
        if table.options.counts_waiting:
            runs = runs_of([one.waiting for one in known], table.part)
            is_saved, parts = table.has_first_column, []
            for run in runs.mine:
                read = _shifted(run, self._read_waiting)
                parts.append(Part((run.place, 0), (run.rows, 3), read, is_saved))
            made["waiting"] = SavedTensor((runs.total, 3), torch.int64, parts, self._entry)
        return {**self._not_by_row(known), **made}

    @property
    def _one_a_row(self) -> tuple[str, ...]:
        return ("ids", "last_seen", "count") if self.table.options.has_life else ("ids",)

    def tensors_of(self, shard: TableShard) -> list[RowTensor]:
        """Returns the tensors by row of a shard."""
        made = [RowTensor("weight", (shard.first_column,), (shard.columns,))]
        if shard is self.table.shards[0]:
            made += [RowTensor(name, (), (), shard.first_column == 0) for name in self._one_a_row]
        return made

    @cached_property
    def _waiting(self) -> CanonicalRows | None:
        """The waiting ids, as they are when the shards are summed."""
        first = self.table.shards[0]
        if first.life is None or first.life.waiting is None:
            return None
        return CanonicalRows(first.life.waiting.id_map, self.table.where, lambda: stamp_of(first))

    def _read_waiting(self, start: int, stop: int) -> Tensor:
        life = self.table.shards[0].life
        assert self._waiting is not None and life is not None and life.waiting is not None
        with turn_of(self.table):
            ids, rows = self._waiting.read(start, stop)
            return to_host(torch.stack([ids, *life.waiting.read(rows)], dim=1))


class OptimizerSource(ShardSource):
    """A reader of optimizer state, step, config and checksum of one table."""

    order = OPTIMIZER_TENSORS

    def _with_life(self, sums: ShardSums) -> ShardSums:
        return sums

    def _small(self, known: Sequence[ShardSums]) -> dict[str, Tensor]:
        config = to_bytes(optimizer_config(self.table.optimizer, self.table.cuts))
        return {"step": torch.tensor(known[0].step, device="cpu"), "config": config}

    @property
    def _waiting(self) -> None:
        return None

    def tensors(self, summaries: Sequence[ShardSummary | None]) -> dict[str, SavedTensor]:
        """Returns the tensors of the state dict, by name."""
        known = [one for one in summaries if one is not None]
        optimizer, cuts = self.table.optimizer, self.table.cuts
        wholes: dict[str, _Whole] = {
            name: ((len(cuts) - 1 if optimizer.is_rowwise(name) else cuts[-1],), torch.float32)
            for name in optimizer.state_names
        }
        return {**self._not_by_row(known), **self._by_row(known, wholes)}

    def tensors_of(self, shard: TableShard) -> list[RowTensor]:
        """Returns the tensors by row of a shard."""
        return [
            RowTensor(one.name, (self.table.cuts.index(shard.first_column),), (1,))
            if one.is_rowwise
            else RowTensor(one.name, (shard.first_column,), (shard.columns,))
            for one in named_states(shard)
        ]


def saved_tensors(
    tables: Sequence[Table], call: str, make: Callable[[Table], Sequence[ShardSource]]
) -> list[dict[str, SavedTensor]]:
    """Returns the tensors of several sources, in the order of the tables. Collective.

    All sources of a table read it at one moment.

    `make` returns the sources of one table. The tables, at least one, in their order, and `call`, are the
    same on all ranks.
    """
    group = tables[0].group
    sources: list[ShardSource] = []

    def summarize() -> list[ShardSummary | None]:
        summaries: list[ShardSummary | None] = []
        for table in tables:
            with turn_of(table, also_torn=True):  # to be the places of a load
                made = make(table)
                summaries += [source.summary() for source in made]
            sources.extend(made)
        return summaries

    summaries = list(zip(*gather_results(group, call, summarize), strict=True))
    for source, by_rank in zip(sources, summaries, strict=True):
        source.note(by_rank)
    return run_together(
        group,
        call,
        lambda: [
            source.tensors(by_rank) for source, by_rank in zip(sources, summaries, strict=True)
        ],
    )


def saved_sums(tables: Sequence[Table], call: str) -> list[tuple[Tensor, Tensor]]:
    """Returns the words of the two checksums of each table: of the model, of the optimizer. Collective.

    Reads the rows that were touched since the last call, in a table on the CPU that records its changes; else
    all rows.

    The tables, in their order, and `call`, are the same on all ranks.
    """
    of_tables: list[tuple[ShardSource, ShardSource]] = []

    def summed() -> list[tuple[ShardSums, ShardSums] | None]:
        sums: list[tuple[ShardSums, ShardSums] | None] = []
        for table in tables:
            with turn_of(table):
                model, optimizer = ModelSource(table, None), OptimizerSource(table, None)
                of_tables.append((model, optimizer))
                sums.append(_sums_of(model, optimizer))
        return sums

    by_rank = gather_results(tables[0].group, call, summed)

    def words() -> list[tuple[Tensor, Tensor]]:
        found = []
        for sources, sums in zip(of_tables, zip(*by_rank, strict=True), strict=True):
            known = zip(*(one for one in sums if one is not None), strict=True)
            model, optimizer = (
                source.checksum(of_ranks) for source, of_ranks in zip(sources, known, strict=True)
            )
            found.append((model, optimizer))
        return found

    return run_together(tables[0].group, call, words)


def _sums_of(model: ShardSource, optimizer: ShardSource) -> tuple[ShardSums, ShardSums] | None:
    """Returns this rank's parts of the two checksums of a table; None if it holds no shards of it."""
    table = model.table
    if table.part is None:
        return None
    of_both: list[dict[str, int]] = [{}, {}]
    for shard, rows in zip(table.shards, model.canonical, strict=True):
        tensors = [source.tensors_of(shard) for source in (model, optimizer)]
        sums = present_sums(shard, rows, [one for some in tensors for one in some])
        for place, some in enumerate(tensors):
            own = {one.name: sums[one.name] for one in some if one.is_saved}
            of_both[place] = add_sums(of_both[place], own)
    return model.with_small(of_both[0]), optimizer.with_small(of_both[1])


_Result = TypeVar("_Result")


def _shifted(run: Run, read: Callable[[int, int], _Result]) -> Callable[[int, int], _Result]:
    """Returns a reader of rows [start, stop) of a run, from a reader of this rank's rows."""
    return lambda start, stop: read(run.here + start, run.here + stop)


class _RowReader(NamedTuple):
    """A reader of one tensor of a shard, in canonical order, to the CPU.

    `first` is the column at which the shard begins in the whole tensor; () if that has one dimension.
    """

    rows: CanonicalRows
    shard: TableShard
    name: str
    first: tuple[int, ...]

    def read(self, start: int, stop: int) -> Tensor:
        """Returns rows [start, stop)."""
        return to_host(self._with_ids(start, stop)[1])

    def read_summed(self, start: int, stop: int) -> tuple[Tensor, int]:
        """Returns rows [start, stop) and their content sum."""
        ids, values = self._with_ids(start, stop)
        summed = content_sum(self.shard.name, self.name, ids, values, *self.first)
        return to_host(values), summed

    def _with_ids(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        with turn_of(self.shard):
            ids, places = self.rows.read(start, stop)
            is_ids = self.name == "ids"
            return ids, ids if is_ids else read_tensor(self.shard, self.name, places)
