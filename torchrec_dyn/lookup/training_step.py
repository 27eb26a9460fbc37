"""One training step of tables: unseen ids get rows; with a life also expiry, admission, scores and eviction.

Without a life a step gives a row to every unseen id. With one it runs in this order:

1. Expire: remove the ids that are too old from the maps. Waiting ids that are too old count as unseen.
2. Find the rows of all ids.
3. Decide the admission of the ids without a row.
4. Check that every table has room, and reserve memory. If a step fails up to here, the expired ids are put
   back, and no table has changed. Nothing fails after this point, and an interrupt (Ctrl-C) is raised at the
   end of the step.
5. Count the step, free the rows of the expired ids, and drop the expired counters.
6. Score the rows found, so that none of them is evicted by this step. Counts with a half-life are prepared
   before 5, and written here.
7. Drop the counters of the admitted ids, and count the refused ids.
8. Evict the lowest rows of tables that are full, and drop the counters above their limit.
9. Give rows to the admitted ids.

Ids of a feature that does not insert ask for nothing in 3, and those of a feature that does not count are not
scored in 6. So 8 may evict a row that such an id has found: the id is looked up again, and reads as unseen.

What these do to one table is in table/table_step.py. The host waits for a GPU five times at most, beside
searches: for the expired ids, the absent ids, the new ids, their admission, and the rows and counters of 8.

Decisions depend only on the ids and their order in time, so all column shards of a table decide the same.

Legend: T tables, N ids, M distinct ids without a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life import NO_STEP, Asked, Decision
from torchrec_dyn.lookup.batch import Batch, Found, TakenStep, no_scores, wrong_scores
from torchrec_dyn.lookup.feature_uses import Uses, masked
from torchrec_dyn.lookup.table_lists import TrainedTables
from torchrec_dyn.policies import MOST_COUNT
from torchrec_dyn.storage import (
    HostRead,
    check_stack,
    note_changed,
    places_of,
    read,
    read_together,
    run_to_end,
)
from torchrec_dyn.table import (
    Expired,
    TableShard,
    TableStep,
    add_rows,
    added_rows,
    admission,
    expired_of,
    find_rows,
    insert_unseen,
    make_room,
    prepare_rows,
    prepared_steps,
    ranges_of,
    touched_of,
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
    new_index = None
    if num_unseen:
        new_index = insert_unseen(
            trained.tables, trained.prepared, batch.ids, found.rows, batch.table_offsets
        )
    trained.shared.counted = trained.counted_after(
        batch.table_offsets, found.absent if num_unseen else None
    )
    return found, TakenStep(found.rows, of_frozen, new_index)


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
    expired: dict[int, Expired] = {}  # removed from the maps, to be put back if the step fails
    steps: list[TableStep] = []
    try:
        due = trained.due()
        of_due = read_together([expired_of(tables[number]) for number in due])
        check_stack()
        for number, old in zip(due, of_due, strict=True):
            expired[number] = old
            if old.ids.numel():
                tables[number].id_map.remove(old.ids, old.num_ids - old.ids.numel())
        found = find()
        table_offsets = batch.table_offsets
        occurrences = table_offsets
        if batch.times is not None or trained.units:
            occurrences = read(occurrences_of(trained, batch))
        added = _added(trained, batch)
        decided = _decide(trained, batch, found, added)
        rows, scored = found.rows, decided.scored
        special = sorted({*trained.watched, *due, *decided.unseen})
        counted = trained.counted_after(occurrences, decided.absent)
        seen = _seen(trained, batch, rows, decided, added)
        steps = prepared_steps(tables, special, expired, decided.unseen, decided.distinct)
        listed, at_steps = trained.scores.get(), trained.first_steps + counted.steps
        watched = {step.number for step in steps if step.acts}
        frees_room = any(step.surplus > 0 or step.surplus_counters > 0 for step in steps)
        # Rows that an earlier forward of the step has seen look as if this forward had scored them.
        known = None
        if shared.earlier is not None and trained.with_life:
            known = _counts(trained, scored, table_offsets)

        def count(_: bool) -> None:
            expired.clear()
            trained.watched = watched
            shared.counted = counted

        def touch(again: bool) -> None:
            if not again or not _are_touched(trained, scored, table_offsets, known):
                ops.touch_scores_(
                    scored, table_offsets, listed.weights, listed.layout, at_steps, added
                )

        def write_decayed(_: bool) -> None:
            for number, (rows_seen, counts) in seen.items():
                life = tables[number].life
                assert life is not None
                life.write_touched(rows_seen, counts, int(at_steps[number]))

        # From the first action on no check fails, and memory for maps and rows is reserved.
        actions: list[Callable[[bool], object]] = [count, *(step.begin for step in steps)]
        if trained.with_life and trained.has_changes:
            noted = batch.ids, rows, table_offsets
            actions.append(lambda _: note_changed(trained.logs(), *noted))
        if trained.with_life:
            actions.append(touch)
        if seen:
            actions.append(write_decayed)
        if decided.unseen:
            actions += (step.count_waiting for step in steps if step.counts_waiting)
        if frees_room:
            actions.append(partial(make_room, steps))
        if decided.unseen:
            actions.append(partial(prepare_rows, steps, trained.prepared))
            actions.append(partial(add_rows, steps))
        if due:
            actions.append(lambda _: trained.note_looked(due))
        run_to_end(*actions)
    except BaseException:
        for number, old in expired.items():
            tables[number].id_map.put(old.ids, old.rows, old.num_ids, again=True)
        for step in steps:
            step.restore_waiting()
        raise
    if decided.unseen:
        new_rows = added_rows(steps, decided.new_ids, decided.ranges)
        ops.fill_new_(rows, decided.new_index, new_rows)
    new_index = decided.new_index if decided.ranges else None
    if frees_room and scored is not rows:
        return found, _found_again(trained, batch, rows, new_index)
    missing = decided.absent_of_frozen + sum(step.refused for step in steps)
    return found, TakenStep(rows, missing, new_index)


def _found_again(
    trained: TrainedTables, batch: Batch, rows: Tensor, new_index: Tensor | None
) -> TakenStep:
    """Returns the step of a batch of which ids that do not count may have lost their rows in it.

    rows [N] int64 and new_index [N] int64 are those of the step without this.
    """
    left, absent = find_rows(trained.prepared.maps, batch.ids, batch.table_offsets)
    is_same = left == rows
    new_index = torch.full_like(rows, -1) if new_index is None else new_index
    return TakenStep(left, sum(absent.tolist()), torch.where(is_same, new_index, 0))


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
    """A batch after lookup and admission. So far only expired ids were removed.

    Attributes:
        scored: [N] int64, the rows to score: -1 for an id that does not count; the same tensor as `rows` if
            all count.
        absent: [T] int64, number of ids without a row, repeats counted; None if every id of a trained table
            has a row.
        absent_of_frozen: number of such ids of frozen tables.
        unseen: the distinct ids without a row of each trained table that has some, by number of the table.
        distinct: number of distinct rows of the batch, for tables that may be too small.
        new_ids: [M] int64, the distinct ids without a row of all tables; [0] if every id of a trained table
            has a row.
        new_index: [N] int64, the place of an id without a row in `new_ids`, -1 for other ids; [0] without
            `new_ids`.
        ranges: where the ids of each table are among `new_ids`.
        num_known: number of ids with a row, repeats counted, of each table whose counts decay.
    """

    scored: Tensor
    absent: Tensor | None
    absent_of_frozen: int
    unseen: dict[int, Decision]
    distinct: dict[int, int]
    new_ids: Tensor
    new_index: Tensor
    ranges: dict[int, slice]
    num_known: dict[int, int]


def _decide(trained: TrainedTables, batch: Batch, found: Found, added: Tensor | None) -> _Decided:
    """Decides the admission of the absent ids. `added` is what each id adds to the count of its row."""
    tables, ids, times, table_offsets = trained.tables, batch.ids, batch.times, batch.table_offsets
    rows, absent = found.rows, found.absent
    scored = rows if batch.uses is None else masked(rows, batch.uses.counts)
    new_ids = new_index = ids[:0]
    asked: Asked | None = None
    ranges: dict[int, slice] = {}
    # Annotated, not subscripted calls: a step would make the types of the host reads anew, which takes 10 us.
    decisions: dict[int, HostRead[Decision]] = {}
    counted: dict[int, HostRead[int]] = {}
    sums: dict[int, HostRead[int]] = {}
    num_unseen, of_frozen = trained.num_absent(absent)
    if num_unseen:
        new_ids, sent, new_offsets, new_index = ops.collect_new(ids, rows, table_offsets)
        counts = sent
        if times is not None:
            counts = _summed(new_ids, new_index, times)
        if batch.uses is not None:
            asked = _asked(batch.uses, times, new_ids, new_index)
        ranges = ranges_of(new_offsets)
        for number, of_table in ranges.items():
            if number not in tables:
                continue
            asked_of_table = None if asked is None else asked.slice(of_table)
            # A table without a life counts each sent id once.
            occurrences = (sent if tables[number].life is None else counts)[of_table]
            decisions[number] = admission(
                tables[number], new_ids[of_table], occurrences, asked_of_table
            )
            # A table with a life counts the occurrences of absent ids.
            if times is not None and tables[number].life is not None:
                sums[number] = _sum(counts[of_table])
    # Distinct rows of the tables that may be too small. A step has at most as many distinct rows as ids, so
    # for most batches they need not be counted.
    earlier = trained.shared.earlier
    if earlier is not None or ids.numel() > trained.least_limit:
        sizes = table_offsets[1:] - table_offsets[:-1]  # a fifth of the time of `diff`
        if earlier is not None:
            sizes = sizes + earlier
        ends = table_offsets.tolist()
        for number in (sizes > trained.row_limits).nonzero().flatten().tolist():
            own = scored[ends[number] : ends[number + 1]]
            if earlier is None:
                counted[number] = _num_distinct(own)
            else:
                counted[number] = _num_seen(tables[number], own)
    parts: list[HostRead[Any]] = [*decisions.values(), *counted.values(), *sums.values()]
    results = iter(read_together(parts))
    unseen = {number: next(results) for number in decisions}
    if added is not None and not unseen.keys().isdisjoint(trained.units):
        scores = _summed(new_ids, new_index, _given(batch.uses, added))
        for number in unseen.keys() & trained.units.keys():
            unseen[number] = unseen[number]._replace(scores=scores[ranges[number]])
    distinct = {number: next(results) for number in counted}
    occurred = {number: next(results) for number in sums}
    num_known = {
        number: int(table_offsets[number + 1] - table_offsets[number] - absent[number])
        for number in trained.decaying
    }
    if occurred:
        absent = absent.clone()
        absent[list(occurred)] = torch.tensor(list(occurred.values()), device="cpu")
    absent_of_trained = absent if unseen else None
    return _Decided(
        scored,
        absent_of_trained,
        of_frozen,
        unseen,
        distinct,
        new_ids,
        new_index,
        ranges,
        num_known,
    )


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
    trained: TrainedTables, batch: Batch, all_rows: Tensor, decided: _Decided, added: Tensor | None
) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns `touched_of` each table whose counts decay, by number of the table; writes nothing."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    for number, known in decided.num_known.items():
        begin, end = batch.table_offsets[number : number + 2].tolist()
        rows, times = decided.scored[begin:end], None
        if decided.scored is not all_rows:
            known = int((rows >= 0).sum())  # a GPU's host waits
        if added is not None:
            times = added[begin:end]
        if known < end - begin:
            places = places_of(rows >= 0, known)
            rows = rows.index_select(0, places)
            times = None if times is None else times.index_select(0, places)
        seen[number] = touched_of(trained.tables[number], rows, times)
    return seen


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


def _counts(trained: TrainedTables, rows: Tensor, table_offsets: Tensor) -> Tensor:
    """Returns the sum of the counts of the rows of each table with a life, [tables with a life] int64."""
    ends, sums = table_offsets.tolist(), []
    for number in trained.with_life:
        life = trained.tables[number].life
        assert life is not None
        sums.append(life.scores.read(rows[ends[number] : ends[number + 1]])[1].sum())
    return torch.stack(sums)


def _are_touched(
    trained: TrainedTables, rows: Tensor, table_offsets: Tensor, known: Tensor | None
) -> bool:
    """Returns True if rows of this forward are scored: then they were seen at the present step of a table.

    `known`: `_counts` of the rows before, if the step has had other forwards; else None.
    """
    if known is not None:
        return not torch.equal(known, _counts(trained, rows, table_offsets))
    ends = table_offsets.tolist()
    for number in trained.with_life:
        table = trained.tables[number]
        assert table.life is not None
        last_seen, counts = table.life.scores.read(rows[ends[number] : ends[number + 1]])
        if bool(((last_seen == table.step) & (counts > 0)).any()):
            return True
    return False
