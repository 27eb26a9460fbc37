"""One training step of tables whose rows have a life: who leaves, who is admitted, who was seen.

In this order: rows that are too old leave; ids are found; ids without a row are asked for admission; all
of it is checked, and memory taken, before anything else changes; then those found are scored, the lowest
make room, and those admitted get their rows. What happens follows from the stream of ids alone, so column
shards agree.

Legend: T tables, N ids, M distinct ids without a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life import MOST_COUNT, Decision
from torchrec_dyn.lookup.table_blocks import TableBlocks
from torchrec_dyn.storage import arrays_of
from torchrec_dyn.table import DynamicTable, check_need, check_step, find_rows, note_changed

_NONE = torch.empty(0, dtype=torch.int64)


class _Newcomers(NamedTuple):
    """Ids of one table's batch that have no row.

    Attributes:
        ids: [M] int64.
        occurrences: [M] int64 in this batch.
        decision: on their admission.
        num_admitted: how many get a row.
    """

    ids: Tensor
    occurrences: Tensor
    decision: Decision
    num_admitted: int


_NOBODY = _Newcomers(_NONE, _NONE, Decision(None, _NONE), 0)


def take_step(
    tables: Sequence[DynamicTable],
    ids: Tensor,
    table_offsets: Tensor,
    bounds: Sequence[int],
    scores: Callable[[], TableBlocks],
    times: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Takes a batch in: counts the step, lets ids go and come, and finds the rows.

    Args:
        tables: T tables, of which one at least has a life.
        ids: [N] int64 in table order.
        table_offsets: [T + 1] int64, which ids are whose.
        bounds: the same as numbers.
        scores: lists the scores of the tables as they are by then.
        times: [N] int64, how often each id occurred where it came from; None: once.

    Returns:
        rows: [N] int64, -1 of an id that was not admitted.
        refused: occurrences of those that are -1.

    Raises:
        ValueError: times that are none; no table has changed.
        RuntimeError: a table is full, or memory is out; no table has changed.
    """
    if times is not None:
        _check_times(times, ids.numel())
    old: list[tuple[Tensor, Tensor]] = []
    try:
        for table in tables:
            old.append(_take_out_the_old(table))
        batch = _decide(tables, ids, table_offsets, bounds, times)
    except BaseException:
        for table, (old_ids, old_rows) in zip(tables, old, strict=False):
            table.id_map.insert(old_ids, old_rows)
        raise
    # From here on nothing is refused, and the memory of maps and rows is taken.
    for table, gone, (seen, absent) in zip(
        tables, old, _occurrences(tables, batch, bounds, times), strict=True
    ):
        _begin(table, gone, seen, absent)
    listed, steps = scores(), torch.tensor([table.step for table in tables])
    ops.touch_scores_(batch.rows, table_offsets, listed.weights, listed.layout, steps, times)
    note_changed(tables, batch.rows, table_offsets)
    admitted = [_admit(table, new) for table, new in zip(tables, batch.newcomers, strict=True)]
    for table in tables:
        if table.life is not None:
            table.counters["counters_dropped"] += table.life.shrink(table.step)
    if not any(batch.absent):
        return batch.rows, 0
    counts = torch.tensor([0, *(one[0].numel() for one in admitted)])
    ops.insert(
        torch.cat([one[0] for one in admitted]), torch.cat([one[1] for one in admitted]),
        counts.cumsum(0), *arrays_of([table.id_map for table in tables]),
    )  # fmt: skip
    ops.fill_new_(batch.rows, batch.new_index, torch.cat([one[2] for one in admitted]))
    return batch.rows, sum(one[3] for one in admitted)


class _Batch(NamedTuple):
    """What was decided on a batch before anything was changed.

    Attributes:
        rows: [N] int64, -1 of ids that have none yet.
        absent: of each table how many ids have none, repeats counted.
        newcomers: of each table.
        new_index: [N] int64, the place of an absent id among all newcomers, -1 of others; [0] without any.
    """

    rows: Tensor
    absent: list[int]
    newcomers: list[_Newcomers]
    new_index: Tensor


def _check_times(times: Tensor, ids: int) -> None:
    """Refuses counts of occurrences that are none, while nothing has changed yet."""
    if times.dtype != torch.int64 or times.shape != (ids,):
        got = f"{list(times.shape)} of {times.dtype}"
        raise ValueError(f"take_step: expected [{ids}] int64 times, one for each id, got {got}.")
    least, most = (int(bound) for bound in times.aminmax()) if ids else (1, 1)
    if least < 1 or most > MOST_COUNT:
        raise ValueError(f"take_step: expected times in [1, 2^32), got {least} to {most}.")


def _occurrences(
    tables: Sequence[DynamicTable], batch: _Batch, bounds: Sequence[int], times: Tensor | None
) -> Iterator[tuple[int, int]]:
    """Yields of each table how many occurrences it saw, and how many of them had no row on arrival."""
    each = zip(tables, pairwise(bounds), batch.absent, batch.newcomers, strict=True)
    for table, (begin, end), absent, new in each:
        if times is None or table.life is None:
            # A table without a life counts what arrives, whoever its neighbours are.
            yield end - begin, absent
        else:
            yield int(times[begin:end].sum()), int(new.occurrences.sum())


def _decide(
    tables: Sequence[DynamicTable],
    ids: Tensor,
    table_offsets: Tensor,
    bounds: Sequence[int],
    times: Tensor | None,
) -> _Batch:
    """Finds rows, decides on ids without one, checks every table's need and takes memory for it."""
    rows, absent = find_rows(tables, ids, table_offsets)
    newcomers, new_index = [_NOBODY] * len(tables), _NONE
    if any(absent):
        new_ids, counts, new_offsets, new_index = ops.collect_new(ids, rows, table_offsets)
        if times is not None:
            is_new = new_index >= 0
            counts = torch.zeros_like(counts).index_add_(0, new_index[is_new], times[is_new])
        sizes = new_offsets.diff().tolist()
        per_table = zip(tables, new_ids.split(sizes), counts.split(sizes), strict=True)
        newcomers = [_ask(*one) for one in per_table]
    for table, new, (begin, end) in zip(tables, newcomers, pairwise(bounds), strict=True):
        _check(table, new, rows[begin:end])
    for table, new in zip(tables, newcomers, strict=True):
        _reserve(table, new)
    return _Batch(rows, absent, newcomers, new_index)


def _take_out_the_old(table: DynamicTable) -> tuple[Tensor, Tensor]:
    """Takes ids that are too old out of the map; returns them and the rows they held, still scored."""
    if table.life is None:
        return _NONE, _NONE
    check_step(table, table.step + 1)
    too_old = table.life.too_old(table.step + 1, table.id_map, table.row_numbers.high)
    if too_old is None or not too_old[0].numel():
        return _NONE, _NONE
    table.id_map.erase(too_old[0])
    return too_old


def _ask(table: DynamicTable, ids: Tensor, occurrences: Tensor) -> _Newcomers:
    decision = Decision(None, occurrences)
    if table.life is not None and ids.numel():
        decision = table.life.admit(ids, occurrences, table.step + 1)
    admitted = ids.numel() if decision.admitted is None else int(decision.admitted.sum())
    return _Newcomers(ids, occurrences, decision, admitted)


def _check(table: DynamicTable, new: _Newcomers, rows: Tensor) -> None:
    table.check_room(new.num_admitted)
    if table.life is None or not table.life.replaces:
        return
    # No batch needs more rows than it has occurrences: most need not be looked at closer.
    if rows.numel() > table.row_limit:
        check_need(table, torch.unique(rows[rows >= 0]).numel() + new.num_admitted)


def _reserve(table: DynamicTable, new: _Newcomers) -> None:
    table.reserve(new.num_admitted, max(0, _surplus(table, new)))
    if table.life is not None and table.life.waiting is not None:
        table.life.waiting.reserve(new.ids.numel() - new.num_admitted)


def _surplus(table: DynamicTable, new: _Newcomers) -> int:
    """Returns how many rows must go before the admitted ids come."""
    replaces = table.life is not None and table.life.replaces
    return table.num_rows + new.num_admitted - table.row_limit if replaces else 0


def _begin(table: DynamicTable, old: tuple[Tensor, Tensor], occurrences: int, missing: int) -> None:
    """Counts the step and lets go the ids, with their rows, that were too old for it."""
    count_step(table, occurrences, missing)
    if table.life is None:
        return
    if old[0].numel():
        table.free(*old, "evicted_expired")
    table.life.passed(table.step)


def count_step(table: DynamicTable, occurrences: int, absent: int) -> None:
    """Counts a training step of a table, with so many ids, so many of them without a row on arrival."""
    table.step += 1
    table.counters["forwards"] += 1
    table.counters["ids_seen"] += occurrences
    table.counters["hits"] += occurrences - absent


def _admit(table: DynamicTable, new: _Newcomers) -> tuple[Tensor, Tensor, Tensor, int]:
    """Makes room, gives rows to those admitted and counts the others.

    Returns:
        ids: those admitted.
        rows: theirs.
        new_rows: [M] int64 rows of all, -1 where not admitted.
        refused: occurrences of those not admitted.
    """
    surplus, life, admitted = _surplus(table, new), table.life, new.decision.admitted
    if life is not None and surplus > 0:
        ids, _ = life.lowest(surplus, table.step, table.id_map, table.row_numbers.high)
        table.free(*table.id_map.erase(ids), "evicted_full")
    if not new.ids.numel():
        return _NONE, _NONE, _NONE, 0
    if life is None or admitted is None:
        rows = table.adopt(new.ids, new.decision.counts)
        return new.ids, rows, rows, 0
    ids, counts = new.ids[admitted], new.decision.counts
    rows = table.adopt(ids, counts[admitted])
    new_rows = torch.full_like(new.ids, -1).masked_scatter_(admitted, rows)
    outside = ~admitted
    life.refuse(new.ids[outside], counts[outside], table.step)
    refused = int(new.occurrences[outside].sum())
    table.counters["refused"] += refused
    return ids, rows, new_rows, refused
