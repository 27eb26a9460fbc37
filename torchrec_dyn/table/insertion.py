"""Finds the rows of ids, inserts unseen ids into all tables of a lookup or into none, and removes ids.

Legend: T tables, N ids, M distinct unseen ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.storage import (
    MapList,
    RowAddition,
    RowRemoval,
    change,
    host_numbers,
    joined,
    parts_of,
    read,
)
from torchrec_dyn.table.arrays import TableArrays
from torchrec_dyn.table.prepared_tables import PreparedTables

_COUNT_BITS = 2**63 - 1  # all but the sign bit, which marks an error


def find_rows(maps: MapList, ids: Tensor, table_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the rows of ids [N] int64 in table order; table_offsets [T + 1] int64, where each table's begin.

    Returns:
        rows: [N] int64, -1 for an absent id.
        absent: [T] int64 on the CPU, number of absent ids of each table, repeats counted. On a GPU this is
            the one number that the host waits for in a step of known ids.

    Raises:
        RuntimeError: on a GPU, an earlier op had invalid arguments (csrc/device_errors.h).
    """
    rows, absent = ops.lookup(ids, table_offsets, *maps.arrays())
    if absent.is_cpu:
        return rows, absent
    numbers = read([absent])
    if min(numbers, default=0) < 0:
        ops.raise_errors(ids)  # if another thread has raised the error, nothing is raised
        numbers = [number & _COUNT_BITS for number in numbers]
    return rows, host_numbers(numbers)


class Unseen(NamedTuple):
    """The absent ids of a lookup with their prepared rows.

    Attributes:
        additions: of the tables that insert.
        new_index: [N] int64, the place of an absent id among all of them, -1 for other ids.
        places: [K] int64, which of these the additions have; None: all.
        num_absent: number of all of them.
    """

    additions: Additions
    new_index: Tensor
    places: Tensor | None
    num_absent: int

    def fill(self, rows: Tensor) -> None:
        """Writes the new rows into rows [N] int64 of the lookup, after the commit of the additions."""
        new_rows = self.additions.rows
        if not new_rows.numel():
            return
        if self.places is not None and new_rows.numel() < self.num_absent:
            new_rows = new_rows.new_full((self.num_absent,), -1).index_copy_(
                0, self.places, new_rows
            )
        ops.fill_new_(rows, self.new_index, new_rows)


def insert_unseen(
    tables: Mapping[int, TableArrays],
    prepared: PreparedTables,
    ids: Tensor,
    rows: Tensor,
    table_offsets: Tensor,
) -> None:
    """Inserts the absent ids of a lookup, as `prepare_unseen`, and writes their rows into `rows`."""
    with change(*tables.values()) as insertion:
        unseen = prepare_unseen(tables, prepared, ids, rows, table_offsets)
        insertion.commit()
        unseen.additions.commit()
    unseen.fill(rows)


def prepare_unseen(
    tables: Mapping[int, TableArrays],
    prepared: PreparedTables,
    ids: Tensor,
    rows: Tensor,
    table_offsets: Tensor,
) -> Unseen:
    """Prepares rows for the absent ids of a lookup, whatever the policies.

    `tables` by number in `prepared`; ids of others stay absent. ids [N] int64 in table order; rows [N] int64
    of the lookup; table_offsets [T + 1] int64, where the ids of each table begin.

    Raises:
        RuntimeError: a table is full or memory is out; all tables hold the same ids as before.
    """
    new_ids, _, new_offsets, new_index = ops.collect_new(ids, rows, table_offsets)
    ends, places = new_offsets.tolist(), None
    sizes = {t: end - begin for t, (begin, end) in enumerate(pairwise(ends)) if t in tables}
    count = new_ids.numel()
    for t, size in sizes.items():
        tables[t].check_room(size)
    for t, size in sizes.items():
        if size:
            tables[t].reserve(size)
    if sum(sizes.values()) < count:
        ranges = [
            torch.arange(ends[t], ends[t + 1], device=ids.device)
            for t, size in sizes.items()
            if size
        ]
        places = joined(ranges, new_ids)
        new_ids = new_ids.index_select(0, places)
    return Unseen(Additions(tables, prepared, new_ids, sizes), new_index, places, count)


class Additions:
    """Prepared fresh rows of the new ids of several tables, by number of the table; room is reserved.

    Nothing is written before the commit: the rows may be those of ids that are removed in the same change,
    which an exception brings back.
    """

    def __init__(
        self,
        tables: Mapping[int, TableArrays],
        prepared: PreparedTables,
        ids: Tensor,
        sizes: Mapping[int, int],
        counts: Tensor | None = None,
    ) -> None:
        """Prepares rows.

        ids [M] int64, table after table, `sizes` of each, are distinct and absent. counts [M] int64 are their
        occurrences; None outside of training, when the counters of waiting ids are dropped, too.
        """
        last_seen = {
            t: tables[t].first_seen(is_trained=counts is not None)
            for t, size in sizes.items()
            if size
        }
        self._added = RowAddition(
            tables, ids, sizes, last_seen, counts, len(prepared.tables), prepared.get()
        )
        self._tables = {t: tables[t] for t in self._added.sizes}
        self._ids = parts_of(ids, self._added.sizes)
        self._rows = parts_of(self._added.rows, self._added.sizes)
        self._drops = [
            table.life.waiting.removal(self._ids[t])
            for t, table in self._tables.items()
            if counts is None and table.life is not None and table.life.waiting is not None
        ]

    @property
    def rows(self) -> Tensor:
        """The rows of the ids after the commit, [M] int64."""
        return self._added.rows

    def commit(self) -> None:
        """Writes the rows and gives them to their ids, in a commit of the tables."""
        self._added.commit()
        for drop in self._drops:
            drop.commit()
        for t, table in self._tables.items():
            ids, rows = self._ids[t], self._rows[t]
            if table.optimizer.own is not None:  # whose states the op does not know
                for store, number in zip(table.states, table.optimizer.initial_states, strict=True):
                    store.fill(rows, number)
            log = table.change_log
            if log is not None:
                log.add(ids, rows, table.id_map)
            table.own = table.own._replace(edits=table.own.edits + 1)
            table.counters["inserted"] += ids.numel()


class Removals:
    """A prepared removal of ids of several tables, by number of the table."""

    def __init__(
        self,
        tables: Mapping[int, TableArrays],
        prepared: PreparedTables,
        ids: Tensor,
        rows: Tensor,
        sizes: Mapping[int, int],
        cause: str,
    ) -> None:
        """Prepares a removal and changes nothing, but that it may record the rows as changed.

        ids [M] int64, table after table, `sizes` of each, are distinct, rows [M] int64 are their rows.
        `cause` is the counter of `stats` that counts them.
        """
        self._removal = RowRemoval(tables, ids, rows, sizes, len(prepared.tables), prepared.get())
        self.sizes, self._cause = self._removal.sizes, cause
        self._tables = {t: tables[t] for t in self.sizes}
        logs = {
            t: log for t, table in self._tables.items() if (log := table.change_log) is not None
        }
        self._logged = {}
        own = parts_of(ids, self.sizes) if logs else {}
        for t, log in logs.items():
            its_rows = self._removal.rows_of[t]
            log.touch(own[t], its_rows)
            self._logged[t] = log, log.with_removed(own[t], its_rows)

    def commit(self) -> None:
        """Removes the ids and frees their rows, which are reused as soon as no open forward can hold them."""
        self._removal.commit()
        for log, removed in self._logged.values():
            log.removed = removed
        for t, size in self.sizes.items():
            self._tables[t].counters[self._cause] += size

    def undo(self) -> Callable[[], None]:
        """Returns a call that undoes a commit that comes next, or a part of it."""
        bring_back, cause = self._removal.undo(), self._cause
        removed = [(log, log.removed) for log, _ in self._logged.values()]
        counted = [(table, table.counters[cause]) for table in self._tables.values()]

        def restore() -> None:
            bring_back()
            for log, before in removed:
                log.removed = before
            for table, count in counted:
                table.counters[cause] = count
                if table.life is not None:
                    table.life.forget_listed()

        return restore


def removal_of(table: TableArrays, ids: Tensor, rows: Tensor, cause: str) -> Removals:
    """Returns the removal of ids of one table. As `Removals`."""
    sizes = {0: ids.numel()}
    return Removals({0: table}, PreparedTables([table]), ids, rows, sizes, cause)


def count_late_grads(
    tables: Mapping[int, TableArrays], rows: Tensor, table_offsets: Tensor
) -> None:
    """Counts the gradients of a batch for rows of removed ids.

    `tables` by number. rows [N] int64 in table order; table_offsets [T + 1] int64, where those of each begin.
    """
    late: dict[int, Tensor] = {}
    for t, table in tables.items():
        withheld = table.row_numbers.withheld()
        if withheld.numel():
            begin, end = table_offsets[t : t + 2].tolist()
            late[t] = torch.isin(rows[begin:end], withheld).sum()
    if late:
        for t, count in zip(late, torch.stack(list(late.values())).tolist(), strict=True):
            tables[t].counters["late_grads"] += count
