"""CanonicalRows: reads the ids and rows of an id map in canonical order, one stretch at a time.

Canonical order is the unsigned order of the mixed ids, and tables are saved in it; rows are numbered in
the order in which their ids were first seen. To avoid a permutation of the whole table, the map is scanned
once for each window of mixed ids. What a scan of the slots has found is kept for other readers of the map.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.storage.id_map import IdMap

# A window is found by one scan of the slots and kept for the next tensor: 16 bytes a row.
_WINDOW_ROWS = 2 << 20
_KEPT_ROWS = 4 << 20  # in windows and lists of all tables together
_WINDOW_BITS = 12
_WORD_BITS = 64
# A map with the ids of less than one in so many rows is sorted by row: in less time than a list of all takes.
_SPARSE, _LEAST_SORTED = 8, 512


class _Window(NamedTuple):
    begin: int
    ids: Tensor
    rows: Tensor


class _Listed(NamedTuple):
    first: int
    ids: Tensor  # of the rows from `first` on
    has_id: Tensor


class _Cells:
    """The places at which the cells of a map begin, shared by its readers while the map's stamp stays."""

    def __init__(self, id_map: IdMap, stamped: Any) -> None:
        self._map = id_map
        self.stamped = stamped

    @cached_property
    def begins(self) -> list[int]:
        """The place of the first id of each cell, and the number of ids."""
        counts = ops.count_cells(*self._map.arrays(), _WINDOW_BITS).cpu()
        return [0, *counts.cumsum(0).tolist()]


# By the number of the map's object, which the cells keep alive.
_cells: weakref.WeakValueDictionary[int, _Cells] = weakref.WeakValueDictionary()


def _cells_of(id_map: IdMap, stamped: Any) -> _Cells:
    cells = _cells.get(id(id_map))
    if cells is None or cells.stamped is None or cells.stamped != stamped:
        cells = _cells[id(id_map)] = _Cells(id_map, stamped)
    return cells


def signed(word: int) -> int:
    """Returns the int64 with the bits of an unsigned word."""
    return word - (1 << _WORD_BITS) if word >> (_WORD_BITS - 1) else word


def unsigned(number: int) -> int:
    """Returns a number modulo 2^64; for an int64 this is the unsigned word with the same bits."""
    return number % (1 << _WORD_BITS)


class CanonicalRows:
    """The contents of one map in canonical order, valid until the map changes.

    `read`, `stretches` and `by_row` raise RuntimeError if the table has changed since.

    `stamp` returns a value that changes whenever the table changes.
    """

    def __init__(self, id_map: IdMap, where: str, stamp: Callable[[], Any]) -> None:
        ops.raise_errors(id_map.slots)
        _kept.enter(self, id_map)
        self._map = id_map
        self._where = where
        self._stamp = stamp
        self._stamped = stamp()
        self.count = id_map.num_ids
        self._cells = _cells_of(id_map, self._stamped)

    def from_mixed(self, first: int) -> Tensor:
        """Returns the ids whose mixed id is at least `first`, unsigned, in canonical order, [M] int64."""
        return ops.ids_between(*self._map.arrays(), signed(first), -1)[0]

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Returns the ids and rows at the places [start, stop) of the canonical order, int64 each."""
        self.check_unchanged()
        ids, rows = [], []
        while start < stop:
            window = self._window_at(start)
            inside = slice(start - window.begin, stop - window.begin)
            ids.append(window.ids[inside])
            rows.append(window.rows[inside])
            if not ids[-1].numel():
                raise RuntimeError(
                    f"torchrec_dyn bug: {self._where} has fewer ids than were counted."
                )
            start += ids[-1].numel()
        if len(ids) == 1:
            return ids[0], rows[0]
        nothing = torch.empty(0, dtype=torch.int64, device=self._map.slots.device)
        return torch.cat([nothing, *ids]), torch.cat([nothing, *rows])

    def stretches(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields all ids and rows, at most `most` at a time."""
        for start in range(0, self.count, most):
            yield self.read(start, min(self.count, start + most))

    def by_row(self, rows: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields all ids and rows, ascending by row, at most `most` at a time.

        `rows` is the number of rows of the table, with those that have no id. Only few of many are sorted.
        """
        self.check_unchanged()
        if rows > _SPARSE * max(self.count, _LEAST_SORTED):
            yield from self._few_by_row(most)
            return
        left = self.count
        for ids, numbers in self._map.by_row(rows, most, self._listed):
            left -= ids.numel()
            yield ids, numbers
        if left:
            raise RuntimeError(
                f"torchrec_dyn bug: {self._where} has ids of rows that it does not have."
            )

    def _few_by_row(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`by_row` of a map with the ids of few of the rows: sorts these, and does not list all rows."""
        ids, rows = (torch.cat(parts) for parts in zip(*self._map.pieces(), strict=True))
        rows, order = rows.sort()
        for some, numbers in zip(ids[order].split(most), rows.split(most), strict=True):
            if numbers.numel():
                yield some, numbers

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the table has changed since this object was made."""
        if self._stamp() != self._stamped:
            raise RuntimeError(
                f"{self._where}: expected the table as it was when its state dict was made, got a table that "
                "was trained or changed since. Rows are read when they are saved: save first, or keep "
                "copy.deepcopy(state_dict)."
            )

    def _listed(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        for listed in _kept.of(self._map, self._stamped, _Listed):
            if listed.first == first and len(listed.ids) == last - first:
                return listed.ids, listed.has_id
        listed = _Listed(first, *self._map.ids_of_rows(first, last))
        # In a larger map the first rows would be dropped before they are listed again.
        if self.count <= _KEPT_ROWS:
            _kept.keep(self._map, self._stamped, listed)
        return listed.ids, listed.has_id

    def _window_at(self, place: int) -> _Window:
        begins = self._cells.begins
        first = bisect_right(begins, place) - 1
        for window in _kept.of(self._map, self._stamped, _Window):
            if window.begin <= place < window.begin + window.ids.numel():
                return window
        last = max(first + 1, bisect_right(begins, begins[first] + _WINDOW_ROWS) - 1)
        width = _WORD_BITS - _WINDOW_BITS
        ids, rows = ops.ids_between(
            *self._map.arrays(), signed(first << width), signed((last << width) - 1)
        )
        window = _Window(begins[first], ids, rows)
        _kept.keep(self._map, self._stamped, window)
        return window


_Scan = TypeVar("_Scan", _Window, _Listed)


class _Held(NamedTuple):
    map: weakref.ref[IdMap]
    readers: set[object]
    scans: list[tuple[Any, _Window | _Listed]]  # stamps and scans, oldest first


class _KeptScans:
    """Windows and lists of the maps that are being read: one scan of a map serves all tensors of a table.

    Calls are safe on several threads: a writer may read chunks on all its threads.
    """

    def __init__(self) -> None:
        # Reentrant: garbage collection may call `_leave` on a thread that holds the lock.
        self._lock = threading.RLock()
        # By the number of the map's object. An interrupt in `_leave` leaves an entry of a map that is gone
        # later, and another map may get its number.
        self._held: dict[int, _Held] = {}
        self._order: deque[tuple[int, int]] = deque()  # map and rows of all scans, oldest first

    @property
    def _rows(self) -> int:
        """The rows of all scans. Not a number of its own: an interrupt in `keep` would leave it wrong."""
        return sum(rows for _, rows in self._order)

    def enter(self, reader: object, id_map: IdMap) -> None:
        """Keeps scans of the map as long as a reader of it lives."""
        key, token = id(id_map), object()
        # First: an interrupt in between leaves no reader behind.
        weakref.finalize(reader, self._leave, key, token)
        with self._lock:
            if key in self._held and self._held[key].map() is not id_map:
                self._drop(key)
            self._held.setdefault(key, _Held(weakref.ref(id_map), set(), [])).readers.add(token)

    def _leave(self, key: int, token: object) -> None:
        """Drops the scans of a map after its last reader."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return
            held.readers.discard(token)
            if not held.readers:
                self._drop(key)

    def _drop(self, key: int) -> None:
        self._order = deque(other for other in self._order if other[0] != key)
        del self._held[key]

    def of(self, id_map: IdMap, stamp: Any, kind: type[_Scan]) -> list[_Scan]:
        """Returns the scans of one kind of a map with this stamp."""
        with self._lock:
            scans = list(self._held[id(id_map)].scans)
        return [scan for at, scan in scans if isinstance(scan, kind) and at == stamp]

    def keep(self, id_map: IdMap, stamp: Any, scan: _Window | _Listed) -> None:
        """Keeps a scan, and drops the oldest scans if all together have too many rows."""
        with self._lock:
            self._held[id(id_map)].scans.append((stamp, scan))
            self._order.append((id(id_map), scan.ids.numel()))
            while len(self._order) > 1 and self._rows > _KEPT_ROWS:
                self._held[self._order.popleft()[0]].scans.pop(0)


_kept = _KeptScans()
