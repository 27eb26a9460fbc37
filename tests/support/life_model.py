"""A plain model of the life of the rows of one table: dicts, sets and sorted().

It keeps the ids that have a row, their scores, and the counts of removed ids by cause. It does not keep the
contents of rows: `born`, the number of rows inserted before it, identifies a row. Only the order of mixed
ids and the draws of AdmitWithProbability are taken from other code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from oracle import mix64
from torch import Tensor

import torchrec_dyn as dyn
from torchrec_dyn import knobs

MOST = 2**32 - 1  # the largest count


Use = tuple[bool, bool]  # whether an occurrence inserts, and whether it counts
ALL: Use = (True, True)


def as_int64(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


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
        self.steps_kept = self.time_kept = self.half_steps = self.half_time = None
        for policy in policies:
            if isinstance(policy, dyn.ExpireAfter):
                self.steps_kept, self.time_kept = policy.steps, policy.time
            if isinstance(policy, dyn.LeastFrequentlyUsed | dyn.LowestScore):
                self.half_steps, self.half_time = policy.half_life_steps, policy.half_life_time
        self.own = next((p for p in policies if isinstance(p, dyn.OwnEviction)), None)
        self.is_timed = self.time_kept is not None or self.half_time is not None
        self.is_timed |= self.own is not None and self.own.keeps_times
        self.drops_oldest = any(isinstance(p, dyn.LeastRecentlyUsed) for p in policies)
        lowest = [p for p in policies if isinstance(p, dyn.LeastFrequentlyUsed | dyn.LowestScore)]
        self.drops_rarest = bool(lowest)
        self.unit = next((p.unit for p in lowest if isinstance(p, dyn.LowestScore)), None)
        self.makes_room = self.drops_oldest or self.drops_rarest or self.own is not None
        self.admission, self.is_drawn = config.admission, is_drawn
        self.asks = isinstance(config.admission, dyn.OwnAdmission)
        self.allowed: set[int] = (
            set()
        )  # waiting ids that may get a row in the open step, if it asks
        self.counts_first = self.asks or isinstance(config.admission, dyn.AdmitAfter)
        self.has_life = config.admission is not None or config.eviction is not None
        self.limit = limit
        self.rows: dict[int, Row] = {}
        self.waiting: dict[int, Counted] = {}
        self.step = self.births = 0
        self.is_open = False  # True: the next forward belongs to the last step (deferred updates)
        self.clock: int | None = None  # None until it is set
        self.is_new_time = False  # True if the time was set after the last step
        self.causes: Counter[str] = Counter()

    def due(self) -> set[int]:
        """Returns the ids with a row that expire at the next step."""
        return {number for number, row in self.rows.items() if self._is_due(row)}

    def _allowed(self) -> set[int]:
        """Asks at the end of a step about all ids that wait; returns those that may get a row."""
        if not self.is_open:
            waiting = [n for n, counted in self.waiting.items() if not self._is_due(counted)]
            counts = [self.waiting[n].count for n in waiting]
            told = self.admission.admit(as_int64(waiting), as_int64(counts), self.step)
            self.allowed = {n for n, is_in in zip(waiting, told.tolist(), strict=True) if is_in}
        self.allowed &= self.waiting.keys()
        return self.allowed

    @property
    def next_step(self) -> int:
        return self.step + (not self.is_open)

    def _is_due(self, row: Counted) -> bool:
        if self.steps_kept is not None:
            return self.next_step - row.last_seen > self.steps_kept
        if self.time_kept is not None:
            return (self.clock or 0) - (row.time or 0) > self.time_kept
        return False

    def admitted(self, ids: list[int], uses: list[Use] | None = None) -> dict[int, int]:
        """Returns the unseen ids of a batch that get a row, with their first counts."""
        due, taken = self.due(), {}
        allowed = self._allowed() if self.asks else set()
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
                is_in = number in allowed if self.asks else total >= self.admission.count
                if times and is_in:
                    taken[number] = total
            elif not isinstance(self.admission, dyn.Never) and (
                times and self.is_drawn(number, times, self.next_step)
            ):
                taken[number] = times
        return taken

    def check(self, ids: list[int], uses: list[Use] | None = None) -> None:
        """Raises TooFew if a batch does not fit."""
        stay, new = set(self.rows) - self.due(), self.admitted(ids, uses)
        held = stay
        if self.makes_room:
            held = stay & (_counted(ids, uses) | self._seen(self.next_step))
        if (self.makes_room or new) and len(held) + len(new) > self.limit:
            raise TooFew(len(held), len(new))

    def train(
        self, ids: list[int], weights: list[float] = (), uses: list[Use] | None = None
    ) -> list[int | None]:
        """Runs one training forward; returns `born` of each occurrence's row, None without a row.

        `weights` of each occurrence, if the table adds them up; `uses` of each; None: all insert and count.
        """
        adds = [1] * len(ids)
        if self.unit is not None:
            adds = [min(max(round(one / self.unit), 1), MOST) for one in weights]
        self.check(ids, uses)
        new = self.admitted(ids, uses)
        rows_before = len(self.rows)
        for number in self.due():
            self._drop(number, "evicted_expired")
        for number in [n for n, counted in self.waiting.items() if self._is_due(counted)]:
            del self.waiting[number]
            self.causes["counters_expired"] += 1
        self.step = self.next_step
        self.is_new_time = False
        first = dict.fromkeys(new, 0)
        uses_of_ids = uses or [ALL] * len(ids)
        for number, added, (inserts, counts) in zip(ids, adds, uses_of_ids, strict=True):
            if number in first and inserts and counts:
                first[number] += added
            self.causes["ids_seen"] += 1
            self.causes["hits" if number in self.rows else "unseen"] += 1
            if number in self.rows:
                row = self.rows[number]
                if counts:
                    row.count = min(self.present(row) + added, MOST)
                    row.last_seen, row.time = self.step, self.clock
            elif number not in new:
                self.causes["refused"] += 1
                if self.counts_first and inserts and counts:
                    came = self.waiting[number].count if number in self.waiting else 0
                    self.waiting[number] = Counted(self.step, came + 1, self.clock)
        if self.makes_room:
            self._make_room(len(new))
        for number, count in new.items():
            self.waiting.pop(number, None)
            self._start(number, self.step, count if self.unit is None else first[number])
        self._drop_counters(rows_before)
        self.allowed &= self.waiting.keys()
        return [self.rows[number].born if number in self.rows else None for number in ids]

    def _seen(self, step: int) -> set[int]:
        """Returns the ids with a row that a forward of a step has seen; assigned rows have count 0."""
        return {n for n, row in self.rows.items() if row.last_seen == step and row.count}

    def _make_room(self, new: int) -> None:
        surplus = len(self.rows) + new - self.limit
        if surplus > 0:
            others = sorted(set(self.rows) - self._seen(self.step), key=self._score)
            for number in others[: max(surplus, self.limit // 64)]:
                self._drop(number, "evicted_full")

    def _score(self, number: int, step: int | None = None) -> tuple[int, int]:
        row = self.rows[number]
        if self.own is not None:
            time = (row.time or 0) if self.is_timed else -1
            told = (as_int64([one]) for one in (row.last_seen, row.count, time))
            return (int(self.own.score(*told, step or self.step)), mix64(number))
        if self.drops_oldest:
            return (row.last_seen, mix64(number))
        if self.half_steps is None and self.half_time is None:
            return (row.count, mix64(number))
        return (min(math.floor(256 * self._decayed(row)), MOST), mix64(number))

    def _decayed(self, row: Row) -> Fraction:
        """Returns the count of a row, halved once for each half-life that has begun since it was seen."""
        begun = 0
        if self.half_steps is not None:
            begun = self.step // self.half_steps - row.last_seen // self.half_steps
        elif self.half_time is not None:
            begun = (self.clock or 0) // self.half_time - (row.time or 0) // self.half_time
        return Fraction(row.count, 2 ** max(0, begun))

    def present(self, row: Row) -> int:
        """Returns the count of a row at the present step, a half rounded up."""
        return math.floor(self._decayed(row) + Fraction(1, 2))

    def _drop_counters(self, rows: int) -> None:
        most = min(self.limit, max(knobs.LEAST_COUNTERS, 4 * rows))
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
        self.allowed -= {*ids}
        for number in set(ids):
            self.waiting.pop(number, None)
            if number in self.rows:
                self._drop(number, "erased")

    def assign(self, ids: list[int]) -> None:
        absent = set(ids) - set(self.rows)
        if absent and not self.makes_room and len(self.rows) + len(absent) > self.limit:
            raise TooFew(len(self.rows), len(absent))
        # A time that was set after the last step is the time of the next step.
        step = self.step + (self.is_timed and self.is_new_time)
        for number in absent:
            self.waiting.pop(number, None)
            self._start(number, step, 0)

    def set_time(self, time: int) -> None:
        """Sets the time of later training forwards. The first time holds for all earlier forwards too."""
        self.is_new_time |= self.clock not in (None, time) and not self.is_open
        for row in [*self.rows.values(), *self.waiting.values()]:
            if self.clock is None or row.last_seen >= self.next_step:
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
        return row.time or 0 if self.is_timed else row.last_seen

    def count(self, number: int) -> int:
        if number in self.rows:
            return self.present(self.rows[number])
        return self.waiting[number].count if number in self.waiting else 0
