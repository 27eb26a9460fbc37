"""RowLife: admission and eviction of one table, with the scores, counters and clock that they need.

Legend: M distinct ids, R rows in use, Q waiting ids, K times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import NamedTuple

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
from torchrec_dyn.life.lowest_rows import ListedRows, OwnScores, Search, lowest_rows, lowest_scored
from torchrec_dyn.life.own_answers import admitted_by, scored_by
from torchrec_dyn.life.scores import NO_STEP, ScoredMaps, Scores
from torchrec_dyn.own_policies import OwnAdmission, OwnEviction
from torchrec_dyn.policies import (
    LeastFrequentlyUsed,
    LowestScore,
    age_limit_of,
    is_timed,
    replacement_of,
)
from torchrec_dyn.storage import TABLES, IdMap, RowChange, RowStore

# A table that expires by time is noticed after this many training steps without a time.
STEPS_WITHOUT_TIME = 100
# Times that OwnEviction.keeps_times keeps in a table whose rows do not expire: at most 2 MiB.
TIMES_KEPT = 1 << 16


class SearchedRows(NamedTuple):
    """The rows of a table that a search may find: their map, weights, and high-water mark."""

    id_map: IdMap
    weights: RowStore
    high: int


class RowLife:
    """Scores, counters and clock of one table, and the rules of its policies.

    The config has at least one policy. `row_limit` is that of this rank.

    Attributes:
        rule: who is admitted.
        asks: True if the user's own policy admits waiting ids.
        waiting: counters of the waiting ids, None unless `config.counts_waiting`.
        age_limit: when rows expire; None if they do not.
        clock: the time that the user sets.
        ages: True if rows expire.
        expires_by_time: True if rows expire by time, not by steps.
        is_timed: True if rows expire, counts decay, or the user's scores look, by time.
        decays: True if counts decay.
        unit: the weight of one unit of a count, None if a count is a number of occurrences.
        replaces: True if a full table evicts its lowest rows.
        scores_by_own: True if the user's own policy scores them.
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
        self._name = name
        self.scores = Scores(shift, device)
        self.clock = Clock()
        self._admission = config.admission
        self.asks = isinstance(config.admission, OwnAdmission)
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
        self._own = replacement if isinstance(replacement, OwnEviction) else None
        self.scores_by_own = self._own is not None
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

    def set_time(self, time: int, step: int) -> None:
        """Sets the time from `step` on. As `Clock.set`."""
        self.clock.set(time, step)
        if self._own is not None and self.age_limit is None:
            self.clock.keep_last(TIMES_KEPT)

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

    def answers(self, ids: Tensor, step: int) -> Tensor:
        """Returns which ids [M] int64 without a row the user's own policy admits at `step`, [M] bool."""
        assert self.waiting is not None and isinstance(self._admission, OwnAdmission)
        last_seen, counts = self.waiting.read(self.waiting.id_map.lookup(ids))
        admitted = torch.zeros_like(ids, dtype=torch.bool)
        # Of ids that this step has counted the answer was no, in an earlier forward of it.
        places = ((last_seen >= 0) & (last_seen < step)).nonzero().flatten()
        if len(places):
            asked = self._admission, self._where, ids[places], counts[places], step - 1
            admitted[places] = admitted_by(*asked)
        return admitted

    @property
    def _where(self) -> str:
        return f"DynamicTable({self._name!r})"

    def _own_scores(self, step: int, searched: SearchedRows) -> OwnScores | None:
        """Returns the user's scores of rows at `step`, None without such a policy."""
        policy = self._own
        if policy is None:
            return None

        def of(rows: Tensor, last_seen: Tensor, counts: Tensor) -> Tensor:
            times = self.clock.times_of(last_seen) if self.is_timed else torch.full_like(rows, -1)
            weights = searched.weights.read(rows).float() if policy.reads_rows else None
            return scored_by(policy, self._where, (last_seen, counts, times), step, weights)

        return OwnScores(searched.id_map, self.scores, of)

    def search(self, table: int, surplus: int, step: int, searched: SearchedRows) -> Search:
        """Returns the search for the rows to evict for `surplus` new rows; no row was seen in this step.

        At least a 64th of the limit is evicted. By age one search lists rows for several evictions.
        """
        share = self._row_limit // FREED_SHARE
        exact = self.search_exactly(table, max(surplus, share), step, searched)
        by_age = not self._by_count and self._own is None
        return exact._replace(listed=self._listed if by_age else None, ahead=SHARES_AHEAD * share)

    def search_exactly(self, table: int, surplus: int, step: int, searched: SearchedRows) -> Search:
        """Returns the search for exactly the `surplus` lowest scores when `step` begins.

        Rows seen in `step` are never among them. Depends on ids and their scores only.
        """
        begins = None if self._decay is None else self._decay.begins(step, self.clock)
        own = self._own_scores(step, searched)
        return Search(table, searched.high, surplus, step, self._by_count, begins, own=own)

    def lowest_exactly(
        self, surplus: int, step: int, searched: SearchedRows
    ) -> tuple[Tensor, Tensor]:
        """Returns the ids and rows of `search_exactly`."""
        handle, like = ScoredMaps([searched.id_map], [self.scores]).get(), searched.id_map.slots
        return lowest_rows([self.search_exactly(0, surplus, step, searched)], like, handle)[:2]

    def lowest_merged(
        self, surplus: int, step: int, parts: Sequence[tuple[RowLife, SearchedRows, Tensor | None]]
    ) -> Tensor:
        """Returns the ids of `search_exactly` in a table that will be made of several parts, [M] int64.

        Of a life in which the user's scores decide. Each part has a life, and rows that are left out.
        """
        scored = []
        for life, searched, left_out in parts:
            own = life._own_scores(step, searched)
            assert own is not None
            scored.append(own._replace(left_out=left_out))
        return lowest_scored(scored, step, surplus)[0]

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
