"""TableStep: the part of a training step that changes one table, beside its counted forwards.

lookup/training_step.py has the order of a step over all tables. What is here changes one table, or prepares
the changes of some.

Legend: M distinct ids without a row, K expired ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.life import STEPS_WITHOUT_TIME, Asked, Counters, Decision, Drop
from torchrec_dyn.storage import HostRead, change, read_together
from torchrec_dyn.table.arrays import TableArrays
from torchrec_dyn.table.insertion import (
    Addition,
    Additions,
    Removal,
    prepare_additions,
)
from torchrec_dyn.table.prepared_tables import PreparedTables

_NONE = torch.empty(0, dtype=torch.int64, device="cpu")
_ALL_KNOWN = Decision(_NONE, _NONE, 0)


class Expired(NamedTuple):
    """The prepared removal of a table's expired ids and the drop of its expired counters.

    Attributes:
        num_expired: number of the ids.
        num_ids: the table's number of ids before.
    """

    removal: Removal
    num_expired: int
    drop: Drop | None
    num_ids: int


def expired_of(table: TableArrays) -> HostRead[Expired]:
    """Returns the expired ids and counters of a table with an age limit; removes nothing."""
    life = table.life
    assert life is not None
    if life.expires_by_time and life.has_missed_time():
        _warn_of_missed_time(table, "rows expire", "no row expires")
    high = table.row_numbers.high_water_mark
    (ids, rows), drop = yield from life.expired(table.next_step, table.id_map, high)
    removal = yield from Removal.prepare(table, ids, rows, "evicted_expired")
    return Expired(removal, ids.numel(), drop, table.id_map.num_ids)


def remove_expired(table: TableArrays, expired: Expired, written: change) -> None:
    """Removes the expired ids and counters of a table before a commit."""
    waiting = None if table.life is None else table.life.waiting
    if expired.num_expired:
        written.on_error(expired.removal.undo())
        expired.removal.commit()
    if waiting is not None and expired.drop is not None:
        ids, rows, _ = expired.drop
        written.on_error(waiting.undo(ids, Counters(rows, *waiting.read(rows))))
        waiting.drop(expired.drop)


def prepare_touch(table: TableArrays, rows: Tensor, times: Tensor | None) -> Callable[[], None]:
    """Returns a call that writes the counts of the rows seen in a step, of a table whose counts decay.

    rows [N] int64, none is -1; times [N] int64, occurrences of each, None for 1.
    """
    assert table.life is not None
    if not table.life.expires_by_time and table.life.has_missed_time():
        _warn_of_missed_time(table, "counts decay", "no count decays")
    return table.life.prepare_touch(rows, times, table.next_step)


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


def check_need(
    tables: Mapping[int, TableArrays], unseen: Mapping[int, Decision], distinct: Mapping[int, int]
) -> None:
    """Raises RuntimeError unless tables have room for a step.

    Args:
        tables: by their number in a group, as all others.
        unseen: the ids without a row.
        distinct: number of distinct rows of the batch, for tables that may be too small.
    """
    for number in sorted(distinct.keys() | unseen.keys()):
        admitted = unseen.get(number, _ALL_KNOWN).num_admitted
        tables[number].check_room(admitted)
        if number in distinct:
            tables[number].check_need(distinct[number] + admitted)


class TableStep:
    """The part of a step that changes one table. Making it changes nothing.

    Attributes:
        number: number of the table in its group.
        table: the table.
        unseen: its ids without a row.
        surplus: number of rows to evict; 0 or less if none.
        acts: True if rows or counters of the table change: its policies may act in the next step, too.
    """

    def __init__(
        self, number: int, table: TableArrays, expired: Expired | None, unseen: Decision | None
    ) -> None:
        self.number, self.table, self.unseen = number, table, unseen or _ALL_KNOWN
        self._step, self._expired = table.next_step, expired
        self._rows_before = table.id_map.num_ids if expired is None else expired.num_ids
        self._dropped: Drop | None = None
        need = table.id_map.num_ids + self.unseen.num_admitted
        replaces = table.life is not None and table.life.replaces
        self.surplus = need - table.row_limit if replaces else 0
        has_expired = expired is not None and expired.num_expired > 0
        self.acts = has_expired or unseen is not None or self.surplus > 0

    def reserve(self) -> None:
        """Reserves memory for the rows of the admitted ids and the counters of the refused ids."""
        refused = 0 if self.unseen.refused is None else self.unseen.refused.numel()
        self.table.reserve(self.unseen.num_admitted, max(0, self.surplus), refused)

    def count_waiting(self, written: change) -> None:
        """Drops the counters of the admitted ids, and writes those of the refused ids, before a commit."""
        if self.table.life is not None and self.unseen is not _ALL_KNOWN:
            self.table.life.count_waiting(self.unseen, self._step, written)

    def lowest_rows(self) -> HostRead[Removal | None]:
        """Returns the removal of the lowest rows of a full table; None if it has room."""
        table = self.table
        if table.life is None or self.surplus <= 0:
            return None
        high = table.row_numbers.high_water_mark
        lowest = yield from table.life.lowest(self.surplus, self._step, table.id_map, high)
        return (yield from Removal.prepare(table, *lowest, "evicted_full"))

    def lowest_counters(self) -> HostRead[None]:
        """Finds the counters above their limit, which the commit drops."""
        if self.table.life is not None:
            self._dropped = yield from self.table.life.surplus_counters(
                self._step, self._rows_before
            )

    def commit(self) -> None:
        """Counts the refused ids and drops counters and the expired rows that were listed."""
        life, counters = self.table.life, self.table.counters
        counters["refused"] += self.unseen.refused_occurrences
        if life is None:
            return
        life.drop_expired(self._step)
        if self._expired is not None and self._expired.drop is not None:
            counters["counters_expired"] += self._expired.drop.ids.numel()
        if life.waiting is not None and self._dropped is not None:
            life.waiting.drop(self._dropped)
            counters["counters_dropped"] += self._dropped.ids.numel()

    def new_rows(self, added: Addition) -> Tensor:
        """Returns the rows of all unseen ids, [M] int64, -1 for a refused id, after the commit of `added`."""
        if self.unseen.admitted is None:
            return added.rows
        rows = torch.full_like(self.unseen.ids, -1)
        rows[self.unseen.admitted] = added.rows
        return rows


def prepare(steps: Sequence[TableStep], written: change) -> None:
    """Reserves memory for the steps of tables, and counts their waiting ids, before a commit."""
    for step in steps:
        step.reserve()
    for step in steps:
        step.count_waiting(written)


def make_room(steps: Sequence[TableStep], written: change) -> None:
    """Lowers full tables to their limits before a commit, and finds the counters above theirs."""
    full = [step for step in steps if step.surplus > 0]
    host_reads: list[HostRead[Any]] = [step.lowest_rows() for step in full]
    host_reads += [step.lowest_counters() for step in steps]
    for removal in read_together(host_reads)[: len(full)]:
        if removal is not None:
            written.on_error(removal.undo())
            removal.commit()


def prepare_rows(steps: Sequence[TableStep], prepared: PreparedTables) -> Additions:
    """Prepares rows for the admitted ids of all tables."""
    adding = {step.number: step for step in steps if step.unseen.ids.numel()}
    tables = {number: step.table for number, step in adding.items()}
    ids = {number: step.unseen.at(step.unseen.admitted)[0] for number, step in adding.items()}
    counts = {number: step.unseen.first_counts() for number, step in adding.items()}
    return prepare_additions(tables, prepared, ids, counts)


def rows_of_steps(steps: Sequence[TableStep], additions: Additions) -> dict[int, Tensor]:
    """Returns the rows of each table's new ids, -1 for a refused id, after the commit of the additions."""
    return {
        step.number: step.new_rows(additions.of_tables[step.number])
        for step in steps
        if step.number in additions.of_tables
    }
