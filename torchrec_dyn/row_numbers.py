"""Which rows are free, and which must wait for a forward that still holds them.

A row that a forward has read must not be given to another id before that forward's backward has
run or its graph has been dropped (pipelines run lookup i + 1 before backward i). So every forward
that will have a backward opens a ticket with each of its tables, and a row that an id leaves is
withheld until all forwards opened before are closed.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class ForwardTicket:
    """Stands for one forward; closed by its backward, or when its graph is dropped."""

    def __init__(self, number: int) -> None:
        self.number = number


class OutstandingForwards:
    """Numbers the forwards of a table and knows which are still open."""

    def __init__(self) -> None:
        self.latest = 0
        self._open: dict[int, weakref.ref[ForwardTicket]] = {}

    def open(self) -> ForwardTicket:
        """Opens the next ticket. Only the caller holds it: dropping it closes it."""
        self.latest += 1
        number, open_tickets = self.latest, self._open
        ticket = ForwardTicket(number)
        open_tickets[number] = weakref.ref(ticket, lambda _: open_tickets.pop(number, None))
        return ticket

    def close(self, ticket: ForwardTicket) -> None:
        """Closes a ticket; a second time changes nothing."""
        self._open.pop(ticket.number, None)

    def all_closed_up_to(self, number: int) -> bool:
        """Whether every forward opened up to this number is closed."""
        return all(number < open_number for open_number in list(self._open))

    def __len__(self) -> int:
        return len(self._open)


class RowNumbers:
    """Hands out rows 0, 1, 2, ... in order, freed ones first.

    Attributes:
        high: rows ever handed out; every row below is in use, free or withheld.
    """

    def __init__(self, forwards: OutstandingForwards) -> None:
        self.high = 0
        self.forwards = forwards
        self._free = torch.empty(0, dtype=torch.int64)
        self._withheld: list[tuple[int, Tensor]] = []

    def take(self, count: int) -> Tensor:
        """Hands out rows.

        Returns:
            [count] int64, distinct.
        """
        self._release()
        reused = min(count, self._free.numel())
        rows = torch.cat([self._free[:reused], torch.arange(self.high, self.high + count - reused)])
        self._free = self._free[reused:]
        self.high += count - reused
        return rows

    def highest_after(self, count: int) -> int:
        """Returns `high` as it would be after taking `count` rows."""
        self._release()
        return self.high + max(0, count - self._free.numel())

    def give_back(self, rows: Tensor) -> None:
        """Takes back rows that their ids left; they are reused when no open forward can hold them.

        Args:
            rows: [M] int64, distinct, handed out before.
        """
        if rows.numel():
            self._withheld.append((self.forwards.latest, rows))

    @property
    def has_withheld(self) -> bool:
        """Whether any row waits for a forward (or may by now be released)."""
        return bool(self._withheld)

    def withheld(self) -> Tensor:
        """Returns the rows that wait for a forward, [M] int64."""
        self._release()
        return torch.cat([torch.empty(0, dtype=torch.int64), *(rows for _, rows in self._withheld)])

    def _release(self) -> None:
        waiting: list[tuple[int, Tensor]] = []
        for latest, rows in self._withheld:
            if self.forwards.all_closed_up_to(latest):
                self._free = torch.sort(torch.cat([self._free, rows])).values
            else:
                waiting.append((latest, rows))
        self._withheld = waiting
