"""One training step of tables with a life: expiry, admission, scores, eviction.

A step of a batch runs in this order:

1. Expire: remove the ids that are too old from the maps. Waiting ids that are too old count as unseen.
2. Look up all ids.
3. Decide the admission of the ids without a row.
4. Check that every table has room, and reserve memory. If a step fails up to here, the expired ids are put
   back, and no table has changed. Nothing fails after this point, and an interrupt (Ctrl-C) is raised at the
   end of the step.
5. Count the step, free the rows of the expired ids, and drop the expired counters.
6. Score the rows found, so that none of them is evicted by this step.
7. Drop the counters of the admitted ids, and count the refused ids.
8. Evict the lowest rows of tables that are full, and drop the counters above their limit.
9. Give rows to the admitted ids.

The host waits for a GPU four times at most, beside searches and growth: for the absent and the expired ids
(found_rows.py), the new ids, their admission, and the rows and counters of 8.

Decisions depend only on the ids and their order in time, so all column shards of a table decide the same.

Legend: T tables, N ids, M distinct ids without a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life import NO_STEP, Decision, Drop
from torchrec_dyn.lookup.early_output import EarlyOutput
from torchrec_dyn.lookup.found_rows import (
    Expired,
    FoundRows,
    expired_of,
    find_first,
    nothing_expired,
)
from torchrec_dyn.lookup.table_lists import TrainedTables
from torchrec_dyn.policies import MOST_COUNT
from torchrec_dyn.storage import HostRead, note_changed, read, read_together, run_to_end
from torchrec_dyn.table import (
    Addition,
    DynamicTable,
    Removal,
    commit_rows,
    ranges_of,
    read_absent,
)

_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


class _Unseen(NamedTuple):
    """The distinct ids of one table's batch that have no row.

    Attributes:
        ids: [M] int64.
        occurrences: [M] int64, in this batch.
        decision: admission of these ids.
    """

    ids: Tensor
    occurrences: Tensor
    decision: Decision

    @property
    def num_admitted(self) -> int:
        """Number of ids that get a row."""
        return self.decision.num_admitted

    def at(self, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the ids at some places and their counts; at all places without `places`."""
        ids, counts = self.ids, self.decision.counts
        if places is None:
            return ids, counts
        return ids.index_select(0, places), counts.index_select(0, places)


_NO_UNSEEN = _Unseen(_NONE, _NONE, Decision(_NONE, 0))


def take_step(
    trained: TrainedTables,
    ids: Tensor,
    table_offsets: Tensor,
    times: Tensor | None = None,
    found: FoundRows | None = None,
    early: EarlyOutput | None = None,
) -> tuple[Tensor, int]:
    """Runs one training step of all tables and returns the rows of the batch.

    Most tables know all their ids and have room: an op over all tables scores their rows. Only the other
    tables are looked at one by one.

    Args:
        trained: T tables, at least one with a life.
        ids: [N] int64 in table order.
        table_offsets: [T + 1] int64, where the ids of each table begin.
        times: [N] int64, number of occurrences that each id stands for, in batches that hold each distinct
            id once; None for 1 each.
        found: the rows of this batch, if the caller has found them.
        early: the output of this batch, which is pooled as soon as its rows are found; gets its new ids.

    Returns:
        rows: [N] int64, -1 for an id that was not admitted.
        refused: number of occurrences of refused ids.

    Raises:
        ValueError: `times` of a wrong shape, dtype or range; no table has changed.
        RuntimeError: a table is full, or memory is out; no table has changed.
    """
    tables, shared = trained.tables, trained.shared
    if trained.most_steps + shared.counted.steps + 1 >= NO_STEP:
        for number in trained.with_life:
            tables[number].check_step(tables[number].step + 1)
    expired: dict[int, Expired] = {}  # removed from the maps, to be put back if the step fails
    parts: list[_TableStep] = []
    try:
        ageing = [tables[number] for number in trained.ageing]
        occurrences = table_offsets
        if not ids.is_cpu and found is None:
            counting = _occurrences(trained, ids, table_offsets, times)
            found = find_first(trained.maps, ids, table_offsets, ageing, counting, early)
            occurrences = found.beside
        elif times is not None:
            occurrences = read(_occurrences(trained, ids, table_offsets, times))
        if found is None:
            of_ageing = read_together([expired_of(table) for table in ageing])
        else:
            of_ageing = found.expired
        for number, table, old in zip(trained.ageing, ageing, of_ageing, strict=True):
            expired[number] = old
            if old.ids.numel():
                table.id_map.remove(old.ids, old.num_ids - old.ids.numel())
                found = None  # rows of removed ids may be among the rows
        batch = _decide(trained, ids, table_offsets, times, found)
        removals = _removals(tables, expired)
        parts = [
            _TableStep(
                number,
                tables[number],
                expired.get(number) or nothing_expired(tables[number]),
                batch.unseen.get(number, _NO_UNSEEN),
                removals.get(number),
            )
            for number in batch.special
        ]
        counted = shared.counted.after(occurrences, batch.absent)
        listed, steps = trained.blocks.scores(), trained.first_steps + counted.steps
        watched = {part.number for part in parts if part.acts}

        def count(_: bool) -> None:
            expired.clear()
            trained.watched = watched
            shared.counted = counted

        def touch(again: bool) -> None:
            if not again or not _are_touched(tables, batch.rows, table_offsets):
                ops.touch_scores_(
                    batch.rows, table_offsets, listed.weights, listed.layout, steps, times
                )

        def note(_: bool) -> None:
            note_changed([table.change_log for table in tables], batch.rows, table_offsets)

        def add_rows(again: bool) -> None:
            commit_rows([part.added for part in parts if part.added is not None], again)

        # From the first action on no check fails, and memory for maps and rows is reserved.
        actions: list[Callable[[bool], object]] = [count, *(part.begin for part in parts), touch]
        if trained.has_changes:
            actions.append(note)
        if any(part.has_waiting for part in parts):
            actions += (part.count_waiting for part in parts if part.has_waiting)
        if any(part.surplus > 0 or part.has_waiting for part in parts):
            actions.append(lambda _: _make_room(parts))
        if batch.unseen:
            actions += (part.prepare_rows for part in parts)
            actions.append(add_rows)
        run_to_end(*actions)
    except BaseException:
        for number, old in expired.items():
            tables[number].id_map.put(old.ids, old.rows, old.num_ids, again=True)
        for part in parts:
            part.restore_waiting()
        raise
    if not batch.unseen:
        return batch.rows, 0
    if early is not None:
        early.new_index = batch.new_index
    new_rows = [part.new_rows(part.added) for part in parts if part.added is not None]
    ops.fill_new_(batch.rows, batch.new_index, torch.cat(new_rows))
    return batch.rows, sum(part.refused for part in parts)


class _Batch(NamedTuple):
    """A batch after lookup and admission. So far only expired ids were removed.

    Attributes:
        rows: [N] int64, -1 for an id without a row.
        absent: [T] int64, number of ids without a row, repeats counted; None if every id has a row.
        unseen: the distinct ids without a row of each table that has some, by number of the table.
        special: numbers of the tables to look at one by one, ascending.
        new_index: [N] int64, the place of an id without a row in the list of all tables' distinct ids without
            a row, -1 for other ids; [0] if every id has a row.
    """

    rows: Tensor
    absent: Tensor | None
    unseen: dict[int, _Unseen]
    special: list[int]
    new_index: Tensor


def _occurrences(
    trained: TrainedTables, ids: Tensor, table_offsets: Tensor, times: Tensor | None
) -> HostRead[Tensor]:
    """Returns the first occurrence of each table's ids, and the end, [T + 1] int64; checks `times`."""
    if times is None:
        return table_offsets
    if times.dtype != torch.int64 or times.shape != ids.shape:
        got = f"{list(times.shape)} of {times.dtype}"
        raise ValueError(
            f"take_step: expected {list(ids.shape)} int64 times, one for each id, got {got}."
        )
    bounds = times.aminmax() if ids.numel() else (times.new_ones(()), times.new_ones(()))
    of_ids = torch.cat([times.new_zeros(1), times.cumsum(0)])
    of_tables = of_ids[table_offsets.to(times.device, non_blocking=True)].diff()
    least, most, *numbers = yield [*bounds, of_tables]
    if least < 1 or most > MOST_COUNT:
        raise ValueError(f"take_step: expected times in [1, 2^32), got {least} to {most}.")
    # A table without a life counts each sent id once, whatever the other tables of its group are.
    seen = table_offsets.diff()
    seen[trained.with_life] = torch.tensor(numbers, device="cpu")[trained.with_life]
    return torch.cat([table_offsets[:1], seen.cumsum(0)])


def _decide(
    trained: TrainedTables,
    ids: Tensor,
    table_offsets: Tensor,
    times: Tensor | None,
    found: FoundRows | None,
) -> _Batch:
    """Looks ids up, decides admission, checks every table's room and reserves memory."""
    tables = trained.tables
    rows, absent = found[:2] if found else ops.lookup(ids, table_offsets, *trained.maps.arrays())
    ranges: dict[int, slice] = {}
    new_index = _NONE
    # Annotated, not subscripted calls: a step would make the types of the host reads anew, which takes 10 us.
    decisions: list[HostRead[_Unseen]] = []
    counted: list[HostRead[int]] = []
    # A GPU's numbers after the removal of expired ids are read later, with the decisions.
    if not absent.is_cpu or any(absent.tolist()):
        new_ids, counts, new_offsets, new_index = ops.collect_new(ids, rows, table_offsets)
        if times is not None:
            # Ids with a row add to an extra last number: to select the others, the host would wait.
            last = counts.numel()
            places = new_index.masked_fill(new_index < 0, last)
            counts = times.new_zeros(last + 1).index_add_(0, places, times)[:last]
        ranges = ranges_of(new_offsets)
        decisions = [
            _decide_admission(tables[number], new_ids[of_table], counts[of_table])
            for number, of_table in ranges.items()
        ]
    # Distinct rows of the tables that may be too small. A batch has at most as many distinct rows as ids, so
    # for most batches they need not be counted.
    numbers: list[int] = []
    if ids.numel() > trained.least_limit:
        sizes = table_offsets[1:] - table_offsets[:-1]  # a fifth of the time of `diff`
        numbers = (sizes > trained.row_limits).nonzero().flatten().tolist()
        ends = table_offsets.tolist()
        counted = [_num_distinct(rows[ends[t] : ends[t + 1]]) for t in numbers]
    unseen: dict[int, _Unseen] = {}
    crowded: dict[int, int] = {}
    if ranges or numbers:
        # Tables with a life count the occurrences of absent ids.
        lives = [number for number in trained.with_life if times is not None and number in ranges]
        sums = [_sum(counts[ranges[number]]) for number in lives]
        parts: list[HostRead[Any]] = [*decisions, *counted, *sums]
        if ranges and not absent.is_cpu:
            parts.append(read_absent(absent, ids))
        results = iter(read_together(parts))
        unseen = {number: next(results) for number in ranges}
        crowded = {number: next(results) for number in numbers}
        occurred = [next(results) for _ in lives]
        absent = next(results, absent)
        if lives:
            absent = absent.clone()
            absent[lives] = torch.tensor(occurred, device="cpu")
    for number in sorted(crowded.keys() | unseen.keys()):
        new = unseen.get(number, _NO_UNSEEN)
        tables[number].check_room(new.num_admitted)
        if number in crowded:
            tables[number].check_need(crowded[number] + new.num_admitted)
    special = sorted({*trained.watched, *trained.ageing, *unseen})
    for number in special:
        _reserve(tables[number], unseen.get(number, _NO_UNSEEN))
    return _Batch(rows, absent if unseen else None, unseen, special, new_index)


def _sum(numbers: Tensor) -> HostRead[int]:
    [total] = yield [numbers.sum()]
    return total


def _num_distinct(rows: Tensor) -> HostRead[int]:
    """Returns the number of distinct rows, without -1."""
    ordered = rows.sort().values
    is_first = ordered >= 0
    is_first[1:] &= ordered[1:] != ordered[:-1]
    [count] = yield [is_first.count_nonzero()]
    return count


def _removals(tables: Sequence[DynamicTable], expired: Mapping[int, Expired]) -> dict[int, Removal]:
    """Returns the prepared removals of expired ids, by number of the table."""
    some = {number: old for number, old in expired.items() if old.ids.numel()}
    prepared = [
        Removal.prepare(tables[number], old.ids, old.rows, "evicted_expired")
        for number, old in some.items()
    ]
    return dict(zip(some, read_together(prepared), strict=True))


def _are_touched(tables: Sequence[DynamicTable], rows: Tensor, table_offsets: Tensor) -> bool:
    """Returns True if rows of this step are scored: then they were seen at the present step of a table."""
    for table, (begin, end) in zip(tables, pairwise(table_offsets.tolist()), strict=True):
        if table.life is not None:
            last_seen, counts = table.life.scores.read(rows[begin:end])
            if bool(((last_seen == table.step) & (counts > 0)).any()):
                return True
    return False


def _decide_admission(table: DynamicTable, ids: Tensor, occurrences: Tensor) -> HostRead[_Unseen]:
    decision = Decision(occurrences, ids.numel())
    if table.life is not None:
        decision = yield from table.life.admit(ids, occurrences, table.step + 1)
    return _Unseen(ids, occurrences, decision)


def _reserve(table: DynamicTable, unseen: _Unseen) -> None:
    table.reserve(unseen.num_admitted, max(0, _surplus(table, unseen)))
    if table.life is not None and table.life.waiting is not None:
        table.life.waiting.reserve(unseen.ids.numel() - unseen.num_admitted)


def _surplus(table: DynamicTable, unseen: _Unseen) -> int:
    """Returns the number of rows to evict before the admitted ids get rows; 0 or less if none."""
    replaces = table.life is not None and table.life.replaces
    return table.id_map.num_ids + unseen.num_admitted - table.row_limit if replaces else 0


class _TableStep:
    """The part of a step that changes one table, beside its counted forwards. Making it changes nothing.

    Its methods with one bool argument are actions of `run_to_end`, in this order. `expired` ids are removed
    from the map already; `removal` is None without expired ids.

    Attributes:
        number: number of the table in its group.
        acts: True if rows or counters of the table change: its policies may act in the next step, too.
        surplus: number of rows to evict; 0 or less if none.
        has_waiting: True if the table counts waiting ids.
        refused: number of occurrences of refused ids.
        added: rows of the admitted ids; None before `prepare_rows`, and without unseen ids.
    """

    def __init__(
        self,
        number: int,
        table: DynamicTable,
        expired: Expired,
        unseen: _Unseen,
        removal: Removal | None,
    ) -> None:
        self.number = number
        self._table = table
        self._unseen = unseen
        self._step = table.step + 1
        self._expired = removal
        self.surplus = _surplus(table, unseen)
        self.added: Addition | None = None
        self.refused = unseen.decision.refused_occurrences
        self._all_refused = table.counters["refused"] + self.refused
        self._rows_before = expired.num_ids
        self._num_waiting = table.num_waiting
        self._counters_expired = table.counters["counters_expired"]
        self._counters_dropped = table.counters["counters_dropped"]
        self.has_waiting = table.life is not None and table.life.waiting is not None
        self._admitted = unseen.at(unseen.decision.admitted)
        self._has_forgotten = False  # the counters of the admitted ids
        self.acts = bool(unseen.ids.numel() or expired.ids.numel() or self.surplus > 0)

    def begin(self, _: bool) -> None:
        """Counts refused ids, frees the rows of the expired ids, and drops the expired counters."""
        table = self._table
        table.counters["refused"] = self._all_refused
        if self._expired is not None:
            self._expired.free_rows()
        if table.life is not None:
            table.life.drop_expired(self._step)
            if self.has_waiting:
                expired = self._num_waiting - table.num_waiting
                table.counters["counters_expired"] = self._counters_expired + expired

    def count_waiting(self, again: bool) -> None:
        """Drops the counters of the admitted ids, writes those of the refused ids, and notes their number."""
        life, decision = self._table.life, self._unseen.decision
        assert life is not None
        self._has_forgotten = True
        life.forget_counters(self._admitted[0], None if again else decision.num_waiting)
        if decision.refused is not None:
            refused = self._unseen.at(decision.refused)
            life.refuse(*refused, self._step, None if again else decision.num_new)
        self._num_waiting = self._table.num_waiting

    def restore_waiting(self) -> None:
        """Restores the counters of the admitted ids without a row: the search in 8 may run out of memory."""
        table, (ids, counts) = self._table, self._admitted
        if self._has_forgotten and ids.numel() and table.life is not None:
            left = (table.id_map.lookup(ids) < 0).nonzero().flatten()
            if left.numel():
                table.life.refuse(ids[left], counts[left], self._step, None)

    def lowest_rows(self) -> HostRead[Removal | None]:
        """Returns the removal of the lowest rows of a full table; None if it has room."""
        table, surplus = self._table, _surplus(self._table, self._unseen)
        if table.life is None or surplus <= 0:
            return None
        high = table.row_numbers.high_water_mark
        lowest = yield from table.life.lowest(surplus, self._step, table.id_map, high)
        return (yield from Removal.prepare(table, *lowest, "evicted_full"))

    def lowest_counters(self) -> HostRead[Drop | None]:
        """Returns the drop of the counters above their limit; None if none is above."""
        assert self._table.life is not None
        return (yield from self._table.life.surplus_counters(self._step, self._rows_before))

    def drop_counters(self, surplus: Drop | None) -> None:
        """Drops and counts the counters above their limit."""
        table = self._table
        if surplus is not None and table.life is not None and table.life.waiting is not None:
            table.life.waiting.drop(surplus)
        dropped = self._num_waiting - table.num_waiting
        table.counters["counters_dropped"] = self._counters_dropped + dropped

    def prepare_rows(self, _: bool) -> None:
        """Prepares rows for the admitted ids."""
        if self._unseen.ids.numel():
            self.added = Addition(self._table, *self._admitted)

    def new_rows(self, added: Addition) -> Tensor:
        """Returns the rows of all ids of `unseen`, [M] int64, -1 for a refused id."""
        admitted = self._unseen.decision.admitted
        if admitted is None:
            return added.rows
        rows = torch.full_like(self._unseen.ids, -1)
        rows[admitted] = added.rows
        return rows


def _make_room(parts: Sequence[_TableStep]) -> None:
    """Lowers full tables and counters to their limits; a second call directly after finishes the first."""
    full = [part for part in parts if part.surplus > 0]
    counting = [part for part in parts if part.has_waiting]
    host_reads: list[HostRead[Any]] = [part.lowest_rows() for part in full]
    host_reads += [part.lowest_counters() for part in counting]
    lowest = read_together(host_reads)
    for removal in lowest[: len(full)]:
        if removal is not None:
            removal.commit()
    for part, drop in zip(counting, lowest[len(full) :], strict=True):
        part.drop_counters(drop)
