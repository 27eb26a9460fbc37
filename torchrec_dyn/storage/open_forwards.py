"""The open forwards of a table: forwards whose backward has not run yet and whose graph still exists.

Every forward that will have a backward opens a ticket with its group, whose open forwards each of its tables
includes. The ticket is closed when the backward has run or the graph is dropped. Until then the rows of the
forward are not reused (row_numbers.py).
"""

from __future__ import annotations

import itertools
import weakref

_numbers = itertools.count(1)  # of all forwards of this process


class OpenForward:
    """The ticket of one forward. Only the forward's graph holds it: dropping the graph closes the ticket."""

    # Defaults if `__init__` was interrupted: such a ticket, too, is closed when it is dropped.
    number = 0
    _opened: OpenForwards | None = None

    def __init__(self, opened: OpenForwards) -> None:
        self.number = next(_numbers)
        self._opened = opened
        opened.forwards[self.number] = weakref.ref(self)

    def close(self) -> None:
        """Closes the ticket; a second call changes nothing."""
        if self._opened is not None:
            self._opened.forwards.pop(self.number, None)

    __del__ = close


class OpenForwards:
    """The open forwards of a group or of one table; a table includes those of all its groups.

    Attributes:
        forwards: the open forwards by number; a later forward has a higher number. A ticket that no longer
            exists is closed, although its `__del__` may have been interrupted (Ctrl-C).
    """

    def __init__(self) -> None:
        self.forwards: dict[int, weakref.ref[OpenForward]] = {}
        # Weak: a group without a ticket has no open forward, and each ticket holds its group.
        self._groups: weakref.WeakSet[OpenForwards] = weakref.WeakSet()

    def include(self, group: OpenForwards) -> None:
        """Includes the open forwards of a group, from now on and those that are open already."""
        self._groups.add(group)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the open forwards."""
        forwards = [
            ticket for opened in (self, *self._groups) for ticket in opened.forwards.copy().items()
        ]
        return [number for number, ticket in forwards if ticket() is not None]

    @property
    def latest(self) -> int:
        """The highest number of an open forward, 0 if none is open."""
        return max(self.numbers, default=0)

    def all_closed_up_to(self, number: int) -> bool:
        """Returns True if every forward up to this number is closed."""
        return number < min(self.numbers, default=number + 1)

    def __len__(self) -> int:
        return len(self.numbers)
