"""RowLife: what a table with an admission or an eviction policy keeps beside its rows.

Legend: M distinct ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.initializers import table_key
from torchrec_dyn.life.admission_counters import FREED_SHARE, WaitingIds
from torchrec_dyn.life.clock import Clock
from torchrec_dyn.life.eviction_candidates import OldestRows
from torchrec_dyn.life.expiry import AgeLimit
from torchrec_dyn.life.scores import MOST_COUNT, Scores
from torchrec_dyn.policies import (
    AdmitAfter,
    AdmitWithProbability,
    LeastFrequentlyUsed,
    Never,
    age_limit_of,
    most_counters,
    replacement_of,
)
from torchrec_dyn.storage import IdMap

# 24 bytes for each row listed: 3 for each row of the table.
_SHARES_AHEAD = 8
_SCORED_AT_ONCE = 1 << 20


class Decision(NamedTuple):
    """Which of some ids without a row get one.

    Attributes:
        admitted: [M] bool, or None for all.
        counts: [M] int64, occurrences of each, those of earlier steps included where they are counted.
    """

    admitted: Tensor | None
    counts: Tensor


class RowLife:
    """Scores, counters and clock of one table, and the rules by which ids come and go.

    Args:
        config: with a policy at least.
        name: of the table.
        row_limit: of the table here.
        shift: binary logarithm of the rows of a block.
        device: of the table.

    Attributes:
        scores: of the rows.
        waiting: counters of ids that wait for admission, None where nothing is counted.
        clock: event time.
        replaces: whether a full table lets its lowest rows go.
        is_unscored: whether rows were loaded without scores, and no step was taken since.
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
        self.waiting: WaitingIds | None = None
        self._admission = config.admission
        if isinstance(config.admission, AdmitAfter):
            self.waiting = WaitingIds(most_counters(config.admission, row_limit), device)
        self._admission_key = table_key(config.seed, name, "admission")
        age_limit, replacement = age_limit_of(config.eviction), replacement_of(config.eviction)
        self._age_limit = None if age_limit is None else AgeLimit(age_limit)
        self.is_timed = age_limit is not None and age_limit.time is not None
        self.replaces = replacement is not None
        self.is_unscored = False
        self._by_count = isinstance(replacement, LeastFrequentlyUsed)
        self._row_limit = row_limit
        self._oldest = OldestRows()

    def born(self, ids: Tensor, rows: Tensor, step: int, counts: Tensor | None) -> None:
        """Begins the scores of fresh rows, and ends the counters of their ids.

        Args:
            ids: [M] int64.
            rows: [M] int64.
            step: of the table: the running one in training, the last one elsewhere.
            counts: [M] int64, or None: never seen, but put there.
        """
        # Never a time before the present one: of a time that no step has seen yet the next step is the first.
        step = max(step, self.clock.present_step)
        counts = torch.zeros_like(rows) if counts is None else counts.clamp(max=MOST_COUNT)
        self.scores.write(rows, torch.full_like(rows, step), counts)
        if self.waiting is not None:
            self.waiting.forget(ids)

    def too_old(self, step: int, id_map: IdMap, high: int) -> tuple[Tensor, Tensor] | None:
        """Lists ids and rows that are too old at a step, None where age does not count."""
        if self._age_limit is None:
            return None
        return self._age_limit.too_old(step, self.clock, self.scores, id_map, high)

    def passed(self, step: int) -> None:
        """Takes note that the rows too old at `step` have left."""
        self.is_unscored = False
        if self._age_limit is not None:
            self._age_limit.passed(step, self.clock)
            self.clock.forget_before(self._age_limit.horizon(step, self.clock))

    def admit(self, ids: Tensor, occurrences: Tensor, step: int) -> Decision:
        """Decides on ids without a row; writes nothing.

        Args:
            ids: [M] int64, distinct.
            occurrences: [M] int64 in this step.
            step: the training step.
        """
        if self.waiting is not None and isinstance(self._admission, AdmitAfter):
            counts = (occurrences + self.waiting.counts(ids)).clamp_(max=MOST_COUNT)
            return Decision(counts >= self._admission.count, counts)
        if isinstance(self._admission, AdmitWithProbability):
            chance = self._admission.p
            drawn = ops.admit_by_chance(ids, occurrences, self._admission_key, step, chance)
            return Decision(drawn, occurrences)
        if isinstance(self._admission, Never):
            return Decision(torch.zeros_like(ids, dtype=torch.bool), occurrences)
        return Decision(None, occurrences)

    def refuse(self, ids: Tensor, counts: Tensor, step: int) -> None:
        """Notes how often ids were seen that were not admitted.

        Args:
            ids: [M] int64, distinct.
            counts: [M] int64 of `admit`.
            step: the training step.
        """
        if self.waiting is not None:
            self.waiting.write(ids, torch.full_like(ids, step), counts)

    def shrink(self, step: int) -> int:
        """Drops counters above their number, and tells how many."""
        return 0 if self.waiting is None else self.waiting.shrink(step)

    def lowest(self, surplus: int, step: int, id_map: IdMap, high: int) -> tuple[Tensor, Tensor]:
        """Finds the ids and rows that make room, none of them seen in this step.

        A 64th of the limit at least, so that the search is rare. By last sight some such shares are listed
        at once. By count there is no list: what came after the listing may be lower than all that is listed.
        """
        share = self._row_limit // FREED_SHARE
        if self._by_count or surplus > share:
            return self.scores.lowest(id_map, high, step, max(surplus, share), self._by_count)
        taken = self._oldest.take(share, self.scores)
        if taken is None:
            self._oldest.list(self.scores, id_map, high, step, _SHARES_AHEAD * share)
            taken = self._oldest.take(share, self.scores)
        return taken or self.scores.lowest(id_map, high, step, share)

    def catch_up(self, step: int, high: int) -> None:
        """Lets rows that were loaded without scores count as seen at the step that was loaded after them.

        Args:
            step: of the table.
            high: rows ever handed out.
        """
        for start in range(0, high if self.is_unscored else 0, _SCORED_AT_ONCE):
            rows = torch.arange(start, min(high, start + _SCORED_AT_ONCE))
            last_seen, counts = self.scores.read(rows)
            held = last_seen >= 0
            self.scores.write(rows[held], torch.full_like(rows, step)[held], counts[held])

    def forget_listed(self) -> None:
        """Drops what was listed ahead: scores were written that do not follow from the steps."""
        self._oldest = OldestRows()
        if self._age_limit is not None:
            self._age_limit.forget_listed()

    @property
    def num_waiting(self) -> int:
        """Ids with a counter."""
        return 0 if self.waiting is None else len(self.waiting)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the counters and their slots."""
        return 0 if self.waiting is None else self.waiting.bytes

    def last_seen(self, rows: Tensor) -> Tensor:
        """Tells when rows were last seen, in steps or in the unit of the age limit.

        Args:
            rows: [M] int64; -1 gives -1.
        """
        steps, _ = self.scores.read(rows)
        return self.clock.times_of(steps) if self.is_timed else steps

    def counts(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Tells how often ids were seen, those that wait included.

        Args:
            ids: [M] int64.
            rows: [M] int64, -1 of ids without one.
        """
        _, counts = self.scores.read(rows)
        return counts if self.waiting is None else counts + self.waiting.counts(ids)

    def export(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns the state.

        Args:
            rows: [R] int64, of the table's ids in canonical order.

        Returns:
            "last_seen" [R] int64 in steps, "count" [R] int64, "clock" [2, K] int64 (steps and the times
            shown from them on) and, where admission counts, "waiting" [3, Q] int64 (ids, last sights,
            counts).
        """
        last_seen, counts = self.scores.read(rows)
        state = {"last_seen": last_seen, "count": counts, "clock": self.clock.export()}
        return state if self.waiting is None else {**state, "waiting": self.waiting.export()}

    def load(self, state: Mapping[str, Tensor], rows: Tensor, step: int) -> None:
        """Takes a saved state over; what is missing starts afresh.

        Args:
            state: as `export` gives it.
            rows: [R] int64, of the saved ids in their order.
            step: of the table.
        """
        if "clock" in state and self.is_timed:
            self.clock = Clock.load(state["clock"])
        now = torch.full_like(rows, max(step, self.clock.present_step))
        never = torch.zeros_like(rows)
        self.scores.write(rows, state.get("last_seen", now), state.get("count", never))
        self.is_unscored = "last_seen" not in state
        if self.waiting is not None and "waiting" in state:
            self.waiting.write(*state["waiting"].contiguous())


def has_life(where: str, life: RowLife | None) -> RowLife:
    """Raises ValueError if a table keeps no scores."""
    if life is None:
        raise ValueError(
            f"{where}: expected a table with an admission or eviction policy, got one with none, "
            "which keeps neither last_seen nor count. Set DynamicTableConfig(eviction=...)."
        )
    return life
