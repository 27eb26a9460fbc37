"""The rows that go first: expired rows, and the lowest rows of full tables, of several tables at once.

Rows are listed by age in advance, so that searches over all rows are rare. A listed row that was seen or
removed after the search has another `last_seen` than before and is skipped. Rows added or seen later are
newer than all listed rows, so the front of the list is the front of the table.

Tables are given by their number in a group whose maps and scores are prepared for the ops.

Legend: M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.life.scores import NO_STEP, Scores
from torchrec_dyn.storage import (
    Chosen,
    IdMap,
    canonical_keys,
    canonical_order,
    host_numbers,
    joined,
    keep_in_use,
    parts_of,
    to_host,
)

_NO_HALF_LIVES = [-1] * 40  # csrc/life/scores.h


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


class OwnScores(NamedTuple):
    """The rows of a table, and the user's scores of them.

    Attributes:
        id_map: of the ids.
        words: last_seen and count of each row.
        of: returns the user's scores [M] int64 of rows, last_seen and counts, [M] int64 each.
        left_out: [N] int64, rows that are not chosen, and -1; None if there are none.
    """

    id_map: IdMap
    words: Scores
    of: Callable[[Tensor, Tensor, Tensor], Tensor]
    left_out: Tensor | None = None


class Search(NamedTuple):
    """A search for the `most` lowest rows of a table.

    Attributes:
        high: the high-water mark of its row numbers.
        before: rows of this step and later are not found, but for rows assigned at it and not seen.
        by_count: True to compare counts, else last_seen.
        half_lives: the first steps of the half-lives of counts (`Decay.begins`); None if they do not decay.
        listed: rows listed in advance; None to search each time.
        ahead: number of rows that a search lists.
        until: as `before`, for a search that lists nothing; None if it is the same.
        own: the user's scores, which decide in place of counts; None if there are none.
    """

    table: int
    high: int
    most: int
    before: int
    by_count: bool = False
    half_lives: list[int] | None = None
    listed: ListedRows | None = None
    ahead: int = 0
    until: int | None = None
    own: OwnScores | None = None

    @property
    def lists(self) -> bool:
        """True if rows are listed: a search serves two or more calls."""
        return self.listed is not None and 2 * self.most <= self.ahead


class Listing(NamedTuple):
    """A list of the `most` oldest rows of a table that were last seen before step `before`."""

    table: int
    high: int
    most: int
    before: int
    listed: ListedRows


Kept = tuple[Tensor | None, Tensor | None]
_NONE_KEPT = None, None


def lowest_rows(
    searches: Sequence[Search], like: Tensor, handle: Tensor, kept: Kept = _NONE_KEPT
) -> Chosen:
    """Returns the lowest rows of tables: from their lists, or by searches.

    `like` is on the device of the tables, and `handle` has their maps and scores. `kept`, rows [N] int64 in
    the order of the tables and where those of each begin [T + 1], are not chosen. Fewer than `most` rows are
    returned only if no others were last seen before.
    """
    listed = [one for one in searches if one.lists]
    chosen = _listed(listed, like, handle, kept) if listed else []
    chosen += [_scored(one, one.own, kept) for one in searches if one.own is not None]
    found = {t for part in chosen for t in part.sizes}
    others = [one for one in searches if one.table not in found]
    if others:
        chosen.append(_searched(others, like, handle, kept))
    return joined_rows([part for part in chosen if part.sizes], like)


def _listed(searches: Sequence[Search], like: Tensor, handle: Tensor, kept: Kept) -> list[Chosen]:
    """Returns the lowest rows of the tables whose lists are long enough; short lists are made anew."""
    chosen = _fronts(searches, like, handle, kept)
    short = [one for one in searches if one.table not in chosen.sizes]
    if not short:
        return [chosen]
    # With the kept rows: if the step fails they are as old as before.
    list_rows([_listing(one) for one in short], like, handle)
    return [chosen, _fronts(short, like, handle, kept)]


def _listing(one: Search) -> Listing:
    assert one.listed is not None
    return Listing(one.table, one.high, one.ahead, one.before, one.listed)


def list_rows(listings: Sequence[Listing], like: Tensor, handle: Tensor) -> None:
    """Searches tables and lists their oldest rows.

    After this call no row may get a `last_seen` older than `before`.
    """
    questions = host_numbers([(one.table, one.high, 0, one.before, one.most) for one in listings])
    ids, rows, last_seen, offsets = ops.lowest_rows(like, questions, None, True, handle)
    ends, seen_at = offsets.tolist(), to_host(last_seen).numpy()
    for one, (begin, end) in zip(listings, pairwise(ends), strict=True):
        # Rows assigned at `before` itself are last and left out: more such rows may be assigned later.
        end = begin + int(seen_at[begin:end].searchsorted(one.before))
        own = slice(begin, end)
        listed = torch.stack([ids[own], rows[own], last_seen[own]])
        one.listed.put(listed, seen_at[own], one.before)


def expired_rows(
    due: Sequence[tuple[int, ListedRows, int]], like: Tensor, handle: Tensor
) -> Chosen:
    """Returns the rows that have expired: of each table number and list, those among its first rows."""
    spans = [listed.span(table, count, count) for table, listed, count in due]
    if not spans:
        return _nothing(like)
    ids, rows, offsets, _ = ops.choose_listed(*_arguments(spans), handle)
    return Chosen(ids, rows, _sizes([table for table, _, _ in due], offsets))


def _fronts(searches: Sequence[Search], like: Tensor, handle: Tensor, kept: Kept) -> Chosen:
    """Returns the fronts of lists, without those that are too short."""
    full = [(one, one.listed) for one in searches if one.listed and len(one.listed) >= one.most]
    if not full:
        return _nothing(like)
    spans = [listed.span(one.table, len(listed), one.most) for one, listed in full]
    ids, rows, offsets, firsts = ops.choose_listed(*_arguments(spans), handle, *kept)
    chosen = Chosen(ids, rows, _sizes([one.table for one, _ in full], offsets))
    short = {one.table for one, _ in full if chosen.sizes[one.table] < one.most}
    # Rows before the first chosen one were evicted, erased or seen since: they are skipped for ever.
    after = tuple(
        partial(listed.drop_to, first)
        for (one, listed), first in zip(full, firsts.tolist(), strict=True)
        if one.table not in short
    )
    return joined_rows([chosen._replace(after=after)], like, short)


def _arguments(
    spans: Sequence[tuple[Tensor, tuple[int, int, int, int]]],
) -> tuple[list[Tensor], Tensor]:
    return [listed for listed, _ in spans], host_numbers([span for _, span in spans])


def _searched(searches: Sequence[Search], like: Tensor, handle: Tensor, kept: Kept) -> Chosen:
    questions = [
        (one.table, one.high, int(one.by_count), one.before if one.until is None else one.until, one.most)
        for one in searches
    ]  # fmt: skip
    half_lives = None
    if any(one.half_lives for one in searches):
        half_lives = host_numbers([one.half_lives or _NO_HALF_LIVES for one in searches])
    ids, rows, _, offsets = ops.lowest_rows(
        like, host_numbers(questions), half_lives, False, handle, *kept
    )
    return Chosen(ids, rows, _sizes([one.table for one in searches], offsets))


def _scored(one: Search, own: OwnScores, kept: Kept) -> Chosen:
    """Returns the rows with the lowest scores of the user's, in canonical order."""
    rows, offsets = kept
    if rows is not None and offsets is not None:
        begin, end = offsets[one.table : one.table + 2].tolist()
        own = own._replace(left_out=rows[begin:end])
    ids, rows = lowest_scored([own], one.before, one.most)
    return Chosen(ids, rows, {one.table: len(ids)})


def lowest_scored(parts: Sequence[OwnScores], before: int, most: int) -> tuple[Tensor, Tensor]:
    """Returns the ids and rows with the `most` lowest scores of the user's, in canonical order.

    Of all parts together. Rows are scored some at a time, in the order of the slots, and the lowest so far
    are kept. `before` as of `Search`.
    """
    lowest = [parts[0].id_map.slots.new_empty(0) for _ in range(3)]  # ids, rows and scores
    for part in parts:
        hidden = torch.zeros(
            part.words.store.capacity + 1, dtype=torch.bool, device=lowest[0].device
        )
        if part.left_out is not None:
            hidden[part.left_out] = True  # -1 is the last place
        for ids, rows in part.id_map.parts(knobs.IDS_SCORED_TOGETHER):
            last_seen, counts = part.words.read(rows)
            was_assigned = (last_seen == before) & (counts == 0)
            may_go = ((last_seen < before) | was_assigned) & ~hidden[rows]
            places = may_go.nonzero().flatten()
            if not len(places):
                continue  # a function of none may be an error
            ids, rows, *words = (one[places] for one in (ids, rows, last_seen, counts))
            scored = zip(lowest, [ids, rows, part.of(rows, *words)], strict=True)
            lowest = _lowest([torch.cat(both) for both in scored], most)
    order = canonical_order(lowest[0])
    return lowest[0][order], lowest[1][order]


def _lowest(scored: list[Tensor], most: int) -> list[Tensor]:
    """Returns the `most` lowest of ids, rows and scores [M] int64, ties by mixed id; in any order."""
    ids, _, scores = scored
    if len(ids) <= most:
        return scored
    highest = scores.topk(most, largest=False, sorted=False).values.max()
    below, ties = (scores < highest).nonzero().flatten(), (scores == highest).nonzero().flatten()
    first = canonical_keys(ids[ties]).topk(most - len(below), largest=False, sorted=False).indices
    places = torch.cat([below, ties[first]])
    return [part[places] for part in scored]


def _nothing(like: Tensor) -> Chosen:
    empty = like[:0]
    return Chosen(empty, empty, {})


def _sizes(tables: Sequence[int], offsets: Tensor) -> dict[int, int]:
    ends = offsets.tolist()
    return {t: end - begin for t, (begin, end) in zip(tables, pairwise(ends), strict=True)}


def joined_rows(chosen: Sequence[Chosen], like: Tensor, left_out: Collection[int] = ()) -> Chosen:
    """Returns the rows of all parts in the order of the tables, without those of some tables."""
    if len(chosen) == 1 and not left_out:
        return chosen[0]
    parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for one in chosen:
        ids_of, rows_of = parts_of(one.ids, one.sizes), parts_of(one.rows, one.sizes)
        for t in one.sizes.keys() - left_out:
            parts.setdefault(t, []).append((ids_of[t], rows_of[t]))
    pairs = [pair for t in sorted(parts) for pair in parts[t]]
    return Chosen(
        joined([ids for ids, _ in pairs], like),
        joined([rows for _, rows in pairs], like),
        {t: sum(len(ids) for ids, _ in parts[t]) for t in sorted(parts)},
        tuple(call for one in chosen for call in one.after),
    )
