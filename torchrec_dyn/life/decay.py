"""Decay: counts that are halved at the start of every half-life, without a pass over all rows.

A row keeps its count as it was when the row was last seen. Its halvings are the half-lives that have begun
since, so its present count is a function of its score, the step and the clock. A row that is seen again is
written with its present count; all others stay as they are, in memory and in checkpoints.

Legend: M rows, N occurrences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn.life.clock import Clock
from torchrec_dyn.life.scores import Scores
from torchrec_dyn.policies import MOST_COUNT, LeastFrequentlyUsed, LowestScore
from torchrec_dyn.storage import host_numbers

# After so many halvings every order key is 0 (csrc/life/scores.h).
_MOST_HALVINGS = 40


class Decay:
    """The half-life of a policy, in steps or in the clock's unit.

    Attributes:
        is_timed: True if the half-life is in the clock's unit.
    """

    def __init__(self, policy: LeastFrequentlyUsed | LowestScore) -> None:
        half_life = policy.half_life_time or policy.half_life_steps
        assert half_life is not None
        self.is_timed = policy.half_life_time is not None
        self._half_life = half_life

    def begins(self, step: int, clock: Clock) -> list[int]:
        """Returns the first steps of the present half-life and of those before it, as many as matter.

        They ascend. `step` is the present step; a half-life in the clock's unit begins with its first time.
        """
        if not self.is_timed:
            present = step // self._half_life
            return [max(0, present - age) * self._half_life for age in _AGES]
        if clock.now is None:
            return [0 for _ in _AGES]
        present = clock.now // self._half_life
        return [
            clock.first_step_since(max(0, present - age) * self._half_life) for age in _AGES
        ]  # fmt: skip

    def present(self, last_seen: Tensor, counts: Tensor, begins: list[int]) -> Tensor:
        """Returns the present counts of scores last_seen [M] and counts [M], [M] int64.

        Each count is rounded once, whatever the number of halvings, a half up. `begins` as `begins` returns
        them for the present step.
        """
        return _halved(counts, _halvings(last_seen, begins))

    def as_of(self, steps: Tensor, last_seen: Tensor, counts: Tensor, begins: list[int]) -> Tensor:
        """Returns the counts of scores at steps [M] int64, not before last_seen [M], [M] int64.

        Of counts [M], rounded as in `present`, with its `begins`.
        """
        halvings = (_halvings(last_seen, begins) - _halvings(steps, begins)).clamp_(min=0)
        return _halved(counts, halvings)

    def touched(
        self, scores: Scores, rows: Tensor, times: Tensor | None, begins: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Returns the rows of a batch and their counts after it, [N] int64 each; writes nothing.

        rows [N] int64 with repeats, none is -1; times [N] int64, occurrences of each, None for 1. The result
        has the rows ascending; the repeats of a row have the same count.
        """
        rows, order = rows.sort()
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = rows[1:] != rows[:-1]
        place = is_first.cumsum(0) - 1
        added = torch.ones_like(rows) if times is None else times.index_select(0, order)
        added = torch.zeros_like(rows).index_add_(0, place, added).index_select(0, place)
        counts = self.present(*scores.read(rows), begins)
        return rows, counts.add_(added).clamp_(max=MOST_COUNT)


_AGES = range(_MOST_HALVINGS - 1, -1, -1)


def _halved(counts: Tensor, halvings: Tensor) -> Tensor:
    """Returns counts [M] after as many halvings [M] each, [M] int64, rounded once, a half up."""
    half = torch.ones_like(halvings).bitwise_left_shift_(halvings).bitwise_right_shift_(1)
    return half.add_(counts).bitwise_right_shift_(halvings)


def _halvings(last_seen: Tensor, begins: list[int]) -> Tensor:
    """Returns how many half-lives have begun after the steps last_seen [M], [M] int64."""
    steps = host_numbers(begins).to(last_seen.device, non_blocking=True)
    return _MOST_HALVINGS - torch.searchsorted(steps, last_seen, right=True)
