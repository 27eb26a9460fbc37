"""RowLife: admission and eviction of one table, with the scores, counters and clock that they need.

Legend: M distinct ids, R rows in use, Q waiting ids, K times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    AdmissionChance,
    AdmissionCounters,
    Counters,
    Drop,
    most_counters,
)
from torchrec_dyn.life.clock import Clock
from torchrec_dyn.life.count_candidates import CountCandidates
from torchrec_dyn.life.decay import Decay, DecayedScores
from torchrec_dyn.life.eviction_candidates import EvictionCandidates
from torchrec_dyn.life.expiry import AgeLimit
from torchrec_dyn.life.scores import NO_STEP, Scores
from torchrec_dyn.policies import (
    MOST_COUNT,
    AdmitAfter,
    AdmitWithProbability,
    LeastFrequentlyUsed,
    LowestScore,
    Never,
    age_limit_of,
    is_timed,
    replacement_of,
)
from torchrec_dyn.storage import TABLES, HostRead, IdMap, change, gather_pair, places_of

# A table that expires by time is noticed after this many training steps without a time.
STEPS_WITHOUT_TIME = 100


class Asked(NamedTuple):
    """What the features of M ids without a row ask for, if some do not insert or do not count.

    Attributes:
        asks: [M] bool, True if a feature that inserts has the id.
        counted: [M] int64, occurrences in this step that count for admission: of features that insert.
    """

    asks: Tensor
    counted: Tensor

    def slice(self, chosen: slice) -> Asked:
        """Returns what is asked for a range of the ids."""
        return Asked(self.asks[chosen], self.counted[chosen])

    def admit_all(self, ids: Tensor, occurrences: Tensor) -> HostRead[Decision]:
        """Admits the ids that ask. As `RowLife.admit`, of a table without an admission policy."""
        admitted, occurred = yield [
            self.asks.count_nonzero(),
            occurrences.masked_fill(self.asks, 0).sum(),
        ]
        places = places_of(self.asks, admitted)
        return Decision(ids, self.counted, admitted, places, refused_occurrences=occurred)


class Decision(NamedTuple):
    """The admission of ids without a row.

    Attributes:
        ids: [M] int64, distinct.
        counts: [M] int64, occurrences of each id that count; with counters, also those in earlier steps.
        num_admitted: number of admitted ids, K.
        admitted: [K] int64, places of the admitted ids, ascending; None if all are admitted.
        refused: [M - K] int64, places of the refused ids, ascending, without those that do not ask or count;
            None if all are admitted, or if there is no admission policy.
        refused_occurrences: number of occurrences of all ids that are not admitted, in this step.
        waiting: [W] int64, places of the admitted ids that have a counter; None without counters.
        num_new: number of refused ids that have no counter.
        counters: the present counters of the ids; None without counters.
        scores: [M] int64, what each row begins to count with; None: `counts`.
    """

    ids: Tensor
    counts: Tensor
    num_admitted: int
    admitted: Tensor | None = None
    refused: Tensor | None = None
    refused_occurrences: int = 0
    waiting: Tensor | None = None
    num_new: int = 0
    counters: Counters | None = None
    scores: Tensor | None = None

    def first_counts(self) -> Tensor:
        """Returns what the rows of the admitted ids begin to count with, [K] int64."""
        counts = self.counts if self.scores is None else self.scores
        return counts if self.admitted is None else counts.index_select(0, self.admitted)

    def at(self, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the ids at places [K] int64 and their counts; at all places without `places`."""
        if places is None:
            return self.ids, self.counts
        return self.ids.index_select(0, places), self.counts.index_select(0, places)


class RowLife:
    """Scores, counters and clock of one table, and the rules of its policies.

    The config has at least one policy. `row_limit` is that of this rank.

    Attributes:
        waiting: counters of the waiting ids, None unless `config.counts_waiting`.
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
        self.waiting: AdmissionCounters | None = None
        if config.counts_waiting:
            most = most_counters(config.admission, row_limit, rows=row_limit)
            self.waiting = AdmissionCounters(most, device)
        self._admission = config.admission
        self._chance: AdmissionChance | None = None
        if isinstance(config.admission, AdmitWithProbability):
            key = table_key(config.seed, name, "admission")
            self._chance = AdmissionChance(config.admission.p, key, device)
        age_limit, replacement = age_limit_of(config.eviction), replacement_of(config.eviction)
        self._age_limit = None if age_limit is None else AgeLimit(age_limit, device)
        self._waiting_age_limit = None if age_limit is None else AgeLimit(age_limit, device)
        self.ages = age_limit is not None
        self.expires_by_time = age_limit is not None and age_limit.time is not None
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
        self._candidates = self._no_candidates()
        self._listed_in: list[int] = []  # `Decay.begins` at the search for the listed candidates

    def _no_candidates(self) -> EvictionCandidates | CountCandidates:
        if self._by_count:
            return CountCandidates(self._device)
        return EvictionCandidates(self._device)

    def prepare_rows(
        self, ids: Tensor, rows: Tensor, step: int, counts: Tensor | None
    ) -> Callable[[], None]:
        """Returns the commit that writes the scores of fresh rows; outside training it drops counters, too.

        ids [M] int64; rows [M] int64; `step`, in training the present one, else the last; counts [M] int64,
        None for rows assigned outside training, which were never seen.
        """
        is_edit = counts is None and self.waiting is not None
        drop = self.waiting.drop_of(ids) if is_edit and self.waiting is not None else None
        # A score is never older than the present time: a new time begins at the next step.
        step = max(step, self.clock.present_step)
        counts = torch.zeros_like(rows) if counts is None else counts.clamp(max=MOST_COUNT)
        last_seen, keys, list_them = torch.full_like(rows, step), counts, None
        if self._decay is not None:
            keys = self._decay.keys(last_seen, counts, self._decay.begins(step, self.clock))
        if isinstance(self._candidates, CountCandidates):
            list_them = self._candidates.prepare_add(ids, keys)

        def add() -> None:
            if self.waiting is not None and drop is not None:
                self.waiting.drop(drop)
            self.scores.write(rows, last_seen, counts)
            if list_them is not None:
                list_them()

        return add

    def forget_rows(self, rows: Tensor, blank: tuple[Tensor, Tensor]) -> None:
        """Marks rows [M] int64 of removed ids as rows without an id; `blank` are their `Scores.blank`."""
        self.scores.write(rows, *blank)
        if isinstance(self._candidates, CountCandidates):
            self._candidates.forget(rows)

    def has_missed_time(self) -> bool:
        """Counts a step in which nothing can expire for want of a time; True once, at the hundredth."""
        if not self.is_timed or self.clock.now is not None:
            return False
        self._steps_without_time += 1
        return self._steps_without_time == STEPS_WITHOUT_TIME

    def expired(
        self, step: int, id_map: IdMap, high: int
    ) -> HostRead[tuple[tuple[Tensor, Tensor], Drop | None]]:
        """Returns the ids and rows expired at `step`, and the drop of the expired counters; removes nothing.

        Of a life whose rows expire.
        """
        age_limit, waiting = self._age_limit, self._waiting_age_limit
        assert age_limit is not None
        due = age_limit.num_due(step, self.clock, self.scores, id_map, high)
        if self.waiting is None or waiting is None:
            return (yield from age_limit.expired(due, self.scores)), None
        waiting_due = self.waiting.num_due(waiting, step, self.clock)
        return (
            yield from gather_pair(
                age_limit.expired(due, self.scores), self.waiting.expired(waiting, waiting_due)
            )
        )

    def next_look(self, step: int) -> tuple[int, int]:
        """Returns when `expired` must be called again, after those expired at `step` were removed.

        Of a life whose rows expire. Returns a step and a horizon: the next step, and the next step after one
        at which the clock was set and `passes` is False.
        """
        assert self._age_limit is not None
        horizon = self._age_limit.next_horizon
        if self.waiting is not None and self._waiting_age_limit is not None:
            horizon = min(horizon, self._waiting_age_limit.next_horizon)
        if self._decay is not None and self._decay.is_timed:
            return step, horizon  # every step forgets times, after the counts were halved
        if self._age_limit.steps is not None:
            return horizon + self._age_limit.steps, horizon
        return (step if self.clock.now is None else NO_STEP), horizon

    def passes(self, step: int, look: int) -> bool:
        """Forgets times that no row needs; returns False if rows or counters may expire at `step`.

        `look` is the horizon of `next_look`.
        """
        assert self._age_limit is not None
        horizon = self._age_limit.horizon(step, self.clock)
        if horizon >= look:
            return False
        self.clock.forget_before(horizon)
        return True

    def drop_expired(self, step: int) -> None:
        """Drops the rows and counters expired at `step` from the candidates, after they were removed."""
        self.is_unscored = False
        if self._waiting_age_limit is not None:
            self._waiting_age_limit.drop_expired(step, self.clock)
        if self._age_limit is not None:
            self._age_limit.drop_expired(step, self.clock)
            self.clock.forget_before(self._age_limit.horizon(step, self.clock))

    def admit(
        self, ids: Tensor, occurrences: Tensor, step: int, asked: Asked | None = None
    ) -> HostRead[Decision]:
        """Decides the admission of ids [M] int64, distinct, without a row; writes nothing.

        occurrences [M] int64 are those in this step. `asked` is None if all ids ask and all occurrences
        count.
        """
        counts = occurrences if asked is None else asked.counted
        counters = None if self.waiting is None else self.waiting.waiting(ids)
        if counters is not None:
            counts = (counts + counters.counts).clamp_(max=MOST_COUNT)
        is_admitted = self._is_admitted(ids, counts, step)
        if is_admitted is None:
            if asked is not None:
                return (yield from asked.admit_all(ids, occurrences))
            return Decision(ids, occurrences, ids.numel())
        masks = [is_admitted, ~is_admitted]
        if counters is not None:
            is_waiting = counters.rows >= 0
            masks += [is_admitted & is_waiting, is_waiting]
        if asked is not None:
            # An id of which no occurrence counts is never admitted, and its counter stays as it is.
            is_asking = asked.counted > 0
            masks = [mask & is_asking for mask in masks]
        left_out = occurrences.masked_fill(masks[0], 0).sum()
        occurred, admitted, refused, *of_counters = yield [
            left_out,
            torch.stack(masks).count_nonzero(1),
        ]
        places = places_of(masks[0], admitted), places_of(masks[1], refused)
        if counters is None:
            return Decision(ids, counts, admitted, *places, occurred)
        both, waiting = of_counters
        new = refused - (waiting - both)
        were_waiting = places_of(masks[2], both)
        return Decision(ids, counts, admitted, *places, occurred, were_waiting, new, counters)

    def _is_admitted(self, ids: Tensor, counts: Tensor, step: int) -> Tensor | None:
        """Returns which ids [M] with counts [M] int64 are admitted, [M] bool; None if all that ask."""
        if isinstance(self._admission, AdmitAfter):
            return counts >= self._admission.count
        if self._chance is not None:
            return self._chance.admit(ids, counts, step)
        if isinstance(self._admission, Never):
            return torch.zeros_like(ids, dtype=torch.bool)
        return None

    def count_waiting(self, decision: Decision, step: int, written: change) -> None:
        """Drops the counters of the admitted ids, and writes those of the refused ids, before a commit."""
        waiting, counters = self.waiting, decision.counters
        if waiting is None or counters is None:
            return
        written.on_error(waiting.undo(decision.ids, counters))
        if decision.waiting is not None:
            ids = decision.ids.index_select(0, decision.waiting)
            waiting.drop(waiting.drop_found(ids, counters.rows.index_select(0, decision.waiting)))
        if decision.refused is not None:
            ids, counts = decision.at(decision.refused)
            rows = counters.rows.index_select(0, decision.refused)
            waiting.write_found(ids, rows, torch.full_like(ids, step), counts, decision.num_new)

    def reserve(self, rows: int, counters: int) -> None:
        """Makes room for the scores of `rows` rows, and for `counters` more counters."""
        if self.waiting is not None and counters:
            self.waiting.reserve(counters)
        self.scores.store.reserve(rows)

    def surplus_counters(self, step: int, rows: int) -> HostRead[Drop | None]:
        """Returns the drop of the counters above their limit, None if none is above; drops nothing.

        `rows` is the number of rows in use before this step.
        """
        if self.waiting is None:
            return None
        most = most_counters(self._admission, self._row_limit, rows)
        return (yield from self.waiting.surplus(step, most))

    def lowest(
        self, surplus: int, step: int, id_map: IdMap, high: int
    ) -> HostRead[tuple[Tensor, Tensor]]:
        """Returns the ids and rows to evict for `surplus` new rows; no row was seen in this step.

        At least a 64th of the limit is evicted, and one search lists candidates for several evictions:
        searches are rare.
        """
        share = self._row_limit // FREED_SHARE
        most, ahead = max(surplus, share), SHARES_AHEAD * share
        if self._decay is None:
            return (
                yield from self._candidates.lowest(self.scores, id_map, high, step, most, ahead)
            )
        begins = self._decay.begins(step, self.clock)
        if self._listed_in != begins:  # counts have fallen since the search
            self._candidates, self._listed_in = self._no_candidates(), begins
        assert isinstance(self._candidates, CountCandidates)
        scores = DecayedScores(self.scores, self._decay, begins)
        return (yield from self._candidates.lowest(scores, id_map, high, step, most, ahead))

    def lowest_exactly(
        self, surplus: int, step: int, id_map: IdMap, high: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the ids and rows of exactly the `surplus` lowest scores when `step` begins.

        Rows seen in `step` are never among them. Searches all rows; depends on ids and their scores only.
        """
        scores: Scores | DecayedScores = self.scores
        if self._decay is not None:
            scores = DecayedScores(self.scores, self._decay, self._decay.begins(step, self.clock))
        return scores.lowest(id_map, high, step, surplus, self._by_count)

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
        last_seen = torch.full_like(rows, step)

        def touch() -> None:
            self.scores.write(rows, last_seen, counts)
            if self._age_limit is None:  # which needs the times of its own window
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
        """Drops the listed candidates. Call it after scores or counters were replaced outside a step."""
        TABLES.renew()  # groups look at the table again
        self._candidates = self._no_candidates()
        if self.waiting is not None:
            self.waiting.forget_listed()
        if self._age_limit is not None:
            self._age_limit.forget_listed()
        if self._waiting_age_limit is not None:
            self._waiting_age_limit.forget_listed()

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
        return counts if self.waiting is None else counts + self.waiting.waiting(ids).counts

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
