"""CountCandidates: the next rows to evict by count, listed in advance.

A search over all rows lists more rows than are needed at once, ordered by count, then by mixed id. Counts
never fall, so of the rows that were not listed, only rows added later may come before the end of the list.
These are examined at each eviction, beside the front of the list. Counts with a half-life fall at its start
only (decay.py), and the list is dropped then.

Only ids are listed. An eviction looks them up and reads their present scores, so it does not matter what has
happened to a listed id in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life.decay import DecayedScores
from torchrec_dyn.life.scores import Scores
from torchrec_dyn.policies import MOST_COUNT
from torchrec_dyn.storage import HostRead, IdMap, canonical_keys, keep_in_use, places_of


class _Place(NamedTuple):
    """A place in the order of rows: a count and a mixed id, with the sign bit flipped."""

    occurrences: Tensor | int
    mixed: Tensor | int


class _Listed(NamedTuple):
    """A list of ids. Every row whose present place is up to `end` belongs to one of these ids.

    Attributes:
        ids: [M] int64, in their order at the search.
        counts: [M] int64, their counts at the search.
        found: number of ids that the search found.
        end: place of the last of these ids; the last place of all if the search found every row.
        others: more ids, with repeats: ids added since, and ids at the front of earlier evictions. Ids beyond
            `end` may be among them.
        chosen: ids and rows of the last eviction, until they are removed.
    """

    ids: Tensor
    counts: Tensor
    found: int
    end: _Place
    others: list[Tensor]
    chosen: tuple[Tensor, Tensor]


class CountCandidates:
    """A list of rows, ordered by count; rows of equal counts by mixed id, unsigned."""

    def __init__(self, device: torch.device) -> None:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._none_chosen = (nothing, nothing)
        # Replaced as a whole: an interrupt finds all of a change or nothing.
        self._listed: _Listed | None = None

    def prepare_add(self, ids: Tensor, counts: Tensor) -> Callable[[], None]:
        """Returns a call that adds fresh rows: ids [M] int64 and their counts [M] int64."""
        listed = self._with(ids, counts)

        def add() -> None:
            self._listed = listed

        return add

    def _with(self, ids: Tensor, counts: Tensor) -> _Listed | None:
        listed = self._listed
        if listed is None:
            return None
        # On a GPU the number of those up to `end` costs a wait; the next eviction drops the others.
        if ids.is_cpu:
            ids = ids[_up_to(listed.end, counts, canonical_keys(ids))]
        others = [*listed.others, ids]
        while len(others) > 1 and others[-1].numel() >= others[-2].numel():
            others[-2:] = [torch.cat(others[-2:])]
        # Without evictions the list would grow. On a GPU it also holds rows past `end`.
        most = listed.found if ids.is_cpu else 2 * listed.found
        is_long = sum(of.numel() for of in others) > most
        return None if is_long else listed._replace(others=others)

    def forget(self, rows: Tensor) -> None:
        """Drops rows [M] int64 that `lowest` returned last, after their removal; does nothing for others."""
        if self._listed is not None and self._listed.chosen[1] is rows:
            self._listed = self._listed._replace(chosen=self._none_chosen)

    def lowest(
        self,
        scores: Scores | DecayedScores,
        id_map: IdMap,
        high: int,
        before: int,
        most: int,
        ahead: int,
    ) -> HostRead[tuple[Tensor, Tensor]]:
        """Returns the ids and rows of the `most` lowest rows: from the list, or by a search.

        Rows last seen at step `before` or later are not returned, but for rows assigned at it and not seen.
        `high` is the high-water mark of its row numbers. A search lists up to `ahead` rows for later calls.
        """
        lowest = None
        if 2 * most <= ahead:
            lowest = yield from self._front(scores, id_map, before, most)
            if lowest is None:
                self._list(scores, id_map, high, before, ahead)
                lowest = yield from self._front(scores, id_map, before, most)
        return lowest or scores.lowest(id_map, high, before, most, by_count=True)

    def _list(
        self, scores: Scores | DecayedScores, id_map: IdMap, high: int, step: int, most: int
    ) -> None:
        """Searches all rows, rows seen at `step` too, and lists the lowest rows."""
        ids, rows = scores.lowest(id_map, high, step + 1, most, by_count=True)
        _, counts = scores.read(rows)
        order = ops.oldest_first(ids, counts)
        ids, counts = ids.index_select(0, order), counts.index_select(0, order)
        is_whole = ids.numel() < most
        end = (
            _Place(MOST_COUNT, torch.iinfo(torch.int64).max)
            if is_whole
            else _place(ids, counts, most)
        )
        self._listed = _Listed(ids, counts, ids.numel(), end, [], self._none_chosen)

    def _front(
        self, scores: Scores | DecayedScores, id_map: IdMap, before: int, most: int
    ) -> HostRead[tuple[Tensor, Tensor] | None]:
        """Returns the ids and rows of the `most` lowest rows of the list; None if it has fewer."""
        listed = self._listed
        if listed is None:
            return None
        # A search of another stream may have listed them.
        keep_in_use(listed.ids, listed.counts, *listed.others, *listed.chosen)
        length = listed.ids.numel()
        # On a GPU, examine all rows at once: each further round costs a wait.
        examined = most if listed.ids.is_cpu else max(most, length)
        while True:
            is_rest = examined >= length
            end = listed.end if is_rest else _place(listed.ids, listed.counts, examined)
            ids = torch.cat([listed.ids[:examined], *listed.others, listed.chosen[0]])
            rows = id_map.lookup(ids)
            last_seen, counts = scores.read(rows)
            mixed = canonical_keys(ids)
            # All rows up to `end` are examined; rows beyond it may be higher than rows not examined.
            is_low = (last_seen >= 0) & _up_to(end, counts, mixed)
            is_low &= (last_seen < before) | ((last_seen == before) & (counts == 0))
            order = ops.oldest_first(ids, counts)  # repeats are neighbours
            ordered, is_first = ids.index_select(0, order), is_low.index_select(0, order)
            is_first[1:] &= ordered[1:] != ordered[:-1]
            is_chosen = is_first & (is_first.cumsum(0) <= most)
            # Chosen ids are dropped when they are removed, not here: an interrupt may come in between.
            is_kept = (rows >= 0) & _up_to(listed.end, counts, mixed)
            is_kept = is_kept.index_select(0, order) & ~is_chosen
            num_chosen, num_kept = yield is_chosen.count_nonzero(), is_kept.count_nonzero()
            if num_chosen == most:
                break
            if is_rest:
                return None
            examined *= 2
        chosen = order.index_select(0, places_of(is_chosen, most))
        evicted = ids.index_select(0, chosen), rows.index_select(0, chosen)
        self._listed = listed._replace(
            ids=listed.ids[examined:],
            counts=listed.counts[examined:],
            others=[ordered.index_select(0, places_of(is_kept, num_kept))],
            chosen=evicted,
        )
        return evicted


def _place(ids: Tensor, counts: Tensor, number: int) -> _Place:
    """Returns the place of the `number`th of listed ids."""
    return _Place(counts[number - 1], canonical_keys(ids[number - 1 : number])[0])


def _up_to(end: _Place, counts: Tensor, mixed: Tensor) -> Tensor:
    """Returns which places are up to `end`, [M] bool."""
    is_lower = torch.lt(counts, end.occurrences)
    return is_lower | (torch.eq(counts, end.occurrences) & torch.le(mixed, end.mixed))
