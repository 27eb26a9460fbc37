"""RowLife: admission and eviction of one table, with the scores, counters and clock that they need.

Legend: M distinct ids, R rows in use, Q waiting ids, K times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy

import torch
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.initializers import table_key
from torchrec_dyn.life.admission import (
    FREED_SHARE,
    SHARES_AHEAD,
    AdmissionCounters,
    AdmissionRule,
    most_counters,
)
from torchrec_dyn.life.clock import Clock
from torchrec_dyn.life.decay import Decay
from torchrec_dyn.life.expiry import AgeLimit
from torchrec_dyn.life.lowest_rows import ListedRows, Search, lowest_rows
from torchrec_dyn.life.scores import NO_STEP, ScoredMaps, Scores
from torchrec_dyn.policies import (
    LeastFrequentlyUsed,
    LowestScore,
    age_limit_of,
    is_timed,
    replacement_of,
)
from torchrec_dyn.storage import TABLES, IdMap, RowChange

# A table that expires by time is noticed after this many training steps without a time.
STEPS_WITHOUT_TIME = 100


class RowLife:
    """Scores, counters and clock of one table, and the rules of its policies.

    The config has at least one policy. `row_limit` is that of this rank.

    Attributes:
        rule: who is admitted.
        waiting: counters of the waiting ids, None unless `config.counts_waiting`.
        age_limit: when rows expire; None if they do not.
        clock: the time that the user sets.
        ages: True if rows expire.
        expires_by_time: True if rows expire by time, not by steps.
        is_timed: True if rows expire, or counts decay, by time.
        decays: True if counts decay.
        unit: the weight of one unit of a count, None if a count is a number of occurrences.
        replaces: True if a full table evicts its lowest rows.
        is_unscored: True if rows were loaded without scores, and no training step has run since.
    """

    def __init__(
        self,
        config: DynamicTableConfig,
        name: str,
        row_limit: int,
        shift: int,
        device: torch.device,
    ) -> None:
        self.scores = Scores(shift, device)
        self.clock = Clock()
        self._admission = config.admission
        key = table_key(config.seed, name, "admission")
        self.rule = AdmissionRule(config.admission, key, config.counts_waiting)
        limit, replacement = age_limit_of(config.eviction), replacement_of(config.eviction)
        self.age_limit = None if limit is None else AgeLimit(limit, device)
        self.waiting: AdmissionCounters | None = None
        if config.counts_waiting:
            most = most_counters(config.admission, row_limit, rows=row_limit)
            ages = None if limit is None else AgeLimit(limit, device)
            self.waiting = AdmissionCounters(most, device, ages)
        self.ages = limit is not None
        self.expires_by_time = limit is not None and limit.time is not None
        self._decay: Decay | None = None
        self._by_count = False
        if isinstance(replacement, LeastFrequentlyUsed | LowestScore):
            self._by_count = True
            if (replacement.half_life_steps or replacement.half_life_time) is not None:
                self._decay = Decay(replacement)
        self.decays = self._decay is not None
        self.is_timed = is_timed(config.eviction)
        self.replaces = replacement is not None
        self.is_unscored = False
        self._steps_without_time = 0
        self.unit = replacement.unit if isinstance(replacement, LowestScore) else None
        self._row_limit = row_limit
        self._device = device
        self._listed = ListedRows(device)

    def first_seen(self, step: int) -> int:
        """Returns `last_seen` of rows that ids get at `step`: never older than the present time.

        A new time begins at the next step.
        """
        return max(step, self.clock.present_step)

    def has_missed_time(self) -> bool:
        """Counts a step in which nothing can expire for want of a time; True once, at the hundredth."""
        if not self.is_timed or self.clock.now is not None:
            return False
        self._steps_without_time += 1
        return self._steps_without_time == STEPS_WITHOUT_TIME

    def next_look(self, step: int) -> tuple[int, int]:
        """Returns when expired rows must be looked for again, after those expired at `step` were removed.

        Of a life whose rows expire. Returns a step and a horizon: the next step, and the next step after one
        at which the clock was set and `passes` is False.
        """
        assert self.age_limit is not None
        horizon = self.age_limit.next_horizon
        if self.waiting is not None and self.waiting.age_limit is not None:
            horizon = min(horizon, self.waiting.age_limit.next_horizon)
        if self._decay is not None and self._decay.is_timed:
            return step, horizon  # every step forgets times, after the counts were halved
        if self.age_limit.steps is not None:
            return horizon + self.age_limit.steps, horizon
        return (step if self.clock.now is None else NO_STEP), horizon

    def passes(self, step: int, look: int) -> bool:
        """Forgets times that no row needs; returns False if rows or counters may expire at `step`.

        `look` is the horizon of `next_look`.
        """
        assert self.age_limit is not None
        horizon = self.age_limit.horizon(step, self.clock)
        if horizon >= look:
            return False
        self.clock.forget_before(horizon)
        return True

    def drop_expired(self, step: int) -> None:
        """Drops the rows and counters expired at `step` from their lists, after they were removed."""
        self.is_unscored = False
        if self.waiting is not None and self.waiting.age_limit is not None:
            self.waiting.age_limit.drop_expired(step, self.clock)
        if self.age_limit is not None:
            self.age_limit.drop_expired(step, self.clock)
            self.clock.forget_before(self.age_limit.horizon(step, self.clock))

    def reserve(self, rows: int, counters: int) -> None:
        """Makes room for the scores of `rows` rows, and of `counters` more counters."""
        if self.waiting is not None and counters:
            self.waiting.reserve_scores(counters)
        self.scores.store.reserve(rows)

    def search_counters(self, table: int, step: int, rows: int, more: int = 0) -> Search | None:
        """Returns the search for the counters above their limit, None if none is above.

        `rows` is the number of rows in use before this step, and `more` counters come on top.
        """
        if self.waiting is None:
            return None
        most = most_counters(self._admission, self._row_limit, rows)
        return self.waiting.search(table, step, most, more)

    def drop_surplus_counters(self, step: int, rows: int) -> None:
        """Drops the counters above their limit. As `search_counters`."""
        search = self.search_counters(0, step, rows)
        if self.waiting is None or search is None:
            return
        found = lowest_rows([search], self.waiting.id_map.slots, self.waiting.handle)
        RowChange({0: self.waiting}, 1, self.waiting.handle, found).commit()

    def search(self, table: int, surplus: int, step: int, high: int) -> Search:
        """Returns the search for the rows to evict for `surplus` new rows; no row was seen in this step.

        At least a 64th of the limit is evicted. By age one search lists rows for several evictions.
        """
        share = self._row_limit // FREED_SHARE
        exact = self.search_exactly(table, max(surplus, share), step, high)
        return exact._replace(
            listed=None if self._by_count else self._listed, ahead=SHARES_AHEAD * share
        )

    def search_exactly(self, table: int, surplus: int, step: int, high: int) -> Search:
        """Returns the search for exactly the `surplus` lowest scores when `step` begins.

        Rows seen in `step` are never among them. Depends on ids and their scores only.
        """
        begins = None if self._decay is None else self._decay.begins(step, self.clock)
        return Search(table, high, surplus, step, self._by_count, begins)

    def lowest_exactly(
        self, surplus: int, step: int, id_map: IdMap, high: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the ids and rows of `search_exactly`, of a table with this map."""
        handle, like = ScoredMaps([id_map], [self.scores]).get(), id_map.slots
        return lowest_rows([self.search_exactly(0, surplus, step, high)], like, handle)[:2]

    def counts_as_of(
        self, steps: Tensor, last_seen: Tensor, counts: Tensor, step: int, clock: Clock
    ) -> Tensor:
        """Returns counts [M] of scores as they are at steps [M], not before last_seen [M], all int64.

        `step` is the present one, `clock` the one that counts.
        """
        if self._decay is None:
            return counts
        return self._decay.as_of(steps, last_seen, counts, self._decay.begins(step, clock))

    def prepare_touch(self, rows: Tensor, times: Tensor | None, step: int) -> Callable[[], None]:
        """Returns a call that writes the counts of the rows seen in `step`.

        As `Decay.touched`, for a life whose counts decay.
        """
        assert self._decay is not None
        begins = self._decay.begins(step, self.clock)
        rows, counts = self._decay.touched(self.scores, rows, times, begins)
        write = self.scores.prepare_write(rows, torch.full_like(rows, step), counts)

        def touch() -> None:
            write()
            if self.age_limit is None:  # which needs the times of its own window
                self.clock.forget_before(begins[0])

        return touch

    def caught_up(self, step: int, high: int) -> RowLife:
        """Returns a life in which rows loaded without scores were last seen at `step`, with count 0.

        This life does not change, so a load that fails continues with it. If the rows have scores, this life
        is returned. `high` is the high-water mark of its row numbers.
        """
        if not self.is_unscored:
            return self
        made, scores = copy(self), Scores(self.scores.store.shift, self._device)
        scores.store.reserve(high)
        for start in range(0, high, knobs.IDS_SCORED_TOGETHER):
            rows = torch.arange(
                start, min(high, start + knobs.IDS_SCORED_TOGETHER), device=self._device
            )
            last_seen, counts = self.scores.read(rows)
            counts.masked_fill_(last_seen >= 0, 0)
            scores.write(rows, torch.where(last_seen >= 0, step, last_seen), counts)
        made.scores = scores
        return made

    def forget_listed(self) -> None:
        """Drops the listed rows. Call it after scores or counters were replaced outside a step."""
        TABLES.renew()  # groups look at the table again
        self._listed = ListedRows(self._device)
        if self.waiting is not None:
            self.waiting.forget_listed()
        if self.age_limit is not None:
            self.age_limit.forget_listed()

    def last_seen(self, rows: Tensor) -> Tensor:
        """Returns the last occurrence of rows [M] int64: a step, or a time if `is_timed`; -1 becomes -1."""
        steps, _ = self.scores.read(rows)
        return self.clock.times_of(steps) if self.is_timed else steps

    def counts(self, ids: Tensor, rows: Tensor, step: int) -> Tensor:
        """Returns the counts at `step` of ids [M] int64, also of waiting ids; rows [M] int64, -1 for none."""
        last_seen, counts = self.scores.read(rows)
        if self._decay is not None:
            begins = self._decay.begins(step, self.clock)
            counts = self._decay.present(last_seen, counts, begins)
        return counts if self.waiting is None else counts + self.waiting.counts(ids)

    def export(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns the saved form of the life; rows [R] int64 are those of all ids in canonical order.

        Returns:
            "last_seen" [R] int64 in steps, "count" [R] int64, "clock" [2, K] int64 on the CPU (first steps
            and their times) and, with counters, "waiting" [3, Q] int64 (ids, last_seen, counts).
        """
        last_seen, counts = self.scores.read(rows)
        state = {"last_seen": last_seen, "count": counts, "clock": self.clock.export()}
        return state if self.waiting is None else {**state, "waiting": self.waiting.export()}

    def load(self, state: Mapping[str, Tensor], rows: Tensor, step: int) -> None:
        """Loads a saved life.

        Rows without a saved score get the score of rows assigned now. Without a saved clock or saved
        counters, the present clock and counters stay.

        state: as `export` returns it; each part may be missing. rows [R] int64 are those of the saved ids in
        their order; `step` is the table's.
        """
        if "clock" in state and self.is_timed:
            self.clock = Clock.load(state["clock"])
        now = torch.full_like(rows, max(step, self.clock.present_step))
        never = torch.zeros_like(rows)
        saved = [state.get("last_seen", now), state.get("count", never)]
        self.scores.write(rows, *(scores.to(self._device) for scores in saved))
        self.is_unscored = "last_seen" not in state
        if self.waiting is not None and "waiting" in state:
            self.waiting.write(*state["waiting"].to(self._device).contiguous())
