"""RowNumbers: the free rows of a table, and the rows withheld from reuse while a forward may hold them.

A row that a forward has read must not be given to another id before that forward's backward has run or
its graph has been dropped (pipelines run lookup i + 1 before backward i). So the row of a removed id is
withheld until all forwards opened before the removal are closed.

Every forward that will have a backward is open at its group, and each table of the group includes the group's
open forwards. It is closed when its backward has run or its graph is dropped.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.storage.host_reads import keep_in_use

_numbers = itertools.count(1)  # of all forwards of this process


class OpenForward:
    """One open forward. Only its autograd graph holds it: dropping the graph closes the forward."""

    # Defaults if `__init__` was interrupted: such an object, too, is closed when it is dropped.
    number = 0
    _opened: OpenForwards | None = None

    def __init__(self, opened: OpenForwards) -> None:
        self.number = next(_numbers)
        self._opened = opened
        opened.forwards[self.number] = weakref.ref(self)

    def close(self) -> None:
        """Closes the forward; a second call changes nothing."""
        if self._opened is not None:
            self._opened.forwards.pop(self.number, None)

    __del__ = close


class OpenForwards:
    """The open forwards, by number, of a group or of one table; a table includes those of all its groups."""

    def __init__(self) -> None:
        self.forwards: dict[int, weakref.ref[OpenForward]] = {}
        # Weak: each open forward holds its group, so a group that nobody holds has none.
        self._groups: weakref.WeakSet[OpenForwards] = weakref.WeakSet()

    def include(self, group: OpenForwards) -> None:
        """Includes the open forwards of a group, from now on and those that are open already."""
        self._groups.add(group)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the open forwards."""
        forwards = [
            forward
            for opened in (self, *self._groups)
            for forward in opened.forwards.copy().items()
        ]
        return [number for number, forward in forwards if forward() is not None]

    @property
    def latest(self) -> int:
        """The highest number of an open forward, 0 if none is open."""
        return max(self.numbers, default=0)

    def all_closed_up_to(self, number: int) -> bool:
        """Returns True if every forward up to this number is closed."""
        return number < min(self.numbers, default=number + 1)

    def __len__(self) -> int:
        return len(self.numbers)


class Allocation(NamedTuple):
    """Rows to hand out: parts `reused` [M] int64, then those from `first` on; and what is free afterwards."""

    reused: list[Tensor]
    num_reused: int
    first: int
    high_water_mark: int
    free: list[Tensor]
    num_free: int
    withheld: list[tuple[int, Tensor]]


class RowNumbers:
    """The row numbers of a table, handed out in the order 0, 1, 2, ..., freed rows first.

    All counts are numbers of the host, so that nothing here waits for a GPU. `high_water_mark` is the number
    of rows ever handed out; every row below it is in use, free or withheld.
    """

    def __init__(self, forwards: OpenForwards, device: torch.device) -> None:
        self.high_water_mark = 0
        self._device = device
        self._nothing = torch.empty(0, dtype=torch.int64, device=device)
        self.forwards = forwards
        self._free: list[Tensor] = []  # each tensor: rows that were freed together
        self.num_free = 0
        self.withheld_parts: list[tuple[int, Tensor]] = []

    def prepare(self, count: int, removed: Tensor | None = None) -> Allocation:
        """Returns `count` distinct rows to hand out, once ids have lost the rows `removed` [M] int64.

        These are reused as soon as no open forward can hold them. Nothing changes before the commit.
        """
        self._release()
        free, num_free, withheld = self._free, self.num_free, self.withheld_parts
        if removed is not None and removed.numel():
            if latest := self.forwards.latest:
                withheld = [*withheld, (latest, removed)]
            else:
                free, num_free = [*free, removed], num_free + removed.numel()
        num_reused = left = min(count, num_free)
        reused: list[Tensor] = []
        rest: list[Tensor] = []
        whole = len(free)
        while left:
            whole -= 1
            part = free[whole]
            keep_in_use(part)  # another stream may have freed these rows
            if part.numel() > left:
                part, remaining = part[:left], part[left:]
                rest = [remaining]
            reused.append(part)
            left -= part.numel()
        first, high = self.high_water_mark, self.high_water_mark + count - num_reused
        free, num_free = [*free[:whole], *rest], num_free - num_reused
        return Allocation(reused[::-1], num_reused, first, high, free, num_free, withheld)

    def commit(self, allocation: Allocation) -> None:
        """Hands out the rows that were just prepared, and takes back the removed ones."""
        self.high_water_mark, self._free = allocation.high_water_mark, allocation.free
        self.num_free, self.withheld_parts = allocation.num_free, allocation.withheld

    def highest_after(self, count: int) -> int:
        """Returns the value that `high_water_mark` would have after `count` more rows."""
        self._release()
        return self.high_water_mark + max(0, count - self.num_free)

    def undo(self) -> Callable[[], None]:
        """Returns a call that brings the present state back."""
        state = self.high_water_mark, self.num_free, self._free, self.withheld_parts

        def restore() -> None:
            self.high_water_mark, self.num_free, self._free, self.withheld_parts = state

        return restore

    def withheld(self) -> Tensor:
        """Returns the withheld rows, [M] int64."""
        self._release()
        keep_in_use(*(rows for _, rows in self.withheld_parts))  # as in `prepare`
        return torch.cat([self._nothing, *(rows for _, rows in self.withheld_parts)])

    def _release(self) -> None:
        free: list[Tensor] = []
        withheld: list[tuple[int, Tensor]] = []
        for latest, rows in self.withheld_parts:
            if self.forwards.all_closed_up_to(latest):
                free.append(rows)
            else:
                withheld.append((latest, rows))
        if free:
            count = self.num_free + sum(rows.numel() for rows in free)
            self._free, self.num_free, self.withheld_parts = self._free + free, count, withheld
