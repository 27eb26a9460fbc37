"""One training step of tables: unseen ids get rows; with a life also expiry, admission, scores and eviction.

Without a life a step gives a row to every unseen id. With one it runs in this order:

1. Expire: remove the ids and counters that are too old.
2. Find the rows of all ids.
3. Decide the admission of the ids without a row.
4. Check that every table has room, and reserve memory.
5. Choose the lowest rows of tables that are full, but for the rows found; and of counters above their limit
   the oldest.
6. Prepare rows for the admitted ids.
7. Commit, by one op: score the rows found, write and drop counters, evict the rows chosen, and give rows to
   the admitted ids.

An exception before 7 undoes 1: no table has changed. The user's own policies are asked in 3 and 5.

Ids of a feature that does not insert ask for nothing in 3, and those of a feature that does not count are not
scored. So 5 may choose a row that such an id has found: then the id reads as unseen.

Each part is an op over all tables. A GPU's host waits for numbers: of expired ids in 1; of absent and of new
ids in 2; of admitted ids in 3, if a rule decides; of the rows and counters of 5.

Decisions depend only on the ids and their order in time, so all column shards of a table decide the same.

Legend: T tables, N ids, M distinct ids without a row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life import (
    ADMITTED,
    BEGUN,
    DROPPED,
    LEFT_OUT,
    NO_STEP,
    OCCURRED,
    STEPS_WITHOUT_TIME,
    Admitted,
    AgeLimit,
    expired_rows,
    list_rows,
    lowest_rows,
    nobody,
)
from torchrec_dyn.lookup.batch import Batch, Found, TakenStep
from torchrec_dyn.lookup.feature_uses import Uses, masked
from torchrec_dyn.lookup.step_numbers import (
    added_by,
    asked_of_new,
    counts_of_new,
    first_counts,
    occurrences_of,
)
from torchrec_dyn.lookup.table_lists import TrainedTables
from torchrec_dyn.storage import Chosen, change, note_changed, parts_of, places_of, read
from torchrec_dyn.table import (
    Numbers,
    Room,
    TableChange,
    TableShard,
    fresh,
    prepare_unseen,
    reserve_tables,
)

# Rows, offsets, steps and times, as of `ops.touch_scores_`.
Seen = tuple[Tensor, Tensor, Tensor, Tensor | None]


def take_step(
    trained: TrainedTables, batch: Batch, find: Callable[[], Found], uses: Uses | None
) -> tuple[Found, TakenStep]:
    """Runs one training step of all trained tables, and finds the rows of the frozen tables.

    Args:
        trained: the trained tables among T tables.
        batch: ids and times of the batch.
        find: finds the rows of the batch, and notes in it where the ids of each table begin, and their uses.
        uses: of the features.

    Returns:
        What was found before the step, and the rows, as far as they do not depend on which tables are frozen.

    Raises:
        ValueError: lengths, `times` or scores are wrong; no table has changed.
        RuntimeError: a table is full, or memory is out; no table has changed.
    """
    if trained.living.numbers or (uses is not None and uses.inserts is not None):
        return _LifeStep(trained, batch).take(find)
    found = find()
    missing = trained.misses_frozen(found.absent)
    if found.new is None:
        trained.shared.counted = trained.counted_after(batch.table_starts, None)
        return found, TakenStep(found.rows, missing)
    with change(*trained.tables.values()) as written:
        counted = trained.counted_after(batch.table_starts, found.absent)
        additions = prepare_unseen(trained.tables, trained.prepared, found.rows, found.new)
        additions.place(are_of_batch=True)
        written.commit()
        additions.commit()
        trained.shared.counted = counted
    return found, TakenStep(found.rows, missing, found.new.new_index)


class _LifeStep:
    """The step of tables of which some have a life, or features that do not insert.

    Most tables know all their ids and have room: only the other ones are looked at one by one.
    """

    def __init__(self, trained: TrainedTables, batch: Batch) -> None:
        self._trained, self._batch = trained, batch
        self._living = trained.living
        self._tables = trained.tables
        self._rows_before: dict[int, int] = {}  # rows of tables before the step
        self._expires = False  # True if ids have lost their rows
        self._counted: list[tuple[TableShard, str, int]] = []  # for `stats`
        # Of the new ids, with what their rows begin to count with; None if there are no new ids.
        self._admitted: Admitted | None = None

    def take(self, find: Callable[[], Found]) -> tuple[Found, TakenStep]:
        """Takes the step. As `take_step`."""
        trained, batch, tables = self._trained, self._batch, self._tables
        if self._living.most_steps + trained.shared.counted.steps + 1 >= NO_STEP:
            for number in self._living.numbers:
                tables[number].check_step(tables[number].next_step)
        with change(*tables.values()) as written:
            due = self._living.due(trained.next_step)
            acting = self._expire(due, written) if due else set()
            found = find()
            occurrences = occurrences_of(trained, batch)
            added = added_by(trained, batch)
            self._admitted = self._decide(found, added)
            counted = trained.counted_after(occurrences, self._num_absent(found))
            scored = found.rows if batch.uses is None else masked(found.rows, batch.uses.counts)
            decayed = self._note_seen(found, scored, added)
            self._check_need(scored)
            if found.new is not None:
                acting |= found.new.sizes.keys()
            looked_at = {*self._living.watched, *due, *acting}
            full = self._reserve(looked_at)
            evicted = self._evicted(full, scored)
            drops = self._counter_drops(looked_at)
            taken = self._rows(found, scored, evicted)
            seen = scored, batch.table_offsets, trained.first_steps + counted.steps, added
            write, note = self._commit_of(seen, evicted, drops, found, taken)
            write()  # before the commit: without memory it has written nothing
            written.commit()
            trained.shared.counted = counted
            note()
            for write in decayed:
                write()
            for table, counter, number in self._counted:
                table.counters[counter] += number
            self._living.note_step(due, {*acting, *full})
        return found, taken

    def _expire(self, due: Sequence[int], written: change) -> set[int]:
        """Removes expired ids and counters of the tables `due`; returns those that lose some."""
        trained, tables, lives = self._trained, self._tables, self._living.lives
        for t in due:
            if lives[t].expires_by_time and lives[t].has_missed_time():
                _warn_of_missed_time(tables[t], "rows expire", "no row expires")
        self._rows_before = {t: tables[t].id_map.num_ids for t in due}
        limits = {t: (lives[t].age_limit, tables[t].row_numbers.high_water_mark) for t in due}
        rows = self._expired(limits, trained.prepared.get())
        counting = {t: self._living.counting[t] for t in due if t in self._living.counting}
        limits = {
            t: (counters.age_limit, counters.row_numbers.high_water_mark)
            for t, counters in counting.items()
        }
        counters = self._expired(limits, self._living.counters.get())
        self._expires = bool(rows.sizes)
        if rows.sizes:
            removal = TableChange(tables, trained.prepared, rows, cause="evicted_expired")
            written.on_error(removal.undo())
            removal.commit()
        if counters.sizes:
            drop = self._living.counters.removal(counters)
            written.on_error(drop.undo())
            drop.commit()
        self._count("counters_expired", counters.sizes)
        return {*rows.sizes, *counters.sizes}

    def _expired(self, limits: dict[int, tuple[AgeLimit | None, int]], handle: Tensor) -> Chosen:
        """Returns the expired rows of tables, by their limits and the numbers of rows handed out."""
        like, at = self._batch.ids, {t: self._tables[t].next_step for t in limits}
        clocks = {t: self._living.lives[t].clock for t in limits}
        aging = {t: limit for t, (limit, _) in limits.items() if limit is not None}
        listings = [
            listing
            for t, limit in aging.items()
            if (listing := limit.listing(t, limits[t][1], at[t], clocks[t])) is not None
        ]
        if listings:
            list_rows(listings, like, handle)
        due = [(t, limit.listed, limit.num_due(at[t], clocks[t])) for t, limit in aging.items()]
        return expired_rows([one for one in due if one[2]], like, handle)

    def _decide(self, found: Found, added: Tensor | None) -> Admitted | None:
        """Decides the admission of the absent ids. `added` is what each id adds to the count of its row."""
        trained, batch, new = self._trained, self._batch, found.new
        if new is None:
            return None
        counts = counts_of_new(trained, batch, new)
        admitted = self._living.admit(
            new._replace(counts=counts), asked_of_new(batch, new), batch.times is not None
        )
        self._count("refused", admitted.sizes(LEFT_OUT))
        return admitted._replace(counts=first_counts(trained, batch, new, admitted, added))

    def _sizes(self, column: int) -> dict[int, int]:
        """Returns a column of the numbers of the admission, without zeros."""
        return {} if self._admitted is None else self._admitted.sizes(column)

    def _num_absent(self, found: Found) -> Numbers | None:
        """Returns the occurrences of ids without a row, [T]; None if every id has one."""
        if self._admitted is None:
            return None
        if self._batch.times is None:
            return found.absent
        # A table with a life counts the occurrences of absent ids, another each sent id once.
        absent = found.absent.copy()
        for t in self._living.numbers:
            absent[t] = self._admitted.numbers[t][OCCURRED]
        return absent

    def _note_seen(
        self, found: Found, scored: Tensor, added: Tensor | None
    ) -> list[Callable[[], None]]:
        """Records the rows found as changed; returns calls that write counts that decay."""
        trained, batch = self._trained, self._batch
        if self._living.numbers and trained.has_changes:
            note_changed(trained.logs(), batch.ids, found.rows, batch.table_offsets)
        return [self._decayed(t, found, scored, added) for t in self._living.decaying]

    def _decayed(
        self, t: int, found: Found, scored: Tensor, added: Tensor | None
    ) -> Callable[[], None]:
        """Returns a call that writes the counts of the rows seen, of a table whose counts decay."""
        table, life = self._tables[t], self._living.lives[t]
        if not life.expires_by_time and life.has_missed_time():
            _warn_of_missed_time(table, "counts decay", "no count decays")
        begin, end = self._batch.table_offsets[t : t + 2].tolist()
        rows, known = scored[begin:end], end - begin - int(found.absent[t])
        times = None if added is None else added[begin:end]
        if scored is not found.rows:
            [known] = read([(rows >= 0).count_nonzero()])
        if known < end - begin:
            places = places_of(rows >= 0, known)
            rows = rows.index_select(0, places)
            times = None if times is None else times.index_select(0, places)
        return life.prepare_touch(rows, times, table.next_step)

    def _check_need(self, scored: Tensor) -> None:
        """Raises RuntimeError unless tables have room for the step."""
        admitted = self._sizes(ADMITTED)
        distinct = self._distinct_rows(scored)
        for t in sorted(distinct.keys() | admitted.keys()):
            self._tables[t].check_room(admitted.get(t, 0))
            if t in distinct:
                self._tables[t].check_need(distinct[t] + admitted.get(t, 0))

    def _distinct_rows(self, scored: Tensor) -> dict[int, int]:
        """Returns the number of distinct rows of the step, for tables that may be too small.

        A step has at most as many distinct rows as ids, so for most batches they need not be counted.
        """
        trained, batch = self._trained, self._batch
        earlier, offsets = trained.shared.earlier, batch.table_offsets
        if earlier is None and batch.ids.numel() <= self._living.least_limit:
            return {}
        sizes = np.diff(batch.table_starts)
        if earlier is not None:
            sizes = sizes + earlier.numpy()
        counts: dict[int, Tensor] = {}
        for t in np.flatnonzero(sizes > self._living.row_limits).tolist():
            own = scored[slice(*offsets[t : t + 2].tolist())]
            counts[t] = _num_distinct(own) if earlier is None else _num_seen(self._tables[t], own)
        return dict(zip(counts, read([*counts.values()]), strict=True))

    def _reserve(self, looked_at: set[int]) -> dict[int, int]:
        """Reserves memory for rows and counters; returns the surplus of each table that must evict rows."""
        full: dict[int, int] = {}
        admitted, begun = self._sizes(ADMITTED), self._sizes(BEGUN)
        rooms: list[tuple[TableShard, Room]] = []
        for t in sorted(looked_at):
            table, life = self._tables[t], self._tables[t].life
            self._rows_before.setdefault(t, table.id_map.num_ids)
            surplus = table.id_map.num_ids + admitted.get(t, 0) - table.row_limit
            if life is not None and life.replaces and surplus > 0:
                full[t] = surplus
            rooms.append((table, Room(admitted.get(t, 0), full.get(t, 0), begun.get(t, 0))))
        reserve_tables(rooms)
        return full

    def _evicted(self, full: dict[int, int], scored: Tensor) -> Chosen | None:
        """Returns the lowest rows of full tables, without those of the step; None if no table is full."""
        tables, batch = self._tables, self._batch
        if not full:
            return None
        searches = [
            self._living.lives[t].search(t, surplus, tables[t].next_step, tables[t].searched)
            for t, surplus in full.items()
        ]
        kept = scored, batch.table_offsets
        return lowest_rows(searches, batch.ids, self._trained.prepared.get(), kept)

    def _counter_drops(self, looked_at: set[int]) -> Chosen | None:
        """Returns the counters of waiting ids that go since a table has too many; None if none has.

        Counters that would begin in the step may be among them: then they do not begin.
        """
        admitted = self._admitted
        searches = []
        for t in sorted(looked_at & self._living.counting.keys()):
            more = (
                0 if admitted is None else admitted.numbers[t][BEGUN] - admitted.numbers[t][DROPPED]
            )
            step = self._tables[t].next_step
            search = self._living.lives[t].search_counters(t, step, self._rows_before[t], more)
            if search is not None:
                searches.append(search)
        if not searches:
            return None
        self._count("counters_dropped", {one.table: one.most for one in searches})
        if admitted is None:
            return lowest_rows(searches, self._batch.ids, self._living.counters.get())
        drops, self._admitted = self._living.counters.lowest(searches, admitted)
        return drops

    def _rows(self, found: Found, scored: Tensor, evicted: Chosen | None) -> TakenStep:
        """Returns the rows of all ids, but for those that get new rows."""
        offsets = self._batch.table_offsets
        new_index = None if found.new is None else found.new.new_index
        if evicted is None or scored is found.rows:
            missing = bool(self._sizes(LEFT_OUT)) or self._trained.misses_frozen(found.absent)
            return TakenStep(found.rows, missing, new_index)
        # Ids that do not count may lose their rows.
        rows = found.rows.clone()
        for t, lost in parts_of(evicted.rows, evicted.sizes).items():
            own = rows[slice(*offsets[t : t + 2].tolist())]
            own.masked_fill_(torch.isin(own, lost), -1)
        new_index = torch.full_like(rows, -1) if new_index is None else new_index
        return TakenStep(rows, True, torch.where(rows == found.rows, new_index, 0))

    def _commit_of(
        self,
        seen: Seen,
        evicted: Chosen | None,
        drops: Chosen | None,
        found: Found,
        taken: TakenStep,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Prepares what the step writes; returns a call of one op that writes it, and one that notes it."""
        admitted, living, prepared = self._admitted, self._living, self._trained.prepared
        handle, new = prepared.get(), found.new
        if admitted is None and evicted is None and drops is None:
            touch = (lambda: ops.touch_scores_(*seen, handle)) if living.numbers else _nothing
            return touch, _nothing
        if admitted is None:
            admitted = nobody(self._batch.ids, len(prepared.tables))
        fills = None if new is None else (taken.rows, new.new_index, admitted.places)
        sizes = admitted.sizes(ADMITTED)
        added = fresh(self._tables, admitted.ids, sizes, admitted.counts, fills)
        rows = TableChange(self._tables, prepared, evicted, added, "evicted_full")
        rows.place(are_of_batch=True, loads=self._expires or evicted is not None)
        if not living.numbers:
            return rows.rows.write, rows.note
        steps = {t: self._tables[t].next_step for t in living.counting}
        waiting, note_waiting = living.counters.step(admitted, drops, steps, seen[2])
        arguments = (
            *rows.rows.removes,
            *seen,
            *rows.rows.adds,
            rows.rows.initial_places,
            handle,
            *waiting,
        )

        def note() -> None:
            rows.note()
            note_waiting()

        return lambda: ops.commit_step_(*arguments), note

    def _count(self, counter: str, sizes: Mapping[int, int]) -> None:
        """Notes what the commit adds to a counter of tables."""
        self._counted += [(self._tables[t], counter, size) for t, size in sizes.items()]


def _nothing() -> None:
    pass


def _num_distinct(rows: Tensor) -> Tensor:
    """Returns the number of distinct rows, without -1, [] int64."""
    ordered = rows.sort().values
    is_first = ordered >= 0
    is_first[1:] &= ordered[1:] != ordered[:-1]
    return is_first.count_nonzero()


def _num_seen(table: TableShard, rows: Tensor) -> Tensor:
    """Returns the number of distinct rows of a step, [] int64: of rows [N] without -1, and of earlier ones.

    Rows that no occurrence has scored (count 0) are not among the earlier ones: they may be evicted.
    """
    assert table.life is not None
    numbers = torch.arange(table.row_numbers.high_water_mark, device=rows.device)
    last_seen, counts = table.life.scores.read(numbers)
    is_earlier = (last_seen == table.next_step) & (counts > 0)
    seen = torch.cat([is_earlier, is_earlier.new_zeros(1)])
    seen[rows] = True  # -1 is the last place
    return seen[:-1].count_nonzero()


def _warn_of_missed_time(table: TableShard, rule: str, effect: str) -> None:
    warnings.warn(
        f"{table.where}: expected set_time(t) before training, since its {rule} by time, got no "
        f"time in {STEPS_WITHOUT_TIME} training steps, so {effect}. "
        "Call collection.set_time(t) before each batch.",
        UserWarning,
        stacklevel=3,
    )
