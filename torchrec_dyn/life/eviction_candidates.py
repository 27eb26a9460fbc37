"""EvictionCandidates: the next rows to evict by age, listed in advance.

The lowest scores are found by a search over all rows, so a search lists more rows than are needed at once. A
listed row that was seen or removed after the search has another `last_seen` than before and is skipped. Rows
seen or assigned after the search are younger than all listed rows, so the first listed rows stay the oldest.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life.scores import NO_STEP, Scores
from torchrec_dyn.storage import HostRead, IdMap, keep_in_use, places_of


class EvictionCandidates:
    """A list of rows, ordered by `last_seen`; rows of the same step by mixed id, unsigned."""

    def __init__(self, device: torch.device) -> None:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._ids, self._rows, self._last_seen = nothing, nothing, nothing
        # `last_seen` on the host: each step asks for places in it, which allocates no tensor.
        self._seen_at = np.empty(0, dtype=np.int64)

    def list(self, scores: Scores, id_map: IdMap, high: int, before: int, most: int) -> None:
        """Searches all rows and lists the `most` oldest rows last seen before step `before`.

        `high` is the high-water mark of its row numbers. After this call no row may get a `last_seen` older
        than `before`.
        """
        ids, rows = scores.lowest(id_map, high, before, most)
        last_seen, _ = scores.read(rows)
        order = ops.oldest_first(ids, last_seen)
        last_seen = last_seen.index_select(0, order)
        seen_at = last_seen.cpu().numpy()
        # Rows assigned at `before` itself are last and left out: more such rows may be assigned later.
        count = int(seen_at.searchsorted(before))
        order = order[:count]
        ids, rows = ids.index_select(0, order), rows.index_select(0, order)
        listed = ids, rows, last_seen[:count], seen_at[:count]
        # At once: an interrupt finds all of the list or nothing.
        self._ids, self._rows, self._last_seen, self._seen_at = listed

    def seen_before(self, step: int) -> int:
        """Returns the number of listed rows whose `last_seen` was below `step` when they were listed."""
        return int(self._seen_at.searchsorted(step))

    @property
    def first_seen(self) -> int:
        """The `last_seen` of the first listed row when it was listed; `NO_STEP` if none is listed."""
        return int(self._seen_at[0]) if len(self._seen_at) else NO_STEP

    def front(self, count: int, scores: Scores) -> HostRead[tuple[Tensor, Tensor]]:
        """Returns the ids and rows of the first `count` listed rows, without rows seen since the search."""
        if not count:
            return self._ids[:0], self._rows[:0]
        is_unchanged = self._is_unchanged(count, scores)
        [found] = yield [is_unchanged.count_nonzero()]
        places = places_of(is_unchanged, found)
        return self._ids.index_select(0, places), self._rows.index_select(0, places)

    def drop(self, count: int) -> None:
        """Removes the first `count` rows from the list."""
        if not count:
            return
        rest = self._ids[count:], self._rows[count:], self._last_seen[count:], self._seen_at[count:]
        self._ids, self._rows, self._last_seen, self._seen_at = rest

    def lowest(
        self,
        scores: Scores,
        id_map: IdMap,
        high: int,
        before: int,
        most: int,
        ahead: int,
        until: int | None = None,
    ) -> HostRead[tuple[Tensor, Tensor]]:
        """Returns the ids and rows of the `most` oldest rows: from the list, or by a search.

        A search is as `list`, of up to `ahead` rows for later calls too. If fewer than `most` rows were last
        seen before step `before`, rows last seen before step `until` follow, which are never listed.
        """
        oldest = None
        if 2 * most <= ahead:
            oldest = yield from self.oldest(most, scores)
            if oldest is None:
                self.list(scores, id_map, high, before, ahead)
                if most <= len(self._rows):  # nothing was seen since the search
                    # Copies: the free rows and the log of changes keep them, and would keep the whole list.
                    oldest = self._ids[:most].clone(), self._rows[:most].clone()
        return oldest or scores.lowest(id_map, high, before if until is None else until, most)

    def oldest(self, most: int, scores: Scores) -> HostRead[tuple[Tensor, Tensor] | None]:
        """Returns the ids and rows of the `most` oldest rows of the list; None if it has fewer."""
        # The rows of the last call may still be in front. On a GPU, examine all rows at once: each further
        # round costs a wait.
        examined = 2 * most if self._rows.is_cpu else len(self._rows)
        while most <= len(self._rows):
            # Ends with -1 if too few are unchanged.
            places = places_of(self._is_unchanged(examined, scores), most)
            first, last = yield places[0], places[-1]
            if last >= 0:
                oldest = self._ids.index_select(0, places), self._rows.index_select(0, places)
                self.drop(first)  # rows evicted, erased or seen since, which are skipped for ever
                return oldest
            if examined >= len(self._rows):
                break
            examined *= 2
        return None

    def _is_unchanged(self, count: int, scores: Scores) -> Tensor:
        # A search of another stream may have listed them.
        keep_in_use(self._ids, self._rows, self._last_seen)
        last_seen, _ = scores.read(self._rows[:count])
        return last_seen == self._last_seen[:count]
