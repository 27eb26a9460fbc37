"""EvictionCandidates: the next rows to evict by age, listed in advance.

The lowest scores are found by a search over all rows, so a search lists more rows than are needed at once. A
listed row that was seen or removed after the search has another `last_seen` than before and is skipped. Rows
seen or assigned after the search are younger than all listed rows, so the first listed rows stay the oldest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life.scores import Scores
from torchrec_dyn.storage import IdMap

_NONE = torch.empty(0, dtype=torch.int64)


class EvictionCandidates:
    """A list of rows, ordered by `last_seen`; rows of the same step by mixed id, unsigned."""

    def __init__(self) -> None:
        self._ids, self._rows, self._last_seen = _NONE, _NONE, _NONE

    def list(self, scores: Scores, id_map: IdMap, high: int, before: int, most: int) -> None:
        """Searches all rows and lists the oldest rows.

        Args:
            scores: scores of the rows.
            id_map: id map of the table.
            high: number of rows ever handed out.
            before: step; only rows last seen before it are listed. After this call no row may get an older
                `last_seen`.
            most: the most rows to list.
        """
        ids, rows = scores.lowest(id_map, high, before, most)
        last_seen, _ = scores.read(rows)
        # Rows assigned at `before` itself are last and left out: more such rows may be assigned later.
        order = ops.oldest_first(ids, last_seen)[: int((last_seen < before).sum())]
        self._ids, self._rows, self._last_seen = ids[order], rows[order], last_seen[order]

    def seen_before(self, step: int) -> int:
        """Returns the number of listed rows whose `last_seen` was below `step` when they were listed."""
        # Most tables have an empty list at most steps, and a training step asks each of them.
        return int(torch.searchsorted(self._last_seen, step)) if len(self._last_seen) else 0

    def front(self, count: int, scores: Scores) -> tuple[Tensor, Tensor]:
        """Returns the ids and rows of the first `count` listed rows, without rows seen since the search."""
        if not count:
            return _NONE, _NONE
        places = self._places(count, scores)
        return self._ids[places], self._rows[places]

    def drop(self, count: int) -> None:
        """Removes the first `count` rows from the list."""
        if not count:
            return
        rest = self._ids[count:], self._rows[count:], self._last_seen[count:]
        self._ids, self._rows, self._last_seen = rest

    def lowest(
        self, scores: Scores, id_map: IdMap, high: int, before: int, most: int, ahead: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the ids and rows of the `most` oldest rows: from the list, or by a search.

        Args:
            scores: scores of the rows.
            id_map: id map of the table.
            high: number of rows ever handed out.
            before: as `list`.
            most: the most rows to return.
            ahead: the most rows to list, for later calls too.
        """
        oldest = None
        if 2 * most <= ahead:
            oldest = self.oldest(most, scores)
            if oldest is None:
                self.list(scores, id_map, high, before, ahead)
                oldest = self.oldest(most, scores)
        return oldest or scores.lowest(id_map, high, before, most)

    def oldest(self, most: int, scores: Scores) -> tuple[Tensor, Tensor] | None:
        """Returns the ids and rows of the `most` oldest rows of the list; None if it has fewer."""
        examined = most
        while examined < 2 * len(self._rows):
            places = self._places(examined, scores)
            if places.numel() >= most:
                oldest = self._ids[places[:most]], self._rows[places[:most]]
                self.drop(
                    int(places[0])
                )  # rows evicted, erased or seen since, which are skipped for ever
                return oldest
            examined *= 2
        return None

    def _places(self, count: int, scores: Scores) -> Tensor:
        last_seen, _ = scores.read(self._rows[:count])
        return (last_seen == self._last_seen[:count]).nonzero().flatten()
