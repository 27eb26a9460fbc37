"""TableStep: the part of a training step that changes one table, beside its counted forwards.

lookup/training_step.py has the order of a step over all tables. What is here changes one table, or prepares
the changes of some.

Legend: M distinct ids without a row, K expired ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.life import STEPS_WITHOUT_TIME, Asked, Decision, Drop
from torchrec_dyn.storage import HostRead, read_together
from torchrec_dyn.table.arrays import TableArrays
from torchrec_dyn.table.insertion import (
    Addition,
    Removal,
    commit_rows,
    prepare_additions,
    rows_of_new,
)
from torchrec_dyn.table.prepared_tables import PreparedTables

_NONE = torch.empty(0, dtype=torch.int64, device="cpu")
_ALL_KNOWN = Decision(_NONE, _NONE, 0)


class Expired(NamedTuple):
    """The expired ids [K] int64 of a table, their rows [K] int64, and its number of ids with these."""

    ids: Tensor
    rows: Tensor
    num_ids: int


def expired_of(table: TableArrays) -> HostRead[Expired]:
    """Returns the expired ids of a table with an age limit and removes nothing."""
    assert table.life is not None
    if table.life.expires_by_time and table.life.has_missed_time():
        _warn_of_missed_time(table, "rows expire", "no row expires")
    high = table.row_numbers.high_water_mark
    expired = yield from table.life.expired(table.next_step, table.id_map, high)
    return Expired(*(expired or (_NONE, _NONE)), table.id_map.num_ids)


def touched_of(table: TableArrays, rows: Tensor, times: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the rows seen in a step and their counts after it, of a table whose counts decay.

    Writes nothing. rows [N] int64, none is -1; times [N] int64, occurrences of each, None for 1.
    """
    assert table.life is not None
    if not table.life.expires_by_time and table.life.has_missed_time():
        _warn_of_missed_time(table, "counts decay", "no count decays")
    return table.life.touched(rows, times, table.next_step)


def _warn_of_missed_time(table: TableArrays, rule: str, effect: str) -> None:
    warnings.warn(
        f"{table.where}: expected set_time(t) before training, since its {rule} by time, got no "
        f"time in {STEPS_WITHOUT_TIME} training steps, so {effect}. "
        "Call collection.set_time(t) before each batch.",
        UserWarning,
        stacklevel=3,
    )


def admission(
    table: TableArrays, ids: Tensor, occurrences: Tensor, asked: Asked | None = None
) -> HostRead[Decision]:
    """Decides the admission of ids [M] int64. As `RowLife.admit`; without a life all that ask get rows."""
    if table.life is not None:
        return table.life.admit(ids, occurrences, table.next_step, asked)
    return _all_admitted(ids, occurrences) if asked is None else asked.admit_all(ids, occurrences)


def _all_admitted(ids: Tensor, occurrences: Tensor) -> HostRead[Decision]:
    return Decision(ids, occurrences, ids.numel())
    yield  # a host read that reads nothing


def prepared_steps(
    tables: Mapping[int, TableArrays],
    numbers: Collection[int],
    expired: Mapping[int, Expired],
    unseen: Mapping[int, Decision],
    distinct: Mapping[int, int],
) -> list[TableStep]:
    """Checks that tables have room for a step, reserves memory, and prepares the step of each.

    Args:
        tables: by their number in a group, as all others.
        numbers: the tables to prepare, ascending; those of `unseen` are among them.
        expired: expired ids, which are removed from the maps already.
        unseen: the ids without a row.
        distinct: number of distinct rows of the batch, for tables that may be too small.

    Raises:
        RuntimeError: a table is full or memory is out; no table has changed.
    """
    for number in sorted(distinct.keys() | unseen.keys()):
        admitted = unseen.get(number, _ALL_KNOWN).num_admitted
        tables[number].check_room(admitted)
        if number in distinct:
            tables[number].check_need(distinct[number] + admitted)
    steps = [
        TableStep(number, tables[number], expired.get(number), unseen.get(number, _ALL_KNOWN))
        for number in numbers
    ]
    for step in steps:
        step.reserve()
    ageing = [step for step in steps if step.expired is not None]
    if ageing:
        removals = read_together([step.removal_of_expired() for step in ageing])
        for step, removal in zip(ageing, removals, strict=True):
            step.removal = removal
    return steps


class TableStep:
    """The part of a step that changes one table. Making it changes nothing.

    Its methods with one bool argument are actions of `run_to_end`, in this order.

    Attributes:
        number: number of the table in its group.
        expired: its expired ids, if any.
        removal: their prepared removal, without the slots of the map.
        surplus: number of rows to evict; 0 or less if none.
        surplus_counters: number of counters above their limit; 0 or less if none.
        counts_waiting: True if the table counts waiting ids.
        acts: True if rows or counters of the table change: its policies may act in the next step, too.
        refused: number of occurrences of refused ids.
        added: rows of the admitted ids; None before `prepare_rows`, and without unseen ids.
    """

    def __init__(
        self, number: int, table: TableArrays, expired: Expired | None, unseen: Decision
    ) -> None:
        self.number = number
        self._table = table
        self._unseen = unseen
        self._step = table.next_step
        has_expired = expired is not None and expired.ids.numel() > 0
        self.expired = expired if has_expired else None
        self.removal: Removal | None = None
        self.surplus = self._surplus()
        self.added: Addition | None = None
        self.refused = unseen.refused_occurrences
        self._admitted = unseen.at(unseen.admitted)
        self._rows_before = table.id_map.num_ids if expired is None else expired.num_ids
        self._num_waiting = num_expired = self.surplus_counters = 0
        self.counts_waiting = table.life is not None and table.life.waiting is not None
        if table.life is not None and self.counts_waiting:
            self._num_waiting, num_expired, most = table.life.counters_after(
                unseen, self._rows_before
            )
            self.surplus_counters = self._num_waiting - most
        counters = table.counters
        self._all_refused = counters["refused"] + self.refused
        self._counters_expired = counters["counters_expired"] + num_expired
        self._counters_dropped = counters["counters_dropped"]
        self._has_forgotten = False  # the counters of the admitted ids
        self.acts = has_expired or unseen.ids.numel() > 0 or self.surplus > 0

    def _surplus(self) -> int:
        table = self._table
        replaces = table.life is not None and table.life.replaces
        need = table.id_map.num_ids + self._unseen.num_admitted
        return need - table.row_limit if replaces else 0

    @property
    def table(self) -> TableArrays:
        """The table."""
        return self._table

    @property
    def num_unseen(self) -> int:
        """Number of ids without a row, admitted or not."""
        return self._unseen.ids.numel()

    @property
    def admitted_ids(self) -> Tensor:
        """The admitted ids, [K] int64."""
        return self._admitted[0]

    def first_counts(self) -> Tensor:
        """The first counts of the rows of the admitted ids, [K] int64."""
        return self._unseen.first_counts()

    def reserve(self) -> None:
        """Reserves memory for the rows of the admitted ids and the counters of the refused ids."""
        admitted = self._unseen.num_admitted
        refused = 0 if self._unseen.refused is None else self._unseen.refused.numel()
        self._table.reserve(admitted, max(0, self.surplus), refused)

    def removal_of_expired(self) -> HostRead[Removal]:
        """Prepares the removal of the expired ids."""
        assert self.expired is not None
        ids, rows, _ = self.expired
        return Removal.prepare(self._table, ids, rows, "evicted_expired")

    def begin(self, _: bool) -> None:
        """Counts refused ids, frees the rows of the expired ids, and drops the expired counters."""
        table = self._table
        table.counters["refused"] = self._all_refused
        table.counters["counters_expired"] = self._counters_expired
        if self.removal is not None:
            self.removal.free_rows()
        if table.life is not None:
            table.life.drop_expired(self._step)

    def count_waiting(self, again: bool) -> None:
        """Drops the counters of the admitted ids, and writes those of the refused ids."""
        assert self._table.life is not None
        self._has_forgotten = True
        self._table.life.count_waiting(self._unseen, self._step, again)

    def restore_waiting(self) -> None:
        """Restores the counters of the admitted ids without a row, if `make_room` has failed."""
        table, (ids, counts) = self._table, self._admitted
        if self._has_forgotten and ids.numel() and table.life is not None:
            left = (table.id_map.lookup(ids) < 0).nonzero().flatten()
            if left.numel():
                table.life.refuse(ids[left], counts[left], self._step)

    def lowest_rows(self) -> HostRead[Removal | None]:
        """Returns the removal of the lowest rows of a full table; None if it has room."""
        table, surplus = self._table, self._surplus()
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
        waiting = None if self._table.life is None else self._table.life.waiting
        assert waiting is not None
        if surplus is not None:
            waiting.drop(surplus)
        dropped = self._num_waiting - len(waiting)
        self._table.counters["counters_dropped"] = self._counters_dropped + dropped

    def new_rows(self, added: Addition) -> Tensor:
        """Returns the rows of all unseen ids, [M] int64, -1 for a refused id."""
        if self._unseen.admitted is None:
            return added.rows
        rows = torch.full_like(self._unseen.ids, -1)
        rows[self._unseen.admitted] = added.rows
        return rows


def make_room(steps: Sequence[TableStep], _: bool) -> None:
    """Lowers full tables and counters to their limits: an action of `run_to_end`, after those of the tables.

    The search for the lowest rows may run out of memory: then `restore_waiting` of each step is to be called.
    """
    full = [step for step in steps if step.surplus > 0]
    counting = [step for step in steps if step.surplus_counters > 0]
    host_reads: list[HostRead[Any]] = [step.lowest_rows() for step in full]
    host_reads += [step.lowest_counters() for step in counting]
    lowest = read_together(host_reads)
    for removal in lowest[: len(full)]:
        if removal is not None:
            removal.commit()
    for step, drop in zip(counting, lowest[len(full) :], strict=True):
        step.drop_counters(drop)


def prepare_rows(steps: Sequence[TableStep], prepared: PreparedTables, _: bool) -> None:
    """Prepares rows for the admitted ids of all tables: an action of `run_to_end`, before `add_rows`."""
    adding = {step.number: step for step in steps if step.num_unseen}
    tables = {number: step.table for number, step in adding.items()}
    ids = {number: step.admitted_ids for number, step in adding.items()}
    counts = {number: step.first_counts() for number, step in adding.items()}
    for number, added in prepare_additions(tables, prepared, ids, counts).items():
        adding[number].added = added


def add_rows(steps: Sequence[TableStep], again: bool) -> None:
    """Gives prepared rows to the admitted ids of all tables: the last action of `run_to_end`."""
    commit_rows([step.added for step in steps if step.added is not None], again)


def added_rows(steps: Sequence[TableStep], new_ids: Tensor, ranges: Mapping[int, slice]) -> Tensor:
    """Returns the rows of the new ids of all tables. As `rows_of_new`, after `add_rows`."""
    new_rows = {step.number: step.new_rows(step.added) for step in steps if step.added is not None}
    return rows_of_new(new_ids, ranges, new_rows)
