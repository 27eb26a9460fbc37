"""EvictionCandidates: the next rows to evict by age, listed ahead.

Finding the lowest scores is a search over all rows, so more rows are listed than are needed at once. A
listed row that was seen or erased since has another `last_seen` than when it was listed: it is skipped.
Rows seen or assigned after the search are younger than all listed rows, so the front of the list stays the
oldest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life.scores import Scores
from torchrec_dyn.storage import IdMap


class EvictionCandidates:
    """A list of rows by `last_seen`, rows of one step by mixed id, unsigned."""

    def __init__(self) -> None:
        empty = torch.empty(0, dtype=torch.int64)
        self._ids, self._rows, self._last_seen = empty, empty, empty

    def list(self, scores: Scores, id_map: IdMap, high: int, before: int, most: int) -> None:
        """Lists the oldest rows, found by a search over all of them.

        Args:
            scores: of the rows.
            id_map: of their ids.
            high: rows ever handed out.
            before: only rows last seen before this step; from now on no row may get an older `last_seen`.
            most: the most rows to list.
        """
        ids, rows = scores.lowest(id_map, high, before, most)
        last_seen, _ = scores.read(rows)
        # Rows assigned at `before` itself are last and left out: more of them may be assigned yet.
        order = ops.oldest_first(ids, last_seen)[: int((last_seen < before).sum())]
        self._ids, self._rows, self._last_seen = ids[order], rows[order], last_seen[order]

    def seen_before(self, step: int) -> int:
        """Returns how many listed rows had a `last_seen` below `step` when they were listed."""
        return int(torch.searchsorted(self._last_seen, step))

    def front(self, count: int, scores: Scores) -> tuple[Tensor, Tensor]:
        """Returns ids and rows of those of the first `count` listed rows that were not seen since."""
        places = self._places(count, scores)
        return self._ids[places], self._rows[places]

    def drop(self, count: int) -> None:
        """Removes the first `count` rows from the list."""
        self._ids, self._rows = self._ids[count:], self._rows[count:]
        self._last_seen = self._last_seen[count:]

    def take(self, most: int, scores: Scores) -> tuple[Tensor, Tensor] | None:
        """Removes the `most` oldest rows from the list; None if it has fewer."""
        examined = most
        while examined < 2 * len(self._rows):
            places = self._places(examined, scores)
            if places.numel() >= most:
                places = places[:most]
                taken = self._ids[places], self._rows[places]
                self.drop(int(places[-1]) + 1)
                return taken
            examined *= 2
        return None

    def _places(self, count: int, scores: Scores) -> Tensor:
        last_seen, _ = scores.read(self._rows[:count])
        return (last_seen == self._last_seen[:count]).nonzero().flatten()
