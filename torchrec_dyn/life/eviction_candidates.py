"""OldestRows: rows in the order in which they were last seen, listed ahead of their leaving.

To find the lowest scores is a search over all rows; so more are listed than are asked for. A listed row that
was seen since, or was erased, no longer has the last sight that it was listed with: it is passed over.
Whatever is seen or assigned after the listing is younger than all that is listed, so the front of the list
stays the lowest there is.

Legend: L rows listed, M rows asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life.scores import Scores
from torchrec_dyn.storage import IdMap


class OldestRows:
    """A list of rows by last sight, those of one step by mixed id, unsigned."""

    def __init__(self) -> None:
        empty = torch.empty(0, dtype=torch.int64)
        self._ids, self._rows, self._last_seen = empty, empty, empty

    def list(self, scores: Scores, id_map: IdMap, high: int, before: int, most: int) -> None:
        """Searches for the oldest rows.

        Args:
            scores: of the rows.
            id_map: of their ids.
            high: rows ever handed out.
            before: only rows last seen before this step; from now on none may be given an older sight.
            most: how many.
        """
        ids, rows = scores.lowest(id_map, high, before, most)
        last_seen, _ = scores.read(rows)
        # Those assigned for `before` itself come last and are left out: there may be more of them yet.
        order = ops.oldest_first(ids, last_seen)[: int((last_seen < before).sum())]
        self._ids, self._rows, self._last_seen = ids[order], rows[order], last_seen[order]

    def seen_before(self, step: int) -> int:
        """Returns how many listed rows were last seen before a step when they were listed."""
        return int(torch.searchsorted(self._last_seen, step))

    def front(self, count: int, scores: Scores) -> tuple[Tensor, Tensor]:
        """Returns the ids and rows of the first `count` listed that are as they were listed."""
        places = self._places(count, scores)
        return self._ids[places], self._rows[places]

    def drop(self, count: int) -> None:
        """Takes the first `count` off the list."""
        self._ids, self._rows = self._ids[count:], self._rows[count:]
        self._last_seen = self._last_seen[count:]

    def take(self, most: int, scores: Scores) -> tuple[Tensor, Tensor] | None:
        """Takes the `most` oldest off the list; None if it does not have that many any more."""
        looked_at = most
        while looked_at < 2 * len(self._rows):
            places = self._places(looked_at, scores)
            if places.numel() >= most:
                places = places[:most]
                taken = self._ids[places], self._rows[places]
                self.drop(int(places[-1]) + 1)
                return taken
            looked_at *= 2
        return None

    def _places(self, count: int, scores: Scores) -> Tensor:
        last_seen, _ = scores.read(self._rows[:count])
        return (last_seen == self._last_seen[:count]).nonzero().flatten()
