"""CanonicalRows: reads the ids and rows of an id map in canonical order, one stretch at a time.

Canonical order is the unsigned order of the mixed ids, and tables are saved in it; rows are numbered in
the order in which their ids were first seen. To avoid a permutation of the whole table, the map is scanned
once for each window of mixed ids. A window is kept for other readers of the map.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cached_property
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.storage.id_map import IdMap, canonical_keys

# A window is found by one scan of the slots and kept for the next tensor: 16 bytes a row.
_WINDOW_ROWS = 2 << 20
_WINDOW_BITS = 12
_WORD_BITS = 64
# A large table is scanned four times: else the time of its scans would grow with the square of its rows.
_MOST_SCANS = 4
# A map with the ids of less than one in so many rows is sorted by row: in less time than a list of all takes.
_SPARSE, _LEAST_SORTED = 8, 512


class _Window(NamedTuple):
    begin: int
    ids: Tensor
    rows: Tensor


class _Scans:
    """What scans of a map have found, shared by the readers of one moment: one scan serves all tensors."""

    def __init__(self, id_map: IdMap, stamped: Any) -> None:
        self._map, self.stamped = id_map, stamped
        self.windows: list[_Window] = []

    @cached_property
    def begins(self) -> list[int]:
        """The place of the first id of each cell, and the number of ids."""
        counts = ops.count_cells(*self._map.arrays(), _WINDOW_BITS).cpu()
        return [0, *counts.cumsum(0).tolist()]

    def keep(self, window: _Window) -> None:
        """Keeps a window, and drops the oldest if those of all maps together have too many rows."""
        with _lock:
            self.windows = [*self.windows, window]
            held = [(owner, rows) for owner, rows in _kept if owner() is not None]
            _kept[:] = [*held, (weakref.ref(self), window.ids.numel())]
            while len(_kept) > 1 and sum(rows for _, rows in _kept) > knobs.KEPT_ROWS:
                oldest = _kept.pop(0)[0]()
                if oldest is not None:
                    oldest.windows = oldest.windows[1:]


_lock = threading.RLock()  # a writer may read chunks on all its threads
_kept: list[tuple[weakref.ref[_Scans], int]] = []  # the owners and rows of all scans, oldest first
# By the number of the map's object, which the scans keep alive.
_scans: weakref.WeakValueDictionary[int, _Scans] = weakref.WeakValueDictionary()


def signed(word: int) -> int:
    """Returns the int64 with the bits of an unsigned word."""
    return word - (1 << _WORD_BITS) if word >> (_WORD_BITS - 1) else word


def unsigned(number: int) -> int:
    """Returns a number modulo 2^64; for an int64 this is the unsigned word with the same bits."""
    return number % (1 << _WORD_BITS)


class CanonicalRows:
    """The contents of one map in canonical order; RuntimeError once `stamp` returns another value."""

    def __init__(self, id_map: IdMap, where: str, stamp: Callable[[], Any]) -> None:
        ops.raise_errors(id_map.slots)
        self._map = id_map
        self._where = where
        self._stamp = stamp
        self._stamped = stamp()
        self.count = id_map.num_ids
        scans = _scans.get(id(id_map))
        if scans is None or scans.stamped is None or scans.stamped != self._stamped:
            scans = _scans[id(id_map)] = _Scans(id_map, self._stamped)
        self._scans = scans

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

    def by_row(self, rows: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields all ids and rows, ascending by row, up to `most`; the next piece overwrites the rows."""
        self.check_unchanged()
        if rows > _SPARSE * max(self.count, _LEAST_SORTED):
            yield from self._few_by_row(most)
            return
        step = 1 << max(1, most).bit_length() - 1
        places = torch.arange(min(rows, step), device=self._map.slots.device)
        numbers = torch.empty_like(places)
        at_once = knobs.ROWS_SCANNED * max(1, -(-rows // (_MOST_SCANS * knobs.ROWS_SCANNED)))
        for first in range(0, rows, at_once):
            last = min(rows, first + at_once)
            ids, has_id = ops.ids_of_rows(*self._map.arrays(), first, last)
            is_full = bool(has_id.all())
            for here, used in zip(ids.split(step), has_id.split(step), strict=True):
                own = numbers[: len(here)]
                torch.add(places[: len(here)], first, out=own)
                first += len(here)
                if not (is_full or used.all()):
                    here, own = here[used], own[used]
                yield here, own

    def _few_by_row(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`by_row` of a map with the ids of few of the rows: sorts these, and does not list all rows."""
        ids, rows = (torch.cat(parts) for parts in zip(*self._map.pieces(), strict=True))
        rows, order = rows.sort()
        for part, numbers in zip(ids[order].split(most), rows.split(most), strict=True):
            if numbers.numel():
                yield part, numbers

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the table has changed since this object was made."""
        if self._stamp() != self._stamped:
            raise RuntimeError(
                f"{self._where}: expected the table as it was when its state dict was made, got a table that "
                "was trained or changed since. Rows are read when they are saved: save first, or keep "
                "copy.deepcopy(state_dict)."
            )

    def _window_at(self, place: int) -> _Window:
        begins = self._scans.begins
        first = bisect_right(begins, place) - 1
        for window in self._scans.windows:
            if 0 <= place - window.begin < window.ids.numel():
                return window
        last = max(first + 1, bisect_right(begins, begins[first] + _WINDOW_ROWS) - 1)
        width = _WORD_BITS - _WINDOW_BITS
        low, high = signed(first << width), signed((last << width) - 1)
        window = _Window(begins[first], *ops.ids_between(*self._map.arrays(), low, high))
        self._scans.keep(window)
        return window


def first_place(read: Callable[[int, int], Tensor], count: int, mixed: int) -> int:
    """Returns the first place from which on mixed ids are at least `mixed`, unsigned.

    `read` returns the ids at the places [first, last) of `count` in canonical order: single ids, until few
    are left.
    """
    if not 0 < mixed < 1 << _WORD_BITS:
        return 0 if mixed <= 0 else count
    low, high, key = 0, count, mixed - (1 << _WORD_BITS - 1)  # as canonical_keys has it
    # Mixed ids are spread evenly: the search begins near its end.
    expected, reach = mixed * count >> _WORD_BITS, 4 * isqrt(count)
    near: Iterator[int] = iter((expected - reach, expected + reach))
    while high - low > knobs.IDS_READ_TOGETHER:
        middle = next(near, (low + high) // 2)
        if not low <= middle < high:
            continue
        if int(canonical_keys(read(middle, middle + 1))) < key:
            low = middle + 1
        else:
            high = middle
    return low + int((canonical_keys(read(low, high)) < key).sum()) if low < high else low
