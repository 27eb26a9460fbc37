"""The open forwards of a table: those whose backward has yet to run and whose graph still lives.

Every forward that will have a backward opens a ticket with each of its tables. Its backward closes the
ticket, and so does dropping its graph. Until then the rows that it has read are not reused (row_numbers.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_numbers = itertools.count(1)  # of all forwards of this process


class ForwardTicket:
    """Stands for one forward of some tables. Only the forward's graph holds it: dropping it closes it.

    Args:
        tables: the open forwards of each table.
    """

    def __init__(self, tables: Sequence[OutstandingForwards]) -> None:
        self.number = next(_numbers)
        self._tables = [table.numbers for table in tables]
        for numbers in self._tables:
            numbers.add(self.number)

    def close(self) -> None:
        """Closes the ticket; a second call changes nothing."""
        for numbers in self._tables:
            numbers.discard(self.number)

    __del__ = close


class OutstandingForwards:
    """The open forwards of one table.

    Attributes:
        numbers: the numbers of their tickets; a later forward has a higher number.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    @property
    def latest(self) -> int:
        """The highest number of an open forward, 0 without any."""
        return max(self.numbers.copy(), default=0)

    def all_closed_up_to(self, number: int) -> bool:
        """Returns True if every forward up to this number is closed."""
        return number < min(self.numbers.copy(), default=number + 1)

    def __len__(self) -> int:
        return len(self.numbers)
