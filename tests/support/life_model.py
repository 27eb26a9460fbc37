"""A plain model of the life of the rows of one table: dicts, sets and sorted().

It keeps the ids that have a row, their scores, and the counts of removed ids by cause. It does not keep the
contents of rows: `born`, the number of rows inserted before it, identifies a row. Only the order of mixed
ids and the draws of AdmitWithProbability are taken from other code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from oracle import mix64

import torchrec_dyn as dyn

MOST = 2**32 - 1  # the largest count


Use = tuple[bool, bool]  # whether an occurrence inserts, and whether it counts
ALL: Use = (True, True)


def _counted(ids: list[int], uses: list[Use] | None) -> set[int]:
    """Returns the ids of a batch that count."""
    if uses is None:
        return set(ids)
    return {number for number, (_, counts) in zip(ids, uses, strict=True) if counts}


class TooFew(Exception):
    """A batch needs more rows than the limit: the rows that it must keep, and the new rows."""


@dataclass
class Counted:
    """Number of occurrences of an id, and the step and the clock at the last occurrence."""

    last_seen: int
    count: int
    time: int | None


@dataclass
class Row(Counted):
    """A row of an id: the number of rows inserted before it."""

    born: int


class LifeModel:
    """One table; is_drawn(id, occurrences, step): True if AdmitWithProbability admits the id."""

    def __init__(
        self, config: dyn.DynamicTableConfig, limit: int, is_drawn: Callable[[int, int, int], bool]
    ) -> None:
        eviction = config.eviction
        policies = eviction if isinstance(eviction, tuple) else (eviction,)
        self.steps_kept = self.time_kept = None
        for policy in policies:
            if isinstance(policy, dyn.ExpireAfter):
                self.steps_kept, self.time_kept = policy.steps, policy.time
        self.drops_oldest = any(isinstance(p, dyn.LeastRecentlyUsed) for p in policies)
        self.drops_rarest = any(isinstance(p, dyn.LeastFrequentlyUsed) for p in policies)
        self.makes_room = self.drops_oldest or self.drops_rarest
        self.admission, self.is_drawn = config.admission, is_drawn
        self.counts_first = isinstance(config.admission, dyn.AdmitAfter)
        self.has_life = config.admission is not None or config.eviction is not None
        self.limit = limit
        self.rows: dict[int, Row] = {}
        self.waiting: dict[int, Counted] = {}
        self.step = self.births = 0
        self.clock: int | None = None  # None until it is set
        self.is_new_time = False  # True if the time was set after the last step
        self.causes: Counter[str] = Counter()

    def due(self) -> set[int]:
        """Returns the ids with a row that expire at the next step."""
        return {number for number, row in self.rows.items() if self._is_due(row)}

    def _is_due(self, row: Counted) -> bool:
        if self.steps_kept is not None:
            return self.step + 1 - row.last_seen > self.steps_kept
        if self.time_kept is not None:
            return (self.clock or 0) - (row.time or 0) > self.time_kept
        return False

    def admitted(self, ids: list[int], uses: list[Use] | None = None) -> dict[int, int]:
        """Returns the unseen ids of a batch that get a row, with their first counts."""
        due, taken = self.due(), {}
        asking: Counter[int] = Counter()
        for number, (inserts, counts) in zip(ids, uses or [ALL] * len(ids), strict=True):
            if inserts:
                asking[number] += counts
        for number, times in asking.items():
            if number in self.rows and number not in due:
                continue
            if self.admission is None:
                taken[number] = times
            elif self.counts_first:
                counted = self.waiting.get(number)
                total = times + (0 if counted is None or self._is_due(counted) else counted.count)
                if total >= self.admission.count:
                    taken[number] = total
            elif not isinstance(self.admission, dyn.Never) and (
                times and self.is_drawn(number, times, self.step + 1)
            ):
                taken[number] = times
        return taken

    def check(self, ids: list[int], uses: list[Use] | None = None) -> None:
        """Raises TooFew if a batch does not fit."""
        stay, new = set(self.rows) - self.due(), self.admitted(ids, uses)
        held = stay & _counted(ids, uses) if self.makes_room else stay
        if (self.makes_room or new) and len(held) + len(new) > self.limit:
            raise TooFew(len(held), len(new))

    def train(self, ids: list[int], uses: list[Use] | None = None) -> list[int | None]:
        """Runs one training forward; returns `born` of each occurrence's row, None without a row.

        `uses` of each occurrence; None: all insert and count.
        """
        self.check(ids, uses)
        new = self.admitted(ids, uses)
        rows_before = len(self.rows)
        for number in self.due():
            self._drop(number, "evicted_expired")
        for number in [n for n, counted in self.waiting.items() if self._is_due(counted)]:
            del self.waiting[number]
            self.causes["counters_expired"] += 1
        self.step += 1
        self.is_new_time = False
        for number, (inserts, counts) in zip(ids, uses or [ALL] * len(ids), strict=True):
            self.causes["ids_seen"] += 1
            self.causes["hits" if number in self.rows else "unseen"] += 1
            if number in self.rows:
                row = self.rows[number]
                if counts:
                    row.last_seen, row.time = self.step, self.clock
                    row.count = min(row.count + 1, MOST)
            elif number not in new:
                self.causes["refused"] += 1
                if self.counts_first and inserts and counts:
                    came = self.waiting[number].count if number in self.waiting else 0
                    self.waiting[number] = Counted(self.step, came + 1, self.clock)
        if self.makes_room:
            self._make_room(len(new), _counted(ids, uses))
        for number, count in new.items():
            self.waiting.pop(number, None)
            self._start(number, self.step, count)
        self._drop_counters(rows_before)
        return [self.rows[number].born if number in self.rows else None for number in ids]

    def _make_room(self, new: int, batch: set[int]) -> None:
        surplus = len(self.rows) + new - self.limit
        if surplus > 0:
            others = sorted(set(self.rows) - batch, key=self._score)
            for number in others[: max(surplus, self.limit // 64)]:
                self._drop(number, "evicted_full")

    def _score(self, number: int) -> tuple[int, int]:
        row = self.rows[number]
        return (row.last_seen if self.drops_oldest else row.count, mix64(number))

    def _drop_counters(self, rows: int) -> None:
        most = min(self.limit, max(dyn.policies.LEAST_COUNTERS, 4 * rows))
        if self.counts_first and self.admission.counters is not None:
            most = self.admission.counters
        surplus = len(self.waiting) - most
        if surplus > 0:
            order = sorted(self.waiting, key=lambda n: (self.waiting[n].last_seen, mix64(n)))
            for number in order[: max(surplus, most // 64)]:
                del self.waiting[number]
                self.causes["counters_dropped"] += 1

    def _start(self, number: int, last_seen: int, count: int) -> None:
        self.rows[number] = Row(last_seen, min(count, MOST), self.clock, self.births)
        self.births += 1
        self.causes["inserted"] += 1

    def _drop(self, number: int, cause: str) -> None:
        del self.rows[number]
        self.causes[cause] += 1

    def erase(self, ids: list[int]) -> None:
        for number in set(ids):
            self.waiting.pop(number, None)
            if number in self.rows:
                self._drop(number, "erased")

    def assign(self, ids: list[int]) -> None:
        absent = set(ids) - set(self.rows)
        if absent and not self.makes_room and len(self.rows) + len(absent) > self.limit:
            raise TooFew(len(self.rows), len(absent))
        # A time that was set after the last step is the time of the next step.
        step = self.step + (self.time_kept is not None and self.is_new_time)
        for number in absent:
            self.waiting.pop(number, None)
            self._start(number, step, 0)

    def set_time(self, time: int) -> None:
        """Sets the time of later training forwards. The first time holds for all earlier forwards too."""
        self.is_new_time |= self.clock not in (None, time)
        for row in [*self.rows.values(), *self.waiting.values()]:
            if self.clock is None or row.last_seen > self.step:
                row.time = time
        self.clock = time

    def reload(self) -> None:
        """Models a load into a new table: everything is kept except the counts by cause."""
        self.causes.clear()

    # Reading.

    def last_seen(self, number: int) -> int:
        if number not in self.rows:
            return -1
        row = self.rows[number]
        return row.last_seen if self.time_kept is None else row.time or 0

    def count(self, number: int) -> int:
        if number in self.rows:
            return self.rows[number].count
        return self.waiting[number].count if number in self.waiting else 0
