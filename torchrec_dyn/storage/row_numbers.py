"""RowNumbers: the free rows of a table, and the rows withheld from reuse while a forward may hold them.

A row that a forward has read must not be given to another id before that forward's backward has run or
its graph has been dropped (pipelines run lookup i + 1 before backward i). So the row of a removed id is
withheld until all forwards opened before the removal are closed (open_forwards.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn.storage.open_forwards import OutstandingForwards


class RowNumbers:
    """The row numbers of a table, handed out in the order 0, 1, 2, ..., freed rows first.

    Attributes:
        high: number of rows ever handed out; every row below it is in use, free or withheld.
    """

    def __init__(self, forwards: OutstandingForwards) -> None:
        self.high = 0
        self.forwards = forwards
        self._free: list[Tensor] = []  # each tensor: rows that were freed together
        self._num_free = 0
        self._withheld: list[tuple[int, Tensor]] = []

    def take(self, count: int) -> Tensor:
        """Hands out and returns `count` distinct rows, [count] int64."""
        self._release()
        reused = min(count, self._num_free)
        rows = [torch.arange(self.high, self.high + count - reused)]
        self._num_free -= reused
        self.high += count - reused
        while reused:
            free = self._free.pop()
            rows.append(free[:reused])
            if free.numel() > reused:
                self._free.append(free[reused:])
            reused -= rows[-1].numel()
        return torch.cat(rows[::-1])

    def highest_after(self, count: int) -> int:
        """Returns the value that `high` would have after `take(count)`."""
        self._release()
        return self.high + max(0, count - self._num_free)

    def give_back(self, rows: Tensor) -> None:
        """Takes back the rows of removed ids; they are reused as soon as no open forward can hold them.

        Args:
            rows: [M] int64, distinct, handed out before.
        """
        if rows.numel():
            self._withheld.append((self.forwards.latest, rows))

    @property
    def has_withheld(self) -> bool:
        """True if rows are withheld (the next call may release some of them)."""
        return bool(self._withheld)

    def withheld(self) -> Tensor:
        """Returns the withheld rows, [M] int64."""
        self._release()
        return torch.cat([torch.empty(0, dtype=torch.int64), *(rows for _, rows in self._withheld)])

    def _release(self) -> None:
        withheld: list[tuple[int, Tensor]] = []
        for latest, rows in self._withheld:
            if self.forwards.all_closed_up_to(latest):
                self._free.append(rows)
                self._num_free += rows.numel()
            else:
                withheld.append((latest, rows))
        self._withheld = withheld
