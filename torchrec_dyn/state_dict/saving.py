"""TableSource: the saved tensors of one table, for the state dicts of the model and of its optimizer.

No rows are read before the tensors are saved. Their content sums are added up as they are read, and the last
tensor of a state dict is its checksum: it reads the rows that nobody has read until then. So the sums are
those of the saved rows under any writer.

A place is the number of a row in the canonical order of the whole table. Each of S ranks owns one range of
mixed ids (ranks/routing.py), hence one run of places. The ids after the last range, at most S, are single
places at the end.

Legend: R rows of the whole table, M ids, K times, W summed tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.checkpoint_format import (
    CHECKSUM_WORDS,
    MODEL_CHECKSUM,
    MODEL_NAMES,
    OPTIMIZER_CHECKSUM,
    Part,
    SavedTensor,
    add_sums,
    as_words,
    content_sum,
    optimizer_config,
    rows_summed,
    sum_of_small,
    to_bytes,
    whole_tensor,
)
from torchrec_dyn.ranks import Table, gather_results, ids_per_rank
from torchrec_dyn.storage import CanonicalRows, SumRows, to_host, turn_of, unsigned
from torchrec_dyn.table import TableShard, named_states, read_tensor, stamp_of


class Share(NamedTuple):
    """The number of ids on a rank; all-gathered to find the places of each rank."""

    part: int  # number of the rank among the ranks that share the rows
    rows: int
    tail: list[int]  # mixed ids after the last range, ascending


class Run(NamedTuple):
    """Rows that are neighbours on this rank and in the whole table."""

    here: int  # place of the first row in the canonical order of this rank
    place: int  # its place in that of the whole table
    rows: int


def share_of(rows: CanonicalRows, table: Table) -> Share:
    """Returns the share of this rank, which must hold a part of the table."""
    part, ranks = table.part, table.layout.row_ranks
    assert part is not None
    tail: list[int] = []
    if ranks > 1 and rows.count:
        beyond = rows.from_mixed(ids_per_rank(ranks) * ranks)
        tail = [unsigned(mixed) for mixed in ops.mix64(beyond).tolist()]
    return Share(part, rows.count, tail)


def runs_of(shares: Sequence[Share | None], part: int | None) -> tuple[int, list[Run]]:
    """Returns the number of rows of the whole table, and those of a part, from the shares of all ranks."""
    by_part = {share.part: share for share in shares if share is not None}
    starts, start = {}, 0
    for number in sorted(by_part):
        starts[number] = start
        start += by_part[number].rows - len(by_part[number].tail)
    tails = sorted(mixed for share in by_part.values() for mixed in share.tail)
    total = start + len(tails)
    if part is None:
        return total, []
    mine = by_part[part]
    ordered = mine.rows - len(mine.tail)
    runs = [Run(0, starts[part], ordered)] if ordered else []
    runs += [Run(ordered + i, start + tails.index(mixed), 1) for i, mixed in enumerate(mine.tail)]
    return total, runs


class _RowTensor(NamedTuple):
    """One tensor by row of a shard; `first` and `columns` are () if it has one dimension."""

    name: str
    first: tuple[int, ...]  # column in the whole tensor
    columns: tuple[int, ...]
    is_saved: bool = True  # False: the tensor is for copies only


class Counts(NamedTuple):
    """The numbers of one rank that holds rows of a table; all-gathered."""

    share: Share
    waiting: Share | None  # None: it lacks the first column, or no ids wait
    step: int  # number of training forwards
    clock: list[list[int]] | None  # [2, K], from the first rank that holds rows


class TableSource:
    """The tensors of one table as it is now, for state dicts; valid until its shards change.

    `entry` loads the tensors; None: they are not loaded.
    """

    def __init__(self, table: Table, entry: Any = None) -> None:
        self.table = table
        self._entry = entry
        for shard in table.shards[:1]:
            ops.raise_errors(shard.id_map.slots)  # of earlier ops on a GPU: no save hides them
        self.canonical = [table.canonical(shard) for shard in table.shards]
        self.waiting = _waiting_ids(table)

    def counts(self) -> Counts | None:
        """Returns the numbers of this rank; None if it holds no rows."""
        table = self.table
        if table.part is None:
            return None
        waiting = self.waiting if table.has_first_column else None
        return Counts(
            share_of(self.canonical[0], table),
            None if waiting is None else share_of(waiting, table),
            table.shards[0].step,
            _clock(table),
        )

    def tensors(
        self, by_rank: Sequence[Counts | None]
    ) -> tuple[dict[str, SavedTensor], dict[str, SavedTensor]]:
        """Returns the tensors of the model's and of the optimizer's state dict."""
        table, held = self.table, [counts for counts in by_rank if counts is not None]
        small = _small_tensors(table, held[0].step, [counts.clock for counts in held])
        saved = {
            name: whole_tensor(tensor, table.rank == 0, self._entry)
            for name, tensor in small.items()
        }
        readers = self._readers()
        saved |= self._row_tensors(held, readers)
        states = table.optimizer.state_names
        model_names = [name for name in MODEL_NAMES if name in saved]
        optimizer_names = ["optimizer_config", *states, "step"]
        summed = [*optimizer_names, *(["ids"] if states else [])]
        saved[MODEL_CHECKSUM] = self._checksum(model_names, small, readers, by_rank)
        saved[OPTIMIZER_CHECKSUM] = self._checksum(summed, small, readers, by_rank)
        return (
            {name: saved[name] for name in (*model_names, MODEL_CHECKSUM)},
            {name: saved[name] for name in (*optimizer_names, OPTIMIZER_CHECKSUM)},
        )

    def _row_tensors(
        self, held: Sequence[Counts], readers: Mapping[str, Sequence[_RowReader]]
    ) -> dict[str, SavedTensor]:
        """Returns the tensors by row, also on a rank that holds no rows."""
        table = self.table
        rows = runs_of([counts.share for counts in held], table.part)
        waits = table.options.counts_waiting
        waiting = runs_of([counts.waiting for counts in held], table.part if waits else None)
        saved = {}
        for name, (columns, dtype) in _whole_tensors(table).items():
            total, runs = waiting if name == "waiting" else rows
            parts = [reader.part(run) for reader in readers.get(name, ()) for run in runs]
            saved[name] = SavedTensor((total, *columns), dtype, parts, self._entry)
        return saved

    def _checksum(
        self,
        names: Sequence[str],
        small: Mapping[str, Tensor],
        readers: Mapping[str, Sequence[_RowReader]],
        by_rank: Sequence[Counts | None],
    ) -> SavedTensor:
        """Returns the checksum of some tensors: a row of sums, and the step, from each rank with rows."""
        table = self.table
        steps = [counts.step for counts in by_rank if counts is not None]
        place = sum(counts is not None for counts in by_rank[: table.rank])
        step = 0 if table.group is None else steps[0]
        own = [reader for name in names for reader in readers.get(name, ()) if reader.is_saved]

        def read(start: int, stop: int) -> Tensor:
            sums = {
                name: sum_of_small(table.name, name, small[name]) for name in names if name in small
            }
            words = as_words(add_sums(sums, *({reader.name: reader.total()} for reader in own)))
            return torch.cat([words, torch.tensor([step], device="cpu")])[None][start:stop]

        parts = [Part((place, 0), (1, CHECKSUM_WORDS), read)] if table.part is not None else []
        return SavedTensor((len(steps), CHECKSUM_WORDS), torch.int64, parts, self._entry)

    def _readers(self) -> dict[str, list[_RowReader]]:
        """Returns the readers of this rank's rows, by tensor."""
        readers: dict[str, list[_RowReader]] = {}
        for shard, rows in zip(self.table.shards, self.canonical, strict=True):
            for tensor in row_tensors(self.table, shard):
                reader = _RowReader(tensor, shard, rows, self.table.name)
                readers.setdefault(tensor.name, []).append(reader)
        if self.waiting is not None:
            tensor = _RowTensor("waiting", (0,), (3,), self.table.has_first_column)
            first = self.table.shards[0]
            readers["waiting"] = [_RowReader(tensor, first, self.waiting, self.table.name)]
        return readers


class _RowReader:
    """Reads one tensor of a shard in canonical order, and keeps the content sums of what it reads.

    `table` is the name on which the sums depend.
    """

    def __init__(
        self, tensor: _RowTensor, shard: TableShard, rows: CanonicalRows, table: str
    ) -> None:
        self.name, self.first, self.columns, self.is_saved = tensor
        self._shard, self._rows, self._table = shard, rows, table
        # Of stretches that were read, by start: stop and sum.
        self._sums: dict[int, tuple[int, int]] = {}

    def part(self, run: Run) -> Part:
        """Returns the part of the whole tensor at a run."""

        def read(start: int, stop: int) -> Tensor:
            return to_host(self._read(run.here + start, run.here + stop))

        return Part((run.place, *self.first), (run.rows, *self.columns), read, self.is_saved)

    def total(self) -> int:
        """Returns the content sum of all rows, and reads those that were not read."""
        place = total = 0
        while place < self._rows.count:
            if place not in self._sums:
                # Another thread may be reading.
                later = [start for start in list(self._sums) if start > place]
                self._read(place, min(*later, place + self._rows_at_once, self._rows.count))
            place, summed = self._sums[place]
            total += summed
        return unsigned(total)

    @property
    def _rows_at_once(self) -> int:
        return rows_summed(8 * max((1, *self.columns)), self._shard.device)

    def _read(self, start: int, stop: int) -> Tensor:
        with turn_of(self._shard):
            ids, places = self._rows.read(start, stop)
            if self.name == "ids":
                values = ids
            elif self.name == "waiting":
                values = _waiting_rows(self._shard, ids, places)
            else:
                values = read_tensor(self._shard, self.name, places)
        if start < stop:
            summed = content_sum(self._table, self.name, ids, values, *self.first)
            self._sums[start] = stop, summed
        return values


def row_tensors(table: Table, shard: TableShard) -> list[_RowTensor]:
    """Returns the tensors by row of a shard: a rank saves ids and scores only with the first column."""
    tensors = [_RowTensor("weight", (shard.first_column,), (shard.columns,))]
    if shard is table.shards[0]:
        names = ("ids", "last_seen", "count") if table.options.has_life else ("ids",)
        tensors += [_RowTensor(name, (), (), shard.first_column == 0) for name in names]
    for state in named_states(shard):
        first, columns = shard.first_column, shard.columns
        if state.is_rowwise:
            first, columns = table.cuts.index(first), 1
        tensors.append(_RowTensor(state.name, (first,), (columns,)))
    return tensors


def saved_tensors(
    tables: Sequence[Table], call: str, make: Callable[[Table], TableSource]
) -> list[tuple[dict[str, SavedTensor], dict[str, SavedTensor]]]:
    """Returns the tensors of each table, of the model's and of the optimizer's state dict. Collective."""
    sources: list[TableSource] = []

    def count() -> list[Counts | None]:
        counts = []
        for table in tables:
            with turn_of(table, also_torn=True):  # to be the places of a load
                sources.append(make(table))
                counts.append(sources[-1].counts())
        return counts

    by_rank = gather_results(tables[0].group, call, count)
    return [
        source.tensors(counts)
        for source, counts in zip(sources, zip(*by_rank, strict=True), strict=True)
    ]


def saved_sums(tables: Sequence[Table], call: str) -> list[dict[str, int]]:
    """Returns the content sums of each table, by tensor. Collective."""
    by_rank = gather_results(tables[0].group, call, lambda: [sums_here(table) for table in tables])
    return [add_sums(*parts) for parts in zip(*by_rank, strict=True)]


def sums_here(table: Table) -> dict[str, int]:
    """Returns this rank's part of the content sums of a table, by tensor.

    Of a table on the CPU that records its changes it reads only the rows touched since the last call. The
    table may have another name than its shards: that under which it was saved elsewhere.
    """
    if table.part is None:
        return {}
    with turn_of(table):
        source = TableSource(table)
        sums = []
        for shard, rows in zip(table.shards, source.canonical, strict=True):
            tensors = row_tensors(table, shard)
            if table.maps is None and table.name == shard.name:
                sums.append(_present_sums(shard, rows, tensors))
            else:
                sums.append(_sums_of_shard(shard, rows, tensors, table.name))
        if table.has_first_column:
            sums += [{"waiting": reader.total()} for reader in source._readers().get("waiting", ())]
        if _is_first(table):
            small = _small_tensors(table, table.shards[0].step, [_clock(table)])
            sums += [{name: sum_of_small(table.name, name, saved)} for name, saved in small.items()]
    return add_sums(*sums)


def _sums_of_shard(
    shard: TableShard, rows: CanonicalRows, tensors: Sequence[_RowTensor], table: str
) -> dict[str, int]:
    """Returns the content sums of all of a shard's rows, by tensor; 0 for a tensor without rows."""
    sums = {tensor.name: 0 for tensor in tensors if tensor.is_saved}
    most = rows_summed(shard.weights.row_bytes, shard.device)
    chunks = rows.by_row(shard.row_numbers.high_water_mark, most)
    return add_sums(sums, _sums_of(shard, tensors, chunks, True, table))


def _present_sums(
    shard: TableShard, rows: CanonicalRows, tensors: Sequence[_RowTensor]
) -> dict[str, int]:
    """Returns `_sums_of_shard`, by the rows touched since the last call if the log of changes lists them."""
    touched = None if shard.change_log is None else shard.change_log.touched
    sums = None if touched is None else touched.sums(shard.id_map)
    if sums is None:
        sums = _sums_of_shard(shard, rows, tensors, shard.name)
        if touched is not None:
            touched.keep(sums, _summing(shard, tensors), shard.id_map)
    return sums


def _summing(shard: TableShard, tensors: Sequence[_RowTensor]) -> SumRows:
    """Returns a function that sums rows of a shard. It does not keep the shard: markers hold it."""
    reference = weakref.ref(shard)

    def sum_rows(ids: Tensor, rows: Tensor) -> dict[str, int]:
        held = reference()
        assert held is not None
        most = rows_summed(held.weights.row_bytes, held.device)
        chunks = zip(ids.split(most), rows.split(most), strict=True)
        return _sums_of(held, tensors, chunks, False, held.name)

    return sum_rows


def _sums_of(
    shard: TableShard,
    tensors: Sequence[_RowTensor],
    chunks: Iterable[tuple[Tensor, Tensor]],
    are_ascending: bool,
    table: str,
) -> dict[str, int]:
    """Returns the content sums of chunks of ids [M] int64, which have rows [M] int64, as of `read_tensor`."""
    sums: dict[str, int] = {}
    for ids, rows in chunks:
        for tensor in tensors if ids.numel() else ():
            if tensor.is_saved:
                name = tensor.name
                values = ids if name == "ids" else read_tensor(shard, name, rows, are_ascending)
                part = content_sum(table, name, ids, values, *tensor.first)
                sums[name] = unsigned(sums.get(name, 0) + part)
    return sums


def _is_first(table: Table) -> bool:
    """Returns True on the one rank that holds the first rows and columns."""
    return table.part == 0 and table.has_first_column


def _clock(table: Table) -> list[list[int]] | None:
    # Not a tensor: those who got it would make it alone, and another rank would wait if one cannot.
    life = table.shards[0].life
    return life.clock.export().tolist() if life is not None and _is_first(table) else None


def _small_tensors(
    table: Table, step: int, clocks: Sequence[list[list[int]] | None]
) -> dict[str, Tensor]:
    small = {
        "config": to_bytes(table.config),
        "step": torch.tensor(step, device="cpu"),
        "optimizer_config": to_bytes(optimizer_config(table.optimizer, table.cuts)),
    }
    if table.options.has_life:
        times = [clock for clock in clocks if clock is not None] or [[[], []]]
        small["clock"] = torch.tensor(times[0], dtype=torch.int64, device="cpu")
    return small


def _whole_tensors(table: Table) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns columns and dtype of the whole tensors by row, also on a rank that holds no rows."""
    numbers, cuts = ((), torch.int64), table.cuts
    wholes = {"weight": ((table.embedding_dim,), table.dtype), "ids": numbers}
    if table.options.has_life:
        wholes |= {"last_seen": numbers, "count": numbers}
    if table.options.counts_waiting:
        wholes["waiting"] = (3,), torch.int64
    for name in table.optimizer.state_names:
        columns = len(cuts) - 1 if table.optimizer.is_rowwise(name) else cuts[-1]
        wholes[name] = (columns,), torch.float32
    return wholes


def _waiting_ids(table: Table) -> CanonicalRows | None:
    if not table.shards:
        return None
    first = table.shards[0]
    if first.waiting is None:
        return None
    return CanonicalRows(first.waiting.id_map, table.where, lambda: stamp_of(first))


def _waiting_rows(shard: TableShard, ids: Tensor, places: Tensor) -> Tensor:
    assert shard.waiting is not None
    return torch.stack([ids, *shard.waiting.read(places)], dim=1)
