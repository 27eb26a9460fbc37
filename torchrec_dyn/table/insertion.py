"""Finds the rows of ids, inserts unseen ids into all tables of a lookup or into none, and removes ids.

Legend: T tables, N ids, M distinct unseen ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.storage import (
    Allocation,
    HostRead,
    MapList,
    change,
    host_numbers,
    insert_all,
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
    return rows, absent if ids.is_cpu else read(read_absent(absent, ids))


def read_absent(absent: Tensor, ids: Tensor) -> HostRead[Tensor]:
    """Returns absent [T] int64 of `ops.lookup`, with its ids [N], on the CPU.

    Raises the error that the sign of a GPU's numbers marks.
    """
    if absent.is_cpu:
        return absent
    numbers = yield [absent]
    if min(numbers, default=0) < 0:
        ops.raise_errors(ids)  # if another thread has raised the error, nothing is raised
        numbers = [number & _COUNT_BITS for number in numbers]
    return host_numbers(numbers)


def ranges_of(new_offsets: Tensor) -> dict[int, slice]:
    """Returns the range of each table's new ids of `ops.collect_new`, by number of the table; none is empty.

    new_offsets [T + 1] int64: where the new ids of each table begin.
    """
    bounds = enumerate(pairwise(new_offsets.tolist()))
    return {t: slice(begin, end) for t, (begin, end) in bounds if end > begin}


class Unseen(NamedTuple):
    """The absent ids of a lookup with their prepared rows.

    Attributes:
        additions: of the tables that insert.
        new_ids, new_index: as of `ops.collect_new`.
        ranges: of each table's new ids.
    """

    additions: Additions
    new_ids: Tensor
    new_index: Tensor
    ranges: dict[int, slice]

    def fill(self, rows: Tensor, new_rows: Mapping[int, Tensor] | None = None) -> None:
        """Writes the new rows into rows [N] int64 of the lookup, after the commit of the additions.

        new_rows: the rows of each table's new ids, -1 for one without; None if each has one.
        """
        if self.additions.of_tables:
            if new_rows is None:
                new_rows = {t: added.rows for t, added in self.additions.of_tables.items()}
            ops.fill_new_(rows, self.new_index, rows_of_new(self.new_ids, self.ranges, new_rows))


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
    ranges = ranges_of(new_offsets)
    fresh = {t: new_ids[range_of] for t, range_of in ranges.items() if t in tables}
    for t, ids_of_table in fresh.items():
        tables[t].check_room(ids_of_table.numel())
    for t, ids_of_table in fresh.items():
        tables[t].reserve(ids_of_table.numel())
    return Unseen(prepare_additions(tables, prepared, fresh), new_ids, new_index, ranges)


def rows_of_new(
    new_ids: Tensor, ranges: Mapping[int, slice], new_rows: Mapping[int, Tensor]
) -> Tensor:
    """Returns the rows of new ids, [M] int64; -1 for an id of a table without `new_rows`.

    new_ids [M] int64, table after table. ranges: as `ranges_of` returns them. new_rows: the rows of a table's
    new ids, by number of the table.
    """
    return _joined(
        [
            new_rows[t] if t in new_rows else torch.full_like(new_ids[range_of], -1)
            for t, range_of in ranges.items()
        ]
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns tensors one after the other; a single tensor is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Addition:
    """Fresh rows of new ids of one table; its parts are those of all tables, which `Additions` writes.

    ids [M] int64 are distinct and absent, rows [M] int64 theirs after the commit. counts [M] int64 are their
    occurrences, None outside training. In training the ids have no admission counters any more.
    """

    def __init__(
        self,
        table: TableArrays,
        ids: Tensor,
        rows: Tensor,
        allocation: Allocation,
        counts: Tensor | None,
    ) -> None:
        self.table = table
        self.ids = ids
        self.rows = rows
        self._allocation = allocation
        self._add_scores = None
        if table.life is not None:
            step = table.step if counts is None else table.next_step
            self._add_scores = table.life.prepare_rows(ids, rows, step, counts)

    def commit(self) -> None:
        """Gives the rows to the ids, but for the slots of the map."""
        table = self.table
        table.row_numbers.commit(self._allocation)
        if table.optimizer.own is not None:  # whose states the op does not know
            for store, number in zip(table.states, table.optimizer.initial_states, strict=True):
                store.fill(self.rows, number)
        if self._add_scores is not None:
            self._add_scores()
        log = table.change_log
        if log is not None:
            log.add(self.ids, self.rows, table.id_map)
        table.own = table.own._replace(edits=table.own.edits + 1)
        table.counters["inserted"] += self.ids.numel()


class Additions:
    """Prepared fresh rows of the new ids of several tables, by number of the table.

    Nothing is written before the commit: the rows may be those of ids that are removed in the same change,
    which an exception brings back.
    """

    def __init__(self, of_tables: Mapping[int, Addition], *init: Tensor) -> None:
        self.of_tables = of_tables
        self._init = init  # the arguments of `ops.init_new_rows_`

    def commit(self) -> None:
        """Writes the rows and gives them to their ids, in a commit of the tables."""
        if not self.of_tables:
            return
        rows, ids, *_ = self._init
        ops.init_new_rows_(*self._init)
        added = self.of_tables.values()
        for of_table in added:
            of_table.commit()
        maps = [of_table.table.id_map for of_table in added]
        insert_all(maps, [of_table.ids.numel() for of_table in added], ids, rows)


def prepare_additions(
    tables: Mapping[int, TableArrays],
    prepared: PreparedTables,
    ids: Mapping[int, Tensor],
    counts: Mapping[int, Tensor] = MappingProxyType({}),
) -> Additions:
    """Prepares fresh rows of new ids, by number of the table in `prepared`; room is reserved.

    ids [M] int64 of each table are distinct and absent. counts [M] int64 are their occurrences; none outside
    training.
    """
    if not ids:
        return Additions({})
    numbers, number = sorted(ids), len(prepared.tables)
    sizes, firsts, reused = [0] * number, [0] * number, [0] * number
    taken = {t: tables[t].row_numbers.prepare(ids[t].numel()) for t in numbers}
    for t, allocation in taken.items():
        sizes[t], firsts[t] = ids[t].numel(), allocation.first
        reused[t] = allocation.reused.numel()
    all_reused = _joined([taken[t].reused for t in numbers])
    new_ids = _joined([ids[t] for t in numbers])
    new_rows = torch.empty_like(new_ids)
    own = new_rows.split([sizes[t] for t in numbers])
    of_tables = {
        t: Addition(tables[t], ids[t], rows, taken[t], counts.get(t))
        for t, rows in zip(numbers, own, strict=True)
    }
    return Additions(
        of_tables,
        *(new_rows, new_ids, _offsets(sizes), host_numbers(firsts), all_reused, _offsets(reused)),
        prepared.get(),
    )


def _offsets(sizes: Sequence[int]) -> Tensor:
    return host_numbers([*accumulate(sizes, initial=0)])


class Removal:
    """A prepared removal of ids of one table; `prepare` makes it."""

    def __init__(self, table: TableArrays, ids: Tensor, rows: Tensor, cause: str) -> None:
        self._table = table
        self._ids = ids
        self._rows = rows
        self._cause = cause
        if table.life is not None:
            self._blank = table.life.scores.blank(rows)
        self._log = table.change_log
        self._logged = None if self._log is None else self._log.removed

    @classmethod
    def prepare(
        cls, table: TableArrays, ids: Tensor, rows: Tensor, cause: str
    ) -> HostRead[Removal]:
        """Prepares a removal and changes nothing, but that it may record the rows as changed.

        ids [M] int64 are distinct, rows [M] int64 are their rows. `cause` is the counter of `stats` that
        counts them.
        """
        removal = cls(table, ids, rows, cause)
        if removal._log is not None:
            removal._log.touch(ids, rows)
            removal._logged = yield from removal._log.with_removed(ids, rows)
        return removal

    def commit(self) -> None:
        """Removes the ids and frees their rows, which are reused as soon as no open forward can hold them."""
        table = self._table
        table.id_map.remove(self._ids)
        if self._log is not None and self._logged is not None:
            self._log.removed = self._logged
        if table.life is not None:
            table.life.forget_rows(self._rows, self._blank)
        table.row_numbers.free(self._rows)
        table.counters[self._cause] += self._rows.numel()

    def undo(self) -> Callable[[], None]:
        """Returns a call that undoes a commit that comes next, or a part of it."""
        table, log = self._table, self._log
        life, renumber = table.life, table.row_numbers.undo()
        removed = None if log is None else log.removed
        scores = None if life is None else life.scores.read(self._rows)
        counted = table.counters[self._cause]

        def restore() -> None:
            missing = (table.id_map.lookup(self._ids) < 0).nonzero().flatten()
            table.id_map.insert(self._ids[missing], self._rows[missing])
            if log is not None and removed is not None:
                log.removed = removed
            if life is not None and scores is not None:
                life.scores.write(self._rows, *scores)
                life.forget_listed()
            renumber()
            table.counters[self._cause] = counted

        return restore


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
