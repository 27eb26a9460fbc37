"""The open forwards of a table: forwards whose backward has not run yet and whose graph still exists.

Every forward that will have a backward is open at its group, and each table of the group includes the group's
open forwards. It is closed when its backward has run or its graph is dropped. Until then its rows are not
reused (row_numbers.py).
"""

from __future__ import annotations

import itertools
import weakref

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
    """The open forwards of a group or of one table; a table includes those of all its groups.

    Attributes:
        forwards: the open forwards by number; a later forward has a higher number. An object that no longer
            exists is closed, although its `__del__` may have been interrupted (Ctrl-C).
    """

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
            one for opened in (self, *self._groups) for one in opened.forwards.copy().items()
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
