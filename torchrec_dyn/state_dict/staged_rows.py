"""StagedRows: rows read from a checkpoint, kept beside the table until all rows are verified.

A commit then swaps the staged stores into the table. A place is the number of a row in the canonical order
of the whole table.

Legend: M rows and C columns of a chunk, K times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    add_sums,
    content_sum,
    is_canonical,
    rows_summed,
)
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.life import NO_STEP, AdmissionCounters, Clock, RowLife, Scores, last_step
from torchrec_dyn.policies import MOST_COUNT
from torchrec_dyn.state_dict.places import Places
from torchrec_dyn.storage import (
    CROSSING_BYTES,
    CanonicalRows,
    IdMap,
    RowNumbers,
    RowStore,
    unsigned,
)
from torchrec_dyn.table import TableShard, replaced_whole

_READ_AT_ONCE = 1 << 20


def put_block(
    store: RowStore, origin: int, places: Places, place: int, column: int, values: Tensor
) -> int:
    """Copies the part of a block of a saved tensor that belongs into a store; returns the count of numbers.

    The store has the rows at `places`, and the columns of the tensor from `origin` on. The block,
    values [M, C], begins with the row at `place` and at `column` of the tensor.
    """
    first = max(column, origin)
    end = min(column + values.shape[1], origin + store.columns)
    if first >= end:
        return 0
    rows = 0
    for low, high, row in places.within(place, place + len(values)):
        part = values[low - place : high - place, first - column : end - column]
        store.put(row, first - origin, part)
        rows += high - low
    return rows * (end - first)


def place_of_block(
    store: RowStore, origin: int, places: Places, offset: Sequence[int], size: Sequence[int]
) -> Tensor | None:
    """Returns the part of a store into which a whole block of a saved tensor belongs; None if there is none.

    `offset` and `size` are in rows and columns of the tensor; the others as in `put_block`.
    """
    column = offset[1] - origin
    ranges = list(places.within(offset[0], offset[0] + size[0]))
    if column < 0 or column + size[1] > store.columns or len(ranges) != 1:
        return None
    low, high, row = ranges[0]
    return store.within(row, column, size) if high - low == size[0] else None


class StagedRows:
    """The staged ids, weights, scores and waiting ids for one shard of a table.

    Args:
        places: places of the rows to read.
        first_column: number of the first column of the shard.
        weights: an empty store for the saved rows.
        limit: limit of the table, for its id map.
        owns: function that returns for ids [M] a mask, [M] bool, of the ids that belong here; None: all ids.
        counters: limit of the waiting ids; None if ids do not wait.
    """

    def __init__(
        self,
        name: str,
        where: str,
        places: Places,
        first_column: int,
        weights: RowStore,
        limit: int,
        owns: Callable[[Tensor], Tensor] | None,
        counters: int | None,
    ) -> None:
        self.name = name
        self.where = where
        self.places = places
        self.first_column = first_column
        self._limit = limit
        self._device = device = weights.device
        self.id_map = IdMap(limit, device)
        self.id_map.reserve(places.count)
        self.weights = weights
        self.weights.reserve(places.count)
        self.scores = Scores(weights.shift, device)
        self.waiting = None if counters is None else AdmissionCounters(counters, device)
        self._converted: RowStore | None = None  # the weights converted to another dtype
        self.others: list[Tensor] = []  # rows of ids that belong to other ranks
        self.sums: dict[str, int] = {}  # content sum of "waiting", which is not kept by row
        self._reader: CanonicalRows | None = None  # of `id_map`, once all ids are there
        self._owns = owns
        self._received: dict[str, int] = {}  # count of received numbers, by tensor
        self._last_step = 0
        self._ends: list[tuple[int, int, int]] = []  # of each chunk: place, first and last mixed id

    def receive(self, name: str, place: int, column: int, values: Tensor) -> None:
        """Stages a chunk.

        values: [M, C] or [M], from the row at `place` and the column `column` of the tensor on.

        Raises:
            ValueError: if the chunk is damaged.
        """
        if name == "waiting":
            self._receive_waiting(values)
            return
        if name == "weight":
            put = put_block(self.weights, self.first_column, self.places, place, column, values)
            self._received[name] = self._received.get(name, 0) + put
            return
        for low, high, row in self.places.within(place, place + len(values)):
            chunk = values[low - place : high - place]
            if name == "ids":
                self._receive_ids(chunk.contiguous(), low, row)
            else:
                self._receive_scores(name, chunk.contiguous(), row)
            self._received[name] = self._received.get(name, 0) + chunk.numel()

    def _receive_ids(self, ids: Tensor, place: int, row: int) -> None:
        if not is_canonical(ids):
            raise ValueError(
                f"{self.where}: expected saved ids in canonical order, got another order. {DAMAGED}"
            )
        first, last = ops.mix64(ids[[0, -1]]).tolist()
        self._ends.append((place, unsigned(first), unsigned(last)))
        rows = torch.arange(row, row + ids.numel(), device=ids.device)
        if self._owns is not None:
            mine = self._owns(ids)
            if not mine.all():
                self.others.append(rows[~mine].to(self._device))
                ids, rows = ids[mine], rows[mine]
        self.id_map.insert(ids.to(self._device), rows.to(self._device))

    def _receive_scores(self, name: str, values: Tensor, row: int) -> None:
        most = NO_STEP - 1 if name == "last_seen" else MOST_COUNT
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) <= most:
            raise ValueError(
                f"{self.where}: expected saved {name} from 0 to {most}, got other numbers. {DAMAGED}"
            )
        if not self.scores.store.blocks:
            self.scores.store.reserve_zeros(self.places.count)
        values = values.to(self._device)
        rows = torch.arange(row, row + values.numel(), device=self._device)
        last_seen, counts = self.scores.read(rows)
        if name == "last_seen":
            self.scores.write(rows, values, counts)
        else:
            self.scores.write(rows, last_seen, values)

    def _receive_waiting(self, values: Tensor) -> None:
        ids, last_seen, counts = values.t().contiguous()
        if values.numel() and not (
            0 <= int(last_seen.min()) <= int(last_seen.max()) < NO_STEP
            and 0 <= int(counts.min()) <= int(counts.max()) <= MOST_COUNT
        ):
            raise ValueError(
                f"{self.where}: expected saved counters with valid steps and counts, got other numbers. "
                f"{DAMAGED}"
            )
        if self._owns is not None:
            values = values[self._owns(ids)]
            ids, last_seen, counts = values.t().contiguous()
        summed = content_sum(self.name, "waiting", ids, values)
        self.sums = add_sums(self.sums, {"waiting": summed})
        if last_seen.numel():
            self._last_step = max(self._last_step, int(last_seen.max()))
        if self.waiting is not None:
            self.waiting.write(*(one.to(self._device) for one in (ids, last_seen, counts)))

    def check_complete(self) -> None:
        """Raises ValueError if numbers are missing or ids are not in canonical order."""
        columns = {"ids": 1, "weight": self.weights.columns}
        for name in ("last_seen", "count"):
            if name in self._received:
                columns[name] = 1
        for name, width in columns.items():
            if self._received.get(name, 0) != self.places.count * width:
                raise ValueError(
                    f"{self.where}: expected {self.places.count * width} numbers of {name}, got "
                    f"{self._received.get(name, 0)}. {DAMAGED}"
                )
        ends = sorted(self._ends)
        if any(last >= first for (_, _, last), (_, first, _) in pairwise(ends)):
            raise ValueError(
                f"{self.where}: expected saved ids in canonical order, got another order. {DAMAGED}"
            )

    def compact(self) -> int:
        """Copies the rows that belong here into smaller stores, if many staged rows belong to other ranks.

        Each rank that shares a small table reads the whole table: its cells are coarse.

        Returns:
            The number of rows in the stores, with the rows of `others`.
        """
        kept, self._reader = self.id_map.num_ids, None
        if not self.others:  # they are compact, perhaps since a commit that was interrupted
            return kept
        if self.places.count - kept <= kept // 8:
            return self.places.count
        ids, rows = self.id_map.contents()
        weights = self.weights.empty()
        scores = Scores(self.weights.shift, self.weights.device)
        here = torch.arange(kept, device=self._device)
        weights.reserve(kept)
        most = max(1, CROSSING_BYTES // weights.row_bytes)
        for some, from_rows in zip(here.split(most), rows.split(most), strict=True):
            weights.write(some, self.weights.read(from_rows))
        if self.has_scores:
            scores.store.reserve_zeros(kept)
            scores.write(here, *self.scores.read(rows))
        id_map = IdMap(self._limit, self._device)
        id_map.reserve(kept)
        id_map.insert(ids, here)
        self.id_map, self.weights, self.scores, self.others = id_map, weights, scores, []
        return kept

    def convert(self, dtype: torch.dtype, rows: int) -> None:
        """Converts the first `rows` weights block by block; after an interrupt a second call completes it."""
        if self.weights.dtype == dtype:
            return
        if self._converted is None:
            converted = self.weights.empty(dtype=dtype)
            converted.reserve(rows)
            self._converted = converted
        blocks, left = self._converted.blocks, self.weights.blocks
        while left:
            done = len(blocks) - len(left)
            # A copy of the whole last block would commit its memory.
            count = min(rows - (done << self.weights.shift), len(left[0]))
            blocks[done][:count].copy_(left[0][:count])
            self.weights.drop_first()
        self.weights = self._converted

    def by_row(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the ids that belong here and their staged rows, ascending, at most `most` at a time.

        Call it when all ids are staged: the ids are listed once for all calls, up to the rows that
        storage/canonical_rows.py keeps.
        """
        self._reader = self._reader or self.canonical()
        yield from self._reader.by_row(self.places.count, most)

    def canonical(self) -> CanonicalRows:
        """Returns the ids that belong here, and their staged rows, in canonical order."""
        id_map = self.id_map
        return CanonicalRows(id_map, self.where, lambda: id_map.num_ids)

    def summed(self, is_first: bool) -> dict[str, int]:
        """Returns the content sums of the rows that belong here, by tensor.

        Only the shard with the first column sums ids, scores and "waiting".
        """
        sums = self.sums if is_first else {}
        most = rows_summed(self.weights.row_bytes, self._device)
        for ids, rows in self.by_row(most):
            held = {"weight": self.weights.read_ascending(rows)}
            if is_first:
                held["ids"] = ids
                if self.has_scores:
                    held["last_seen"], held["count"] = self.scores.read(rows)
            first = self.first_column
            sums = add_sums(
                sums,
                {
                    name: content_sum(self.name, name, ids, one, first if name == "weight" else 0)
                    for name, one in held.items()
                },
            )
        return sums

    def last_step(self) -> int:
        """Returns the last training step recorded in scores and counters (life/saved_life.py)."""
        last = self._last_step
        for start in range(0, self.places.count if self.has_scores else 0, _READ_AT_ONCE):
            stop = min(self.places.count, start + _READ_AT_ONCE)
            rows = torch.arange(start, stop, device=self._device)
            last_seen, counts = self.scores.read(rows)
            last = max(last, last_step({"last_seen": last_seen, "count": counts}))
        return last

    @property
    def has_scores(self) -> bool:
        """True if scores were received for the rows that were read; without rows, none lacks a score."""
        return not self.places.count or {"last_seen", "count"} <= self._received.keys()


def commit_rows(
    table: TableShard,
    staged: StagedRows,
    clock: Tensor | None,
    initializer: Initializer | None,
    step: int,
) -> None:
    """Commits a verified load: swaps the staged stores into a table.

    Optimizer state is zero until its own state dict is loaded. A second call directly after changes nothing.

    The staged rows are checked and verified; do not use them afterwards. clock: [2, K] int64 as saved, or
    None. `initializer`, of the checkpoint, is for the rows of new ids; None: the table keeps its own. `step`
    is the last training step recorded in the rows of any rank; used only if the table has a life.
    """
    rows = staged.compact()
    staged.convert(table.dtype, rows)
    with replaced_whole(table):
        _swap(table, staged, rows, clock, step)
        if initializer is not None:
            table.start_as(initializer)


def _swap(
    table: TableShard, staged: StagedRows, rows: int, clock: Tensor | None, step: int
) -> None:
    before, device = table.id_map, table.device
    states = [state.empty() for state in table.states]  # blocks of as many rows as the staged ones
    table.reset(table.dtype, device)
    table.id_map, table.weights = staged.id_map, staged.weights
    table.row_numbers = RowNumbers(table.forwards, device)
    table.row_numbers.high_water_mark = rows
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    table.row_numbers.free(torch.cat([nothing, *staged.others]))
    for state, number in zip(states, table.optimizer.initial_states, strict=True):
        state.reserve_filled(rows, number)
    table.states = tuple(states)
    table.step = 0
    if table.life is not None:
        table.step = step
        _commit_life(table.life, table, staged, clock, rows)
    table.note_replaced(before)


def _commit_life(
    life: RowLife, table: TableShard, staged: StagedRows, clock: Tensor | None, rows: int
) -> None:
    if clock is not None and life.is_timed:
        life.clock = Clock.load(clock)
    if life.waiting is not None and staged.waiting is not None:
        life.waiting = staged.waiting
    table.step = max(table.step, life.clock.present_step - 1)
    life.is_unscored = not staged.has_scores
    if staged.has_scores:
        life.scores = staged.scores
    else:
        life.scores.store.reserve_zeros(rows)
        life = life.caught_up(max(table.step, life.clock.present_step), rows)
        table.life = life
    for others in staged.others:
        life.scores.forget(others)
