"""TouchedRows: the rows of a CPU's table touched since a version, and the content sums of all other rows.

A row is touched before it is written, scored, removed or given to an id: its bit is set, its id is listed,
and what it adds to the sums of the other rows is subtracted. So the sums of the whole table are those of the
rows not touched, plus the present sums of the listed ids that have a row: a few rows are read, not the table.
To touch a row that does not change after all is no error.

What an exception or an interrupt leaves in doubt is found again in another way, by a pass over the table: ids
that are not listed by their bits, sums by all rows.

Legend: T tables, N rows in table order, M ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.storage.canonical_rows import unsigned
from torchrec_dyn.storage.host_reads import host_numbers
from torchrec_dyn.storage.id_map import IdMap
from torchrec_dyn.storage.row_marks import (
    block_shift_of,
    clear_bits,
    flags_of,
    list_bits,
)

# Returns the content sums, by tensor, of ids [M] int64, which have rows [M] int64.
SumRows = Callable[[Tensor, Tensor], Mapping[str, int]]

_CPU = torch.device("cpu")
_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")


class Rest(NamedTuple):
    """The content sums, by tensor, of the rows not touched since version `at`; `sum_rows` sums rows."""

    at: int
    sums: Mapping[str, int]
    sum_rows: SumRows


class _Touched(NamedTuple):
    """Ids [M] int64 that were touched after version `at` and before the next version in use."""

    at: int
    ids: Tensor


def _set_bits(bits: list[Tensor], shift: int, rows: Tensor) -> None:
    ops.mark_new_(rows, host_numbers([0, rows.numel()]), *list_bits([(bits, shift)]))


class TouchedRows:
    """The touched rows of one table, or of one column shard of it.

    Attributes:
        bits: for each block of rows its bits, [2^(shift - 3)] uint8 (csrc/storage/row_marks.h): of those
        touched
            since the latest version, `number`, and of those withheld at it, of which nothing is in the sums.
        rest: the sums of the other rows; None if they are not known.
    """

    def __init__(self, row_limit: int, versions: Collection[Any]) -> None:
        self.shift = block_shift_of(row_limit, "cpu")
        self.bits: list[Tensor] = []
        self.number = 0
        self.rest: Rest | None = None
        self._versions = versions
        self._pieces: list[_Touched] = []
        self._is_listed = True  # False: ids of set bits may be missing in the list

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows."""
        while self.capacity < rows:
            self.bits.append(clear_bits(self.shift, _CPU))

    @property
    def capacity(self) -> int:
        """Rows that have a bit."""
        return len(self.bits) << self.shift

    @property
    def bytes(self) -> int:
        """Bytes of the bits and of the listed ids."""
        return sum(block.nbytes for block in self.bits) + 8 * self._count

    @property
    def _count(self) -> int:
        return sum(piece.ids.numel() for piece in self._pieces)

    def begin(self, number: int, withheld: Tensor, id_map: IdMap) -> None:
        """Begins a version; withheld [M] int64 are rows without an id that a late gradient may write."""
        self._complete(id_map)
        self._compact(id_map)
        bits = [clear_bits(self.shift, _CPU) for _ in self.bits]
        if withheld.numel():
            _set_bits(bits, self.shift, withheld)
        # Together: a row whose id is listed for this version has its bit, else it would be subtracted twice.
        self.bits, self.number = bits, number

    def add(self, ids: Tensor, rows: Tensor, id_map: IdMap) -> None:
        """Records that rows [M] int64 were given to ids [M] int64, whatever the bits of the rows."""
        self._compact(id_map)
        _set_bits(self.bits, self.shift, rows)
        self._list(ids)

    def touch(self, ids: Tensor, rows: Tensor) -> None:
        """Touches rows [M] int64 of ids [M] int64."""
        touch_rows([self], ids, rows, host_numbers([0, rows.numel()]))

    def touch_all(self) -> None:
        """Touches all rows; the sums are not known then."""
        self.doubt()
        for block in self.bits:
            block.fill_(255)
        self._pieces = []  # every id is listed by its bit, at the latest version

    def doubt(self) -> None:
        """Notes that an exception came between parts of a record. The bits are right: they are set first."""
        self._is_listed, self.rest = False, None

    def changed(self, since: int, id_map: IdMap) -> tuple[Tensor, Tensor]:
        """Returns the ids touched since a version in use that have a row, and the rows, [M] int64 each."""
        self._complete(id_map)
        return id_map.find(self._ids(since))

    def sums(self, id_map: IdMap) -> dict[str, int] | None:
        """Returns the present content sums of all rows, by tensor; None if the rest is not known."""
        rest = self.rest
        if rest is None:
            return None
        now, earlier = self._ids(self.number), self._ids(rest.at, self.number)
        earlier = earlier[~torch.isin(earlier, now, assume_unique=True)]
        kept = _added(rest.sums, rest.sum_rows(*id_map.find(earlier)))
        self.rest = rest._replace(at=self.number, sums=kept)
        return _added(kept, rest.sum_rows(*id_map.find(now)))

    def keep(self, sums: Mapping[str, int], sum_rows: SumRows, id_map: IdMap) -> None:
        """Keeps the present sums of all rows, which are found by a pass over the table."""
        self._complete(id_map)
        now = sum_rows(*id_map.find(self._ids(self.number)))
        self.rest = Rest(self.number, _added(sums, now, -1), sum_rows)

    def list_touched(self, ids: Tensor, rows: Tensor) -> None:
        """Lists ids [M] int64 whose rows [M] int64 had clear bits, for `touch_rows`."""
        rest = self.rest
        if rest is not None:
            # After a version without sums, rows that were touched before it are in doubt.
            self.rest = None
            if rest.at == self.number:
                sums = _added(rest.sums, rest.sum_rows(ids, rows), -1)
                self.rest = rest._replace(sums=sums)
        self._list(ids)

    def _list(self, ids: Tensor) -> None:
        """Appends ids. Joins pieces: many steps touch a few rows each."""
        needed = self._needed
        pieces = [piece for piece in self._pieces if piece.at >= min(needed)]
        if ids.numel():
            pieces.append(_Touched(self.number, ids))
        while len(pieces) > 1:
            first, last = pieces[-2:]
            if any(first.at < number <= last.at for number in needed):
                break  # a version in use lies between them
            if first.ids.numel() > 2 * last.ids.numel():
                break
            pieces[-2:] = [last._replace(ids=torch.cat([first.ids, last.ids]))]
        self._pieces = pieces

    @property
    def _needed(self) -> set[int]:
        """The numbers of the versions since which touched rows are asked for."""
        known = {self.number} if self.rest is None else {self.number, self.rest.at}
        return known | {version.number for version in self._versions}

    def _ids(self, since: int, before: int | None = None) -> Tensor:
        """Returns the ids listed since a version, and before a later one, each once."""
        ids = [
            piece.ids
            for piece in self._pieces
            if piece.at >= since and (before is None or piece.at < before)
        ]
        return torch.unique(torch.cat([_NO_IDS, *ids]))

    def _compact(self, id_map: IdMap) -> None:
        """Drops repeated and removed ids if there are many."""
        if self._count <= max(knobs.LEAST_COMPACTED_IDS, 2 * id_map.num_ids):
            return
        ids = torch.cat([piece.ids for piece in self._pieces])
        sizes = [piece.ids.numel() for piece in self._pieces]
        numbers = host_numbers([piece.at for piece in self._pieces])
        at = numbers.repeat_interleave(host_numbers(sizes))
        once, places = torch.unique(ids, return_inverse=True)
        latest = torch.zeros_like(once).scatter_reduce_(0, places, at, "amax")
        has_row = id_map.lookup(once) >= 0
        self._pieces = [
            _Touched(number, once[has_row & (latest == number)])
            for number in sorted({piece.at for piece in self._pieces})
        ]

    def _complete(self, id_map: IdMap) -> None:
        """Lists the ids of set bits, if some may be missing in the list."""
        if self._is_listed:
            return
        self._list(_ids_at(torch.cat([_NO_IDS.bool(), *map(flags_of, self.bits)]), id_map)[0])
        self._is_listed = True


def touch_rows(
    tables: Sequence[TouchedRows | None],
    ids: Tensor | Sequence[IdMap],
    rows: Tensor,
    table_offsets: Tensor,
) -> None:
    """Touches rows [N] int64 in table order, -1 is skipped, before they are written; None records nothing.

    ids [N] int64 of the rows, or the map of each table, which is read whole to find them;
    table_offsets [T + 1] int64. Rows of removed ids may be among them.
    """
    listed = list_bits([None if table is None else (table.bits, table.shift) for table in tables])
    try:
        places, begins = ops.mark_new_(rows, table_offsets, *listed)
        if not places.numel():
            return
        bounds = begins.tolist()
        for t, table in enumerate(tables):
            own = places[bounds[t] : bounds[t + 1]]
            if table is None or not own.numel():
                continue
            if isinstance(ids, Tensor):
                table.list_touched(ids[own], rows[own])
            else:
                table.list_touched(*_ids_of(rows[own], ids[t], table.capacity))
    except BaseException:
        for table in filter(None, tables):
            table.doubt()
        raise


def _ids_of(rows: Tensor, id_map: IdMap, capacity: int) -> tuple[Tensor, Tensor]:
    """Returns the ids of rows [M] int64 below `capacity`, and their rows, in the order of the map."""
    is_asked = torch.zeros(capacity, dtype=torch.bool, device="cpu")
    is_asked[rows] = True
    return _ids_at(is_asked, id_map)


def _ids_at(is_asked: Tensor, id_map: IdMap) -> tuple[Tensor, Tensor]:
    """Returns the ids whose rows are asked for, by row [capacity] bool, and their rows."""
    parts: list[tuple[Tensor, Tensor]] = []
    for ids, rows in id_map.pieces():
        is_found = is_asked[rows]
        parts.append((ids[is_found], rows[is_found]))
    all_ids, all_rows = zip(*parts, strict=True)
    return torch.cat(all_ids), torch.cat(all_rows)


def _added(sums: Mapping[str, int], others: Mapping[str, int], sign: int = 1) -> dict[str, int]:
    names = dict.fromkeys([*sums, *others])
    return {name: unsigned(sums.get(name, 0) + sign * others.get(name, 0)) for name in names}
