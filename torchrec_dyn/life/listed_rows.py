"""ListedRows: rows of one table by age, listed in advance, so that searches over all rows are rare.

A listed row that was seen or removed after the search has another `last_seen` than before and is skipped.
Rows added or seen later are newer than all listed rows, so the front of the list is the front of the table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_dyn.life.scores import NO_STEP
from torchrec_dyn.storage import keep_in_use


class ListedRows:
    """A list of rows, ordered by `last_seen`; rows of the same step by mixed id, unsigned.

    Attributes:
        until: no row that was last seen at this step or later is listed.
    """

    def __init__(self, device: torch.device) -> None:
        self._list = torch.empty(3, 0, dtype=torch.int64, device=device)  # ids, rows, last_seen
        # `last_seen` on the host: each step asks for places in it, which allocates no tensor.
        self._seen_at: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._first = 0  # entries before it are of no use any more
        self.until = 0

    def __len__(self) -> int:
        return len(self._seen_at) - self._first

    def put(self, listed: Tensor, seen_at: npt.NDArray[np.int64], until: int) -> None:
        """Replaces the list: listed [3, M] int64, ids, rows and last_seen; seen_at [M], last_seen."""
        self._list, self._seen_at, self._first, self.until = listed, seen_at, 0, until

    def span(self, table: int, count: int, most: int) -> tuple[Tensor, tuple[int, int, int, int]]:
        """Returns the arguments of `ops.choose_listed` for `most` of the next `count` rows of a table."""
        keep_in_use(self._list)  # a search of another stream may have listed them
        return self._list, (table, self._first, self._first + count, most)

    def drop_to(self, place: int) -> None:
        """Drops the entries before a place, a result of `ops.choose_listed`."""
        self._first = place

    def seen_before(self, step: int) -> int:
        """Returns the number of listed rows whose `last_seen` was below `step` when they were listed."""
        return max(0, int(self._seen_at.searchsorted(step)) - self._first)

    def drop(self, count: int) -> None:
        """Drops the first `count` rows."""
        self._first += count

    @property
    def first_seen(self) -> int:
        """The `last_seen` of the first listed row when it was listed; `NO_STEP` if none is listed."""
        return int(self._seen_at[self._first]) if len(self) else NO_STEP
