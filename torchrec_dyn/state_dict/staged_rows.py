"""StagedRows: rows and optimizer state read from a checkpoint, in a shard beside the table.

Once all rows are verified, `replace` or `merge` of the table takes that shard. A place is the number of a row
in the canonical order of the whole table.

Legend: M rows and C columns of a chunk, K times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    add_sums,
    content_sum,
    is_canonical,
    mean_over_cuts,
    rows_summed,
)
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.life import NO_STEP, Clock, RowLife, Scores, last_step
from torchrec_dyn.policies import MOST_COUNT
from torchrec_dyn.ranks import Table
from torchrec_dyn.state_dict.places import Places, Run
from torchrec_dyn.storage import CanonicalRows, IdMap, RowStore, unsigned
from torchrec_dyn.table import TableShard, beside, named_states, with_same_contents


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
    """The staged rows of one shard of a table.

    `places` are those of the rows to read, and `dtype` is that of the saved rows. `widths` are the columns of
    each saved optimizer state; `has_all_cuts` is False if row-wise state has only the shard's own column.

    Attributes:
        rows: the shard beside the table.
        others: rows of ids that belong to other ranks.
    """

    def __init__(
        self,
        table: Table,
        shard: TableShard,
        places: Places,
        dtype: torch.dtype,
        widths: Mapping[str, int],
        has_all_cuts: bool,
    ) -> None:
        self.where = table.where
        self.places = places
        self.rows = beside(shard, dtype)
        self.rows.id_map.reserve(places.count)
        self.rows.weights.reserve(places.count)
        self._is_first, self._has_all_cuts = shard.first_column == 0, has_all_cuts
        self._owns = table.owns if table.layout.row_ranks > 1 else None
        self._dtype, self._device = shard.dtype, shard.device
        # By tensor: the store, and the column of the tensor at which it begins.
        self._stores = {"weight": (self.rows.weights, shard.first_column)}
        for state in named_states(self.rows):
            if state.name not in widths:
                continue
            width, origin = shard.columns, shard.first_column
            if state.is_rowwise:
                width = widths[state.name] if has_all_cuts else 1
                origin = 0 if has_all_cuts else table.cuts.index(shard.first_column)
            store = state.store.empty(width, torch.float32)
            store.reserve(places.count)
            self._stores[state.name] = store, origin
        # Every shard has the row-wise state of all cuts; the first of the table sums it.
        self._not_summed = {
            state.name
            for state in named_states(self.rows)
            if state.is_rowwise and has_all_cuts and not self._is_first
        }
        self.others: list[Tensor] = []
        self.sums: dict[str, int] = {}  # content sum of "waiting", which is not kept by row
        self._received: dict[str, int] = {}  # count of received numbers, by tensor
        self._last_step = 0
        self._ends: list[tuple[int, int, int]] = []  # of each chunk: place, first and last mixed id

    @property
    def id_map(self) -> IdMap:
        """The ids that belong here, and their staged rows."""
        return self.rows.id_map

    def store(self, name: str) -> tuple[RowStore, int] | None:
        """Returns the store of a tensor and the column of the tensor at which it begins; None without one."""
        return self._stores.get(name)

    def receive(self, name: str, place: int, column: int, values: Tensor) -> None:
        """Stages a chunk; raises ValueError if it is damaged.

        values: [M, C] or [M], from the row at `place` and the column `column` of the tensor on.
        """
        if name == "waiting":
            self._receive_waiting(values)
            return
        if name in self._stores:
            put = put_block(*self._stores[name], self.places, place, column, values)
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

    @property
    def _life(self) -> RowLife:
        assert self.rows.life is not None
        return self.rows.life

    def _receive_scores(self, name: str, values: Tensor, row: int) -> None:
        most = NO_STEP - 1 if name == "last_seen" else MOST_COUNT
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) <= most:
            raise ValueError(
                f"{self.where}: expected saved {name} from 0 to {most}, got other numbers. {DAMAGED}"
            )
        scores = self._life.scores
        if not scores.store.blocks:
            scores.store.reserve_zeros(self.places.count)
        values = values.to(self._device)
        rows = torch.arange(row, row + values.numel(), device=self._device)
        last_seen, counts = scores.read(rows)
        if name == "last_seen":
            scores.write(rows, values, counts)
        else:
            scores.write(rows, last_seen, values)

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
        if self._is_first:
            summed = content_sum(self.rows.name, "waiting", ids, values)
            self.sums = add_sums(self.sums, {"waiting": summed})
        if last_seen.numel():
            self._last_step = max(self._last_step, int(last_seen.max()))
        if self._life.waiting is not None:
            self._life.waiting.write(*(one.to(self._device) for one in (ids, last_seen, counts)))

    def check_complete(self, has_rows: bool) -> None:
        """Raises ValueError if numbers are missing or ids are not in canonical order.

        Without rows only optimizer state was read.
        """
        columns = {name: store.columns for name, (store, _) in self._stores.items()}
        if has_rows:
            columns["ids"] = 1
        else:
            del columns["weight"]
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

    def summed(self, by_row: Iterator[tuple[Tensor, Tensor]] | None = None) -> dict[str, int]:
        """Returns the content sums of the rows that belong here, by tensor.

        Only the shard with the first column sums ids, scores and counters. `by_row` are ids and their staged
        rows, ascending; None: those of the staged ids.
        """
        sums, name = self.sums, self.rows.name
        if by_row is None:
            most = rows_summed(self.rows.weights.row_bytes, self._device)
            by_row = self.canonical().by_row(self.places.count, most)
            stores = self._stores
        else:  # of optimizer state alone
            stores = {one: self._stores[one] for one in self._stores if one != "weight"}
        has_scores = self._is_first and "last_seen" in self._received and self.has_scores
        for ids, rows in by_row:
            held = {"ids": (ids, 0)} if self._is_first else {}
            if has_scores and self.rows.life is not None:
                last_seen, counts = self.rows.life.scores.read(rows)
                held |= {"last_seen": (last_seen, 0), "count": (counts, 0)}
            for one, (store, origin) in stores.items():
                if one not in self._not_summed:
                    held[one] = store.read_ascending(rows), origin
            sums = add_sums(
                sums,
                {
                    one: content_sum(name, one, ids, values, column)
                    for one, (values, column) in held.items()
                },
            )
        return sums

    def canonical(self) -> CanonicalRows:
        """Returns the ids that belong here, and their staged rows, in canonical order."""
        return CanonicalRows(self.id_map, self.where, lambda: self.id_map.num_ids)

    def last_step(self) -> int:
        """Returns the last training step recorded in scores and counters (life/saved_life.py)."""
        last, life = self._last_step, self.rows.life
        if life is None or not self.has_scores:
            return last
        for start in range(0, self.places.count, knobs.IDS_LOADED_TOGETHER):
            stop = min(self.places.count, start + knobs.IDS_LOADED_TOGETHER)
            rows = torch.arange(start, stop, device=self._device)
            last_seen, counts = life.scores.read(rows)
            last = max(last, last_step({"last_seen": last_seen, "count": counts}))
        return last

    @property
    def has_scores(self) -> bool:
        """True if scores were received for the rows that were read; without rows, none lacks a score."""
        return not self.places.count or {"last_seen", "count"} <= self._received.keys()

    def finish(
        self,
        clock: Tensor | None,
        initializer: Initializer | None,
        step: int,
        saved_step: int | None,
        cuts: Sequence[int],
    ) -> TableShard:
        """Completes the shard beside the table and returns it. May be called again after it has failed.

        clock: [2, K] int64 as saved, or None. `step` is the last step that the rows of any rank record, and
        `saved_step` the step of the optimizer state; None without it. `cuts` are those of row-wise state.
        """
        rows = self.rows
        count = self._compact()
        self._convert(count)
        rows.states = tuple(self.states(count, cuts))
        rows.row_numbers.high_water_mark = count
        if not rows.row_numbers.withheld_parts and self.others:
            rows.row_numbers.free(torch.cat(self.others))
        if initializer is not None:
            rows.start_as(initializer)
        life = rows.life
        if life is None:
            rows.step = saved_step or 0
            return rows
        if clock is not None and life.is_timed:
            life.clock = Clock.load(clock)
        rows.step = max(step, life.clock.present_step - 1, saved_step or 0)
        life.is_unscored = not self.has_scores
        if life.is_unscored:
            life.scores = Scores(rows.weights.shift, self._device)
            life.scores.store.reserve_zeros(count)
            present = rows.step if saved_step is not None else life.clock.present_step
            rows.life = life = life.caught_up(max(rows.step, present), count)
        for others in self.others:
            life.scores.forget(others)
        return rows

    def _compact(self) -> int:
        """Copies the rows that belong here into smaller stores, if many staged rows belong to other ranks.

        Without the path of the checkpoint each rank that shares a table reads all of it. Returns the number
        of rows in the stores.
        """
        kept, rows = self.id_map.num_ids, self.rows
        if not self.others:
            return kept
        if self.places.count - kept <= kept // 8:
            return self.places.count
        ids, places = self.id_map.contents()
        stores = {name: store.empty() for name, (store, _) in self._stores.items()}
        here = torch.arange(kept, device=self._device)
        for name, store in stores.items():
            store.reserve(kept)
            most = max(1, knobs.CROSSING_BYTES // store.row_bytes)
            for some, from_rows in zip(here.split(most), places.split(most), strict=True):
                store.write(some, self._stores[name][0].read(from_rows))
        scores = Scores(rows.weights.shift, self._device)
        if rows.life is not None and self.has_scores:
            scores.store.reserve_zeros(kept)
            scores.write(here, *rows.life.scores.read(places))
        id_map = IdMap(rows.row_limit, self._device)
        id_map.reserve(kept)
        id_map.insert(ids, here)
        if rows.life is not None:
            rows.life.scores = scores
        rows.id_map, rows.weights, self.others = id_map, stores["weight"], []
        self._stores = {name: (stores[name], origin) for name, (_, origin) in self._stores.items()}
        return kept

    def _convert(self, count: int) -> None:
        """Converts the first `count` weights to the dtype of the table."""
        store, origin = self._stores["weight"]
        if store.dtype != self._dtype:
            store = store.converted(store.columns, self._dtype, lambda rows: rows, count)
            self.rows.weights, self._stores["weight"] = store, (store, origin)

    def states(self, count: int, cuts: Sequence[int]) -> list[RowStore]:
        """Returns the first `count` rows of each optimizer state, as of a new row if it was not read."""
        states = []
        columns = (self.rows.first_column, self.rows.first_column + self.rows.columns)
        for state in named_states(self.rows):
            if state.name not in self._stores:
                store = state.store.empty()  # blocks of as many rows as the staged ones
                store.reserve_filled(count, state.initial)
            else:
                store, _ = self._stores[state.name]
                if state.is_rowwise and self._has_all_cuts and store.columns > 1:
                    mean = partial(mean_over_cuts, cuts=cuts, columns=columns)
                    store = store.converted(1, torch.float32, mean, count)
            states.append(store)
        return states


def present_rows(
    rows: CanonicalRows, runs: Sequence[Run], places: Places, columns: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the ids of a shard, their rows in the shard, and their staged rows, [M] int64 each.

    `runs` are the positions of the shard's rows in the whole table, `places` those of the staged rows.
    """
    most = max(1, knobs.CHUNK_BYTES // (4 * columns))
    for run in runs:
        for begin in range(0, run.rows, most):
            end = min(run.rows, begin + most)
            ids, own = rows.read(run.here + begin, run.here + end)
            ranges = places.within(run.place + begin, run.place + end)
            staged = [
                torch.arange(row, row + high - low, device=own.device) for low, high, row in ranges
            ]
            yield ids, own, torch.cat(staged)


def with_state(
    shard: TableShard,
    staged: StagedRows,
    present: Iterator[tuple[Tensor, Tensor, Tensor]],
    step: int | None,
    cuts: list[int],
) -> TableShard:
    """Returns a shard beside a shard, with its rows and the staged state; `step` is that of the state."""
    high = shard.row_numbers.high_water_mark
    loaded, result = staged.states(staged.places.count, cuts), with_same_contents(shard)
    states = [store.empty() for store in shard.states]
    for store in states:
        store.reserve(high)
    for _, own, rows in present:
        for store, state in zip(states, loaded, strict=True):
            store.write(own, state.read(rows))
    step = shard.step if step is None else step
    result.states, result.step = tuple(states), max(shard.step if shard.life else 0, step)
    if shard.life is not None:
        result.life = shard.life.caught_up(result.step, high)
    return result
