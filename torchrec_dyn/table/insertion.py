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
    Added,
    Chosen,
    IdMap,
    RowChange,
    change,
    host_numbers,
    joined,
    offsets_of,
    parts_of,
)
from torchrec_dyn.table.arrays import Room, TableArrays, reserve_tables
from torchrec_dyn.table.prepared_tables import PreparedTables


def find_rows(id_map: IdMap, ids: Tensor) -> Tensor:
    """Returns the rows of ids [M] int64, [M] int64, -1 for an absent id.

    Raises:
        RuntimeError: on a GPU, an earlier op had invalid arguments (csrc/device_errors.h).
    """
    rows, absent = ops.lookup(ids, host_numbers([0, ids.numel()]), *id_map.arrays())
    if not absent.is_cpu and int(absent) < 0:
        ops.raise_errors(ids)  # if another thread has raised the error, nothing is raised
    return rows


class NewIds(NamedTuple):
    """The distinct absent ids of a lookup, table after table.

    Attributes:
        ids: [M] int64, in the order in which they first occur.
        counts: [M] int64, their occurrences.
        new_index: [N] int64, the place of an absent id among them, -1 for other ids.
        ends: [T + 1], where those of each table begin, and the end.
    """

    ids: Tensor
    counts: Tensor
    new_index: Tensor
    ends: list[int]

    @property
    def sizes(self) -> dict[int, int]:
        """Number of new ids of each table that has some."""
        return {t: end - begin for t, (begin, end) in enumerate(pairwise(self.ends)) if end > begin}


def new_ids_of(ids: Tensor, rows: Tensor, table_offsets: Tensor) -> NewIds:
    """Returns the new ids of a lookup of ids [N] int64 in table order, with their rows [N] int64."""
    new_ids, counts, offsets, index = ops.collect_new(ids, rows, table_offsets)
    return NewIds(new_ids, counts, index, offsets.tolist())


def insert_unseen(
    tables: Mapping[int, TableArrays], prepared: PreparedTables, rows: Tensor, new: NewIds
) -> None:
    """Inserts the absent ids of a lookup, as `prepare_unseen`."""
    with change(*tables.values()) as insertion:
        additions = prepare_unseen(tables, prepared, rows, new)
        additions.place(are_of_batch=True)
        insertion.commit()
        additions.commit()


def prepare_unseen(
    tables: Mapping[int, TableArrays], prepared: PreparedTables, rows: Tensor, new: NewIds
) -> TableChange:
    """Prepares rows for the absent ids of a lookup, whatever the policies.

    `tables` by number in `prepared`; ids of others stay absent. rows [N] int64 of the lookup: the commit
    writes the new rows there.

    Raises:
        RuntimeError: a table is full or memory is out; all tables hold the same ids as before.
    """
    sizes = {t: size for t, size in new.sizes.items() if t in tables}
    for t, size in sizes.items():
        tables[t].check_room(size)
    reserve_tables([(tables[t], Room(size)) for t, size in sizes.items()])
    ids, places = new.ids, None
    if sum(sizes.values()) < ids.numel():
        ranges = [torch.arange(*new.ends[t : t + 2], device=ids.device) for t in sizes]
        places = joined(ranges, ids)
        ids = ids.index_select(0, places)
    return TableChange(
        tables, prepared, added=fresh(tables, ids, sizes, fills=(rows, new.new_index, places))
    )


def fresh(
    tables: Mapping[int, TableArrays],
    ids: Tensor,
    sizes: Mapping[int, int],
    counts: Tensor | None = None,
    fills: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> Added:
    """Returns new ids of tables. counts [M] int64, their occurrences, are None outside of training."""
    is_trained = counts is not None
    last_seen = {
        t: tables[t].first_seen(is_trained=is_trained) for t, size in sizes.items() if size
    }
    return Added(ids, sizes, last_seen, counts, fills)


class TableChange:
    """A prepared change of several tables, by number: ids lose their rows, and others get fresh ones.

    Rows of removed ids may be those of new ids of the change. Room is reserved. Nothing is written before the
    commit, but that rows of removed ids may be recorded as changed.
    """

    def __init__(
        self,
        tables: Mapping[int, TableArrays],
        prepared: PreparedTables,
        removed: Chosen | None = None,
        added: Added | None = None,
        cause: str = "",
    ) -> None:
        """Prepares a change. `cause` is the counter of `stats` that counts the removed ids.

        Without counts of the new ids, outside of training, the counters of waiting ids are dropped, too.
        """
        self.rows = RowChange(tables, len(prepared.tables), prepared.get(), removed, added)
        self._cause = cause
        self._tables = {t: tables[t] for t in sorted({*self.rows.lost, *self.rows.sizes})}
        logs = {t: log for t in self.rows.lost if (log := tables[t].change_log) is not None}
        own = parts_of(self.rows.removed.ids, self.rows.removed.sizes) if logs else {}
        self._logged = {}
        for t, log in logs.items():
            log.touch(own[t], self.rows.lost[t])
            self._logged[t] = log, log.with_removed(own[t], self.rows.lost[t])
        self._prepared, self._is_placed = prepared, not (self.rows.sizes and prepared.has_caches)
        self._prepare_added(added)

    def _prepare_added(self, added: Added | None) -> None:
        self._drops: list[RowChange] = []
        # New ids and rows, by table, of those tables to which they matter beyond the op.
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        if added is None:
            return
        drops = added.counts is None
        special = [t for t in self.rows.sizes if _is_special(self._tables[t], drops)]
        if not special:
            return
        ids_of, rows_of = (
            parts_of(part, self.rows.sizes) for part in (added.ids, self.rows.new_rows)
        )
        self._parts = {t: (ids_of[t], rows_of[t]) for t in special}
        for t in special if drops else ():
            waiting = self._tables[t].waiting
            if waiting is not None:
                self._drops.append(waiting.removal(ids_of[t]))

    def place(self, are_of_batch: bool, loads: bool = False) -> None:
        """Finds where the initial rows are written, for a commit before any other call on the tables.

        Rows of a batch get frames of caches. If the step removes ids they are loaded (`loads`): without a
        commit these ids get their rows back.
        """
        if self._is_placed:
            return
        rows = self.rows.numbers()
        offsets = offsets_of(self.rows.sizes, len(self._prepared.tables))
        if are_of_batch:
            self._prepared.cache_rows(rows, offsets, is_new=True, loads=loads)
        self.rows.initial_places = self._prepared.places(rows, offsets)
        self._is_placed = True

    def commit(self) -> None:
        """Removes the ids and frees their rows; writes the new rows and gives them to their ids."""
        self.rows.handle = self._prepared.get()
        self.place(are_of_batch=False)
        self.rows.write()
        self.note()

    def note(self) -> None:
        """Does what the ops leave, in the commit."""
        self.rows.note()
        for drop in self._drops:
            drop.commit()
        for log, removed in self._logged.values():
            log.removed = removed
        for t, (ids, rows) in self._parts.items():
            table = self._tables[t]
            if table.optimizer.own is not None:  # whose states the op does not know
                for store, number in zip(table.states, table.optimizer.initial_states, strict=True):
                    store.fill(rows, number)
            if (own := table.change_log) is not None:
                own.add(ids, rows, table.id_map)
        for t, table in self._tables.items():
            if size := self.rows.sizes.get(t, 0):
                table.own = table.own._replace(edits=table.own.edits + 1)
                table.counters["inserted"] += size
            if t in self.rows.lost:
                table.counters[self._cause] += self.rows.removed.sizes[t]

    def undo(self) -> Callable[[], None]:
        """Returns a call that undoes a commit that comes next, or a part of it; nothing is added."""
        bring_back, cause = self.rows.undo(), self._cause
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


def _is_special(table: TableArrays, drops_counters: bool) -> bool:
    """Returns True if new rows of a table have states of a rule in Python, are logged, or ids may wait."""
    if table.optimizer.own is not None or table.change_log is not None:
        return True
    return drops_counters and table.waiting is not None


def removal_of(table: TableArrays, ids: Tensor, rows: Tensor, cause: str) -> TableChange:
    """Returns the removal of ids [M] int64 of one table, which have rows [M] int64. As `TableChange`."""
    removed = Chosen(ids, rows, {0: ids.numel()})
    return TableChange({0: table}, PreparedTables([table]), removed, cause=cause)


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
