"""One training step of tables: unseen ids get rows; with a life also expiry, admission, scores and eviction.

Without a life a step gives a row to every unseen id. With one it runs in this order:

1. Expire: remove the ids and counters that are too old.
2. Find the rows of all ids.
3. Decide the admission of the ids without a row.
4. Check that every table has room, and reserve memory.
5. Drop the counters of the admitted ids, and count the refused ids.
6. In tables that are full, score the rows found, so that none of them is evicted by this step, and evict the
   lowest rows. Find the counters above their limit.
7. Prepare rows for the admitted ids.
8. Commit: count the step, score the rows found, drop counters, and give rows to the admitted ids.

An exception before 8 undoes what was written: no table has changed.

Ids of a feature that does not insert ask for nothing in 3, and those of a feature that does not count are not
scored in 6. So 6 may evict a row that such an id has found: the id is looked up again, and reads as unseen.

What these do to one table is in table/table_step.py. The host waits for a GPU five times at most, beside
searches: for the expired ids, the absent ids, the new ids, their admission, and the rows and counters of 6.

Decisions depend only on the ids and their order in time, so all column shards of a table decide the same.

Legend: T tables, N ids, M distinct ids without a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life import NO_STEP, Asked, Decision
from torchrec_dyn.lookup.batch import Batch, Found, TakenStep, no_scores, wrong_scores
from torchrec_dyn.lookup.feature_uses import Uses, masked
from torchrec_dyn.lookup.table_lists import TrainedTables
from torchrec_dyn.policies import MOST_COUNT
from torchrec_dyn.storage import HostRead, change, note_changed, places_of, read, read_together
from torchrec_dyn.table import (
    Expired,
    TableShard,
    TableStep,
    Unseen,
    admission,
    check_need,
    expired_of,
    make_room,
    prepare,
    prepare_rows,
    prepare_touch,
    prepare_unseen,
    ranges_of,
    remove_expired,
    rows_of_steps,
)


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
    if trained.with_life or (uses is not None and uses.inserts is not None):
        return _step_with_life(trained, batch, find)
    found = find()
    num_unseen, of_frozen = trained.num_absent(found.absent)
    if not num_unseen:
        trained.shared.counted = trained.counted_after(batch.table_offsets, None)
        return found, TakenStep(found.rows, of_frozen > 0)
    with change(*trained.tables.values()) as written:
        counted = trained.counted_after(batch.table_offsets, found.absent)
        unseen = prepare_unseen(
            trained.tables, trained.prepared, batch.ids, found.rows, batch.table_offsets
        )
        written.commit()
        unseen.additions.commit()
        trained.shared.counted = counted
    unseen.fill(found.rows)
    return found, TakenStep(found.rows, of_frozen > 0, unseen.new_index)


def _step_with_life(
    trained: TrainedTables, batch: Batch, find: Callable[[], Found]
) -> tuple[Found, TakenStep]:
    """`take_step` of tables of which some have a life, or features that do not insert.

    Most tables know all their ids and have room: an op over all tables scores their rows. Only the other
    tables are looked at one by one.
    """
    tables, shared = trained.tables, trained.shared
    if trained.most_steps + shared.counted.steps + 1 >= NO_STEP:
        for number in trained.with_life:
            tables[number].check_step(tables[number].next_step)
    with change(*tables.values()) as written:
        due = trained.due()
        expired = _expire(tables, due, written)
        found = find()
        occurrences = batch.table_offsets
        if batch.times is not None or trained.units:
            occurrences = read(occurrences_of(trained, batch))
        added = _added(trained, batch)
        decided = _decide(trained, batch, found, added)
        counted = trained.counted_after(occurrences, decided.absent)
        touch = _touch(trained, batch, decided, counted.steps, added)
        check_need(tables, decided.unseen, decided.distinct)
        steps = [
            TableStep(number, tables[number], expired.get(number), decided.unseen.get(number))
            for number in sorted({*trained.watched, *due, *decided.unseen})
        ]
        prepare(steps, written)
        evicts = any(step.surplus > 0 for step in steps)
        if evicts:
            written.on_error(_scores_before(trained, batch, decided.scored))
            touch()
        make_room(steps, written)
        taken = _rows_of_step(trained, batch, decided, steps, evicts)
        additions = prepare_rows(steps, trained.prepared)
        written.commit()
        shared.counted = counted
        trained.watched = {step.number for step in steps if step.acts}
        if not evicts:
            touch()
        for step in steps:
            step.commit()
        additions.commit()
        trained.note_looked(due)
    unseen = Unseen(additions, decided.new_ids, decided.new_index, decided.ranges)
    unseen.fill(taken.rows, rows_of_steps(steps, additions))
    return found, taken


def _expire(
    tables: Mapping[int, TableShard], due: Sequence[int], written: change
) -> dict[int, Expired]:
    """Removes the expired ids and counters of the tables that are `due`, before the commit."""
    of_due = read_together([expired_of(tables[number]) for number in due])
    expired = dict(zip(due, of_due, strict=True))
    for number, old in expired.items():
        remove_expired(tables[number], old, written)
    return expired


def _touch(
    trained: TrainedTables, batch: Batch, decided: _Decided, steps: int, added: Tensor | None
) -> Callable[[], None]:
    """Returns a call that scores the rows found, in step `steps` of the shared counters."""
    if not trained.with_life:
        return lambda: None
    if trained.has_changes:
        note_changed(trained.logs(), batch.ids, decided.rows, batch.table_offsets)
    decayed = _seen(trained, batch, decided, added)
    at_steps, tables = trained.first_steps + steps, trained.prepared.get()

    def touch() -> None:
        ops.touch_scores_(decided.scored, batch.table_offsets, at_steps, added, tables)
        for write in decayed:
            write()

    return touch


def _scores_before(trained: TrainedTables, batch: Batch, rows: Tensor) -> Callable[[], None]:
    """Returns a call that brings the present scores of rows [N] int64 of a batch back."""
    ends, before = batch.table_offsets.tolist(), []
    for number in trained.with_life:
        life, own = trained.tables[number].life, rows[ends[number] : ends[number + 1]]
        assert life is not None
        before.append((life.scores, own, *life.scores.read(own)))

    def restore() -> None:
        for scores, own, last_seen, counts in before:
            places = (own >= 0).nonzero().flatten()
            scores.write(own[places], last_seen[places], counts[places])

    return restore


def _rows_of_step(
    trained: TrainedTables,
    batch: Batch,
    decided: _Decided,
    steps: Sequence[TableStep],
    evicts: bool,
) -> TakenStep:
    """Returns the rows of all ids, but for those that get new rows."""
    new_index = decided.new_index if decided.ranges else None
    if not evicts or decided.scored is decided.rows:
        refused = any(step.unseen.refused_occurrences for step in steps)
        return TakenStep(decided.rows, decided.absent_of_frozen > 0 or refused, new_index)
    # Ids that do not count may have lost their rows.
    maps = trained.prepared.maps.arrays()
    rows, _ = ops.lookup(batch.ids, batch.table_offsets, *maps)
    new_index = torch.full_like(rows, -1) if new_index is None else new_index
    return TakenStep(rows, True, torch.where(rows == decided.rows, new_index, 0))


def occurrences_of(trained: TrainedTables, batch: Batch) -> HostRead[Tensor]:
    """Returns the first occurrence of each table's ids, and the end, [T + 1] int64.

    Checks the times, and the scores if some table counts them.
    """
    ids, times, table_offsets = batch.ids, batch.times, batch.table_offsets
    if trained.units:
        yield from _check_scores(trained, batch)
    if times is None or not trained.with_life:
        return table_offsets
    if times.dtype != torch.int64 or times.shape != ids.shape:
        got = f"{list(times.shape)} of {times.dtype}"
        raise ValueError(
            f"take_step: expected {list(ids.shape)} int64 times, one for each id, got {got}."
        )
    bounds = times.aminmax() if ids.numel() else (times.new_ones(()), times.new_ones(()))
    of_ids = ops.complete_cumsum(times)
    of_tables = of_ids[table_offsets.to(times.device, non_blocking=True)].diff()
    least, most, *numbers = yield [*bounds, of_tables]
    if least < 1 or most > MOST_COUNT:
        raise ValueError(f"take_step: expected times in [1, 2^32), got {least} to {most}.")
    # A table without a life counts each sent id once, whatever the other tables of its group are.
    seen = table_offsets.diff()
    seen[trained.with_life] = torch.tensor(numbers, device="cpu")[trained.with_life]
    return torch.cat([table_offsets[:1], seen.cumsum(0)])


def _check_scores(trained: TrainedTables, batch: Batch) -> HostRead[None]:
    """Raises ValueError unless a batch has a valid score for each id of the tables that count scores."""
    scores, ids = batch.scores, batch.ids
    where = f"table '{trained.tables[min(trained.units)].name}'"
    if scores is None:
        if not ids.numel():
            return
        raise no_scores(where)
    if not scores.is_floating_point() or scores.shape != ids.shape:
        raise ValueError(
            f"{where}: expected one weight per id for LowestScore, got {list(scores.shape)} of "
            f"{scores.dtype} for {ids.numel()} ids."
        )
    ends = batch.table_offsets.tolist()
    parts = torch.cat([scores[ends[number] : ends[number + 1]] for number in trained.units])
    [wrong] = yield [((parts >= 0) & (parts < torch.inf)).logical_not_().sum()]
    if wrong:
        raise wrong_scores(where, wrong)


def _added(trained: TrainedTables, batch: Batch) -> Tensor | None:
    """Returns what each id adds to the count of its row, [N] int64; None: 1."""
    if not trained.units or batch.scores is None:
        return batch.times
    added = torch.ones_like(batch.ids) if batch.times is None else batch.times.clone()
    ends = batch.table_offsets.tolist()
    for number, unit in trained.units.items():
        of_table = slice(ends[number], ends[number + 1])
        # In float64, whose division and rounding are the same on every device.
        units = (batch.scores[of_table].detach().double() / unit).round_()
        added[of_table] = units.clamp_(1, MOST_COUNT).long()
    return added


class _Decided(NamedTuple):
    """A batch after lookup and admission. So far only expired ids and counters were removed.

    Attributes:
        rows: [N] int64, the rows found.
        scored: [N] int64, the rows to score: -1 for an id that does not count; the same tensor as `rows` if
            all count.
        num_known: number of ids with a row, repeats counted, of each table whose counts decay.
        distinct: number of distinct rows of the batch, for tables that may be too small.
        absent_of_frozen: number of ids of frozen tables without a row, repeats counted.
        absent: [T] int64, number of such ids of all tables; None if every id of a trained table has a row.
        unseen: the distinct ids without a row of each trained table that has some, by number of the table.
        new_ids: [M] int64, the distinct ids without a row of all tables; [0] if every id of a trained table
            has a row.
        new_index: [N] int64, the place of an id without a row in `new_ids`, -1 for other ids; [0] without
            `new_ids`.
        ranges: where the ids of each table are among `new_ids`.
    """

    rows: Tensor
    scored: Tensor
    num_known: dict[int, int]
    distinct: dict[int, int]
    absent_of_frozen: int
    absent: Tensor | None
    unseen: dict[int, Decision]
    new_ids: Tensor
    new_index: Tensor
    ranges: dict[int, slice]


def _decide(trained: TrainedTables, batch: Batch, found: Found, added: Tensor | None) -> _Decided:
    """Decides the admission of the absent ids. `added` is what each id adds to the count of its row."""
    rows, absent, offsets = found.rows, found.absent, batch.table_offsets
    scored = rows if batch.uses is None else masked(rows, batch.uses.counts)
    num_unseen, of_frozen = trained.num_absent(absent)
    num_known = _num_known(trained, offsets, absent)
    counting = _counting(trained, batch, scored)
    if not num_unseen:
        distinct = dict(zip(counting, read_together([*counting.values()]), strict=True))
        nothing = batch.ids[:0]
        return _Decided(
            rows, scored, num_known, distinct, of_frozen, None, {}, nothing, nothing, {}
        )
    new_ids, sent, new_offsets, new_index = ops.collect_new(batch.ids, rows, offsets)
    ranges = ranges_of(new_offsets)
    own = {number: range_of for number, range_of in ranges.items() if number in trained.tables}
    counts = sent if batch.times is None else _summed(new_ids, new_index, batch.times)
    deciding = _deciding(trained, batch, (new_ids, new_index), (sent, counts), own)
    # A table with a life counts the occurrences of absent ids, another each sent id once.
    timed = [number for number in own if batch.times is not None and trained.has_life(number)]
    parts: list[HostRead[Any]] = [*deciding, *counting.values()]
    parts += [_sum(counts[own[number]]) for number in timed]
    results = iter(read_together(parts))
    unseen: dict[int, Decision] = dict(zip(own, results, strict=False))
    distinct = dict(zip(counting, results, strict=False))
    if timed:
        absent = absent.clone()
        absent[timed] = torch.tensor([*results], device="cpu")
    if trained.units and added is not None:
        _add_scores(trained, unseen, own, _summed(new_ids, new_index, _given(batch.uses, added)))
    return _Decided(
        rows, scored, num_known, distinct, of_frozen, absent, unseen, new_ids, new_index, ranges
    )  # fmt: skip


def _num_known(trained: TrainedTables, table_offsets: Tensor, absent: Tensor) -> dict[int, int]:
    """Returns the number of ids with a row, repeats counted, of each table whose counts decay."""
    return {
        number: int(table_offsets[number + 1] - table_offsets[number] - absent[number])
        for number in trained.decaying
    }


def _add_scores(
    trained: TrainedTables,
    unseen: dict[int, Decision],
    ranges: Mapping[int, slice],
    scores: Tensor,
) -> None:
    """Notes in the decisions what rows of tables that count weights begin with: scores [M] of new ids."""
    for number in unseen.keys() & trained.units.keys():
        unseen[number] = unseen[number]._replace(scores=scores[ranges[number]])


def _deciding(
    trained: TrainedTables,
    batch: Batch,
    new: tuple[Tensor, Tensor],
    occurrences: tuple[Tensor, Tensor],
    ranges: dict[int, slice],
) -> list[HostRead[Decision]]:
    """Returns the host reads that decide the admission of each table's new ids.

    `new`: new ids and index of `ops.collect_new`. `occurrences` [M] int64 of the new ids as they were sent,
    which a table without a life counts, and with the times of each.
    """
    new_ids, new_index = new
    sent, counts = occurrences
    asked = None
    if batch.uses is not None:
        asked = _asked(batch.uses, batch.times, new_ids, new_index)
    return [
        admission(
            trained.tables[number],
            new_ids[own],
            (counts if trained.has_life(number) else sent)[own],
            None if asked is None else asked.slice(own),
        )
        for number, own in ranges.items()
    ]


def _counting(trained: TrainedTables, batch: Batch, scored: Tensor) -> dict[int, HostRead[int]]:
    """Returns the host reads that count the distinct rows of the tables that may be too small.

    A step has at most as many distinct rows as ids, so for most batches they need not be counted.
    """
    earlier, offsets = trained.shared.earlier, batch.table_offsets
    if earlier is None and batch.ids.numel() <= trained.least_limit:
        return {}
    sizes = offsets[1:] - offsets[:-1]  # a fifth of the time of `diff`
    if earlier is not None:
        sizes = sizes + earlier
    ends, counting = offsets.tolist(), {}
    for number in (sizes > trained.row_limits).nonzero().flatten().tolist():
        own = scored[ends[number] : ends[number + 1]]
        if earlier is None:
            counting[number] = _num_distinct(own)
        else:
            counting[number] = _num_seen(trained.tables[number], own)
    return counting


def _asked(uses: Uses, times: Tensor | None, new_ids: Tensor, new_index: Tensor) -> Asked | None:
    """Returns what the features ask for M new ids; None if all insert and count.

    new_ids and new_index are those of `collect_new`, times and uses those of `Batch`.
    """
    if uses.inserts is None and uses.counts is None:
        return None
    asks = torch.ones_like(new_ids, dtype=torch.bool)
    if uses.inserts is not None:
        asks = _summed(new_ids, new_index, uses.inserts.long()) > 0
    given = _given(uses, torch.ones_like(new_index) if times is None else times)
    return Asked(asks, _summed(new_ids, new_index, given))


def _given(uses: Uses | None, numbers: Tensor) -> Tensor:
    """Returns numbers [N] int64 with 0 for ids whose features do not insert, or do not count."""
    for flags in () if uses is None else (uses.inserts, uses.counts):
        if flags is not None:
            numbers = numbers * flags
    return numbers


def _seen(
    trained: TrainedTables, batch: Batch, decided: _Decided, added: Tensor | None
) -> list[Callable[[], None]]:
    """Returns calls that write the counts of the tables whose counts decay."""
    calls: list[Callable[[], None]] = []
    for number, known in decided.num_known.items():
        begin, end = batch.table_offsets[number : number + 2].tolist()
        rows, times = decided.scored[begin:end], None
        if decided.scored is not decided.rows:
            known = int((rows >= 0).sum())  # a GPU's host waits
        if added is not None:
            times = added[begin:end]
        if known < end - begin:
            places = places_of(rows >= 0, known)
            rows = rows.index_select(0, places)
            times = None if times is None else times.index_select(0, places)
        calls.append(prepare_touch(trained.tables[number], rows, times))
    return calls


def _summed(new_ids: Tensor, new_index: Tensor, numbers: Tensor) -> Tensor:
    """Returns the sum of the numbers [N] of each of new_ids [M], whose places are new_index [N]."""
    # Ids with a row add to an extra last number: to select the others, the host would wait.
    last = new_ids.numel()
    places = new_index.masked_fill(new_index < 0, last)
    return numbers.new_zeros(last + 1).index_add_(0, places, numbers)[:last]


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


def _num_seen(table: TableShard, rows: Tensor) -> HostRead[int]:
    """Returns the number of distinct rows of a step: rows [N], of which -1 is none, and earlier ones.

    Rows that no occurrence has scored (count 0) are not among the earlier ones: they may be evicted.
    """
    assert table.life is not None
    numbers = torch.arange(table.row_numbers.high_water_mark, device=rows.device)
    last_seen, counts = table.life.scores.read(numbers)
    is_earlier = (last_seen == table.next_step) & (counts > 0)
    seen = torch.cat([is_earlier, is_earlier.new_zeros(1)])
    seen[rows] = True  # -1 is the last place
    [count] = yield [seen[:-1].count_nonzero()]
    return count
