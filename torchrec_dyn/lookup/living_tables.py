"""LivingTables: the trained tables of a group that have a life, and what a step needs of all of them.

Legend: T tables of the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from torchrec_dyn.life import (
    EVERY_ID,
    NO_STEP,
    AdmissionRule,
    AdmissionRules,
    Admitted,
    Asked,
    CounterTables,
    RowLife,
)
from torchrec_dyn.storage import CLOCKS
from torchrec_dyn.table import NewIds, TableShard

_NO_LIMIT = (1 << 63) - 1


class ExpirySchedule:
    """When tables must be asked for expired rows or counters again (`RowLife.next_look`)."""

    def __init__(self, lives: Mapping[int, RowLife]) -> None:
        # The step of the shared counters, and the horizon if rows expire by time.
        self._looks = {t: 0 for t, life in lives.items() if life.ages}
        self._timed = {t: 0 for t in self._looks if lives[t].expires_by_time}
        self._next_look = 0 if self._looks else NO_STEP
        self._clocks: object = None

    def due(self, tables: Mapping[int, TableShard], step: int) -> list[int]:
        """Returns the numbers of the tables of which rows, or counters, may expire in a step."""
        is_set = bool(self._timed) and self._clocks is not CLOCKS.now
        if step < self._next_look and not is_set:
            return []
        due = {t for t, look in self._looks.items() if look <= step}
        for t in self._timed.keys() - due if is_set else ():
            life = tables[t].life
            if life is not None and not life.passes(tables[t].next_step, self._timed[t]):
                due.add(t)
        if is_set and not due:
            self._clocks = CLOCKS.now
        return sorted(due)

    def note_looked(self, tables: Mapping[int, TableShard], due: Sequence[int]) -> None:
        """Notes that the expired rows of the tables that were `due` are removed in the present step."""
        for t in due:
            life = tables[t].life
            assert life is not None
            step, horizon = life.next_look(tables[t].step)
            self._looks[t] = step - tables[t].own.step
            if t in self._timed:
                self._timed[t] = horizon
        self._next_look, self._clocks = min(self._looks.values(), default=NO_STEP), CLOCKS.now


class LivingTables:
    """The trained tables of a group that have a life, by number in the group.

    Attributes:
        lives: their lives; without any, no table of the group has a life.
        numbers: their numbers.
        most_steps: the most steps of one before the forwards of the shared counters.
        counting: the counters of waiting ids, of those that have them.
        counters: these as ops take them.
        asking: numbers of those whose waiting ids the user's own policy admits.
        decaying: numbers of those whose counts decay.
        units: the weight of one unit of a count, of those that count weights.
        row_limits: [T] int64, the limit of each table that evicts when it is full, for other tables 2^63 - 1.
        least_limit: the least of `row_limits`.
        watched: numbers of tables whose policies may act in a step although all ids have rows, beside those
            of `due`: at first all, later those that the last step changed.
    """

    def __init__(self, trained: Mapping[int, TableShard], count: int) -> None:
        self._trained = trained
        self.lives = lives = {t: own.life for t, own in trained.items() if own.life is not None}
        self.numbers = list(lives)
        self.most_steps = max((trained[t].own.step for t in lives), default=0)
        self.counting = {t: own.waiting for t, own in lives.items() if own.waiting is not None}
        self.counters = CounterTables(self.counting, count)
        self.asking = [t for t, life in lives.items() if life.asks]
        self.decaying = [t for t, life in lives.items() if life.decays]
        self.units = {t: life.unit for t, life in lives.items() if life.unit is not None}
        limits = [self._limit_of(t) for t in range(count)]
        self.row_limits, self.least_limit = np.array(limits), min(limits)
        self.watched = set(self.numbers)
        self._rules = AdmissionRules([self._rule_of(t) for t in range(count)])
        self._expiry = ExpirySchedule(lives)

    def _limit_of(self, number: int) -> int:
        life = self.lives.get(number)
        return self._trained[number].row_limit if life is not None and life.replaces else _NO_LIMIT

    def _rule_of(self, number: int) -> AdmissionRule:
        return self.lives[number].rule if number in self.lives else EVERY_ID

    def due(self, step: int) -> list[int]:
        """Returns the numbers of tables of which rows, or counters, may expire in a step.

        `step` is the next one of the shared counters.
        """
        return self._expiry.due(self._trained, step)

    def note_step(self, due: Sequence[int], acting: set[int]) -> None:
        """Notes a step: its tables that were `due` have lost their expired rows, and these have changed."""
        for t in {*self.watched, *due, *acting} & self.lives.keys():
            self.lives[t].drop_expired(self._trained[t].step)
        self.watched = acting
        if due:
            self._expiry.note_looked(self._trained, due)

    def admit(self, new: NewIds, asked: Asked | None, sums: bool) -> Admitted:
        """Decides the admission of new ids in the next step. As `AdmissionRules.admit`."""
        counters = self.counters.get()
        return self._rules.admit(
            new.ids,
            new.counts,
            new.ends,
            self._answered(new, asked),
            counters,
            lambda t: self._trained[t].next_step,
            sums,
        )

    def _answered(self, new: NewIds, asked: Asked | None) -> Asked | None:
        """Returns what is asked for new ids, with the answers of the user's own policies."""
        if not self.asking:
            return asked
        asks = torch.ones_like(new.ids, dtype=torch.bool) if asked is None else asked.asks.clone()
        for t in self.asking:
            own = slice(new.ends[t], new.ends[t + 1])
            asks[own] = self.lives[t].answers(new.ids[own], self._trained[t].next_step)
        return Asked(asks, None if asked is None else asked.counted)
