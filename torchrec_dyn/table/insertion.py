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
    IdMap,
    RowAddition,
    RowRemoval,
    change,
    host_numbers,
    joined,
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
        insertion.commit()
        additions.commit()


def prepare_unseen(
    tables: Mapping[int, TableArrays], prepared: PreparedTables, rows: Tensor, new: NewIds
) -> Additions:
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
    return Additions(tables, prepared, ids, sizes, fills=(rows, new.new_index, places))


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
        fills: tuple[Tensor, Tensor, Tensor | None] | None = None,
    ) -> None:
        """Prepares rows.

        ids [M] int64, table after table, `sizes` of each, are distinct and absent. counts [M] int64 are their
        occurrences; None outside of training, when the counters of waiting ids are dropped, too. `fills` as
        of `RowAddition`.
        """
        last_seen = {
            t: tables[t].first_seen(is_trained=counts is not None)
            for t, size in sizes.items()
            if size
        }
        self._added = RowAddition(
            tables, ids, sizes, last_seen, counts, len(prepared.tables), prepared.get(), fills
        )
        self._tables = {t: tables[t] for t in self._added.sizes}
        self._drops: list[RowRemoval] = []
        # New ids and rows, by table, of those tables to which they matter beyond the op.
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        special = [t for t, table in self._tables.items() if _is_special(table, counts is None)]
        if special:
            ids_of, rows_of = (parts_of(part, self._added.sizes) for part in (ids, self.rows))
            self._parts = {t: (ids_of[t], rows_of[t]) for t in special}
            if counts is None:
                self._drops = [
                    waiting.removal(ids_of[t])
                    for t, table in self._tables.items()
                    if (waiting := table.waiting) is not None
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
        for t, (ids, rows) in self._parts.items():
            table = self._tables[t]
            if table.optimizer.own is not None:  # whose states the op does not know
                for store, number in zip(table.states, table.optimizer.initial_states, strict=True):
                    store.fill(rows, number)
            log = table.change_log
            if log is not None:
                log.add(ids, rows, table.id_map)
        for t, size in self._added.sizes.items():
            table = self._tables[t]
            table.own = table.own._replace(edits=table.own.edits + 1)
            table.counters["inserted"] += size


def _is_special(table: TableArrays, drops_counters: bool) -> bool:
    """Returns True if new rows of a table have states of a rule in Python, are logged, or ids may wait."""
    if table.optimizer.own is not None or table.change_log is not None:
        return True
    return drops_counters and table.waiting is not None


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
