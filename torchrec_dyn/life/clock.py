"""Clock: converts between the time that the user sets and training steps.

A row's score holds the step at which it was last seen, never a time. The clock keeps the first step of each
time, so "older than this time" becomes "last seen before that step".

Legend: K times, M steps.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor


def time_fault(time: int, now: int | None) -> str:
    """Returns the error if a clock that shows `now` cannot be set to `time`, else ""."""
    if not isinstance(time, Integral) or isinstance(time, bool) or not 0 <= time < 1 << 63:
        return f"expected an integer time from 0 on, got {time!r}."
    if now is not None and time < now:
        return f"expected a time that is not before {now}, got {time}. The clock never goes back."
    return ""


class Clock:
    """The time at each training step. The first time set holds from step 0 on."""

    def __init__(self) -> None:
        self._steps = array("q")  # the first step of each time, ascending
        self._times = array("q")  # ascending

    @property
    def now(self) -> int | None:
        """The present time, None before the first `set`."""
        return self._times[len(self._steps) - 1] if self._steps else None

    @property
    def present_step(self) -> int:
        """The first step of the present time."""
        return self._steps[-1] if self._steps else 0

    def set(self, time: int, step: int) -> None:
        """Sets the time from the next training step, `step`, on. The caller has checked `time_fault`."""
        if self._steps and self._steps[-1] == step:
            self._times[len(self._steps) - 1] = time
        elif time != self.now:
            # The number of steps counts: a time without a step, after an interrupt, is overwritten.
            self._times[len(self._steps) :] = array("q", [time])
            self._steps.append(step if self._steps else 0)

    def first_step_since(self, time: int) -> int:
        """Returns the first step of `time` or of a later time; `time` must not be after the present time."""
        if not self._steps:
            return 0
        return self._steps[bisect_left(self._times, time, hi=len(self._steps))]

    def times_of(self, steps: Tensor) -> Tensor:
        """Returns the time at each of steps [M] int64; -1 becomes -1.

        A step before those of the kept times has the first of these.
        """
        if not self._steps:
            return torch.where(steps < 0, -1, 0)
        first_steps, times = self.export().to(steps.device)
        place = torch.searchsorted(first_steps, steps, right=True) - 1
        return torch.where(steps < 0, -1, times[place.clamp(min=0)])

    def forget_before(self, step: int) -> None:
        """Drops the times that held only before `step`."""
        dropped = bisect_right(self._steps, step) - 1
        if 2 * dropped > len(self._steps):  # more than half, so moving the rest costs O(1) a step
            self._steps, self._times = self._steps[dropped:], self._times[dropped:]

    def keep_last(self, most: int) -> None:
        """Drops all but the last `most` times, once there are twice as many."""
        if len(self._steps) > most:
            self.forget_before(self._steps[-most])

    def export(self) -> Tensor:
        """Returns first steps and their times, [2, K] int64 on the CPU."""
        times = self._times[: len(self._steps)]
        both = [self._steps.tolist(), times.tolist()]
        return torch.tensor(both, dtype=torch.int64, device="cpu")

    @classmethod
    def load(cls, saved: Tensor) -> Clock:
        """Returns a clock with the contents saved [2, K] int64, as `export` returns them."""
        clock = cls()
        clock._steps = array("q", saved[0].tolist())
        clock._times = array("q", saved[1].tolist())
        return clock

    @classmethod
    def latest(cls, saved: Sequence[Tensor]) -> Clock:
        """Returns a clock that has at each step the latest time of several clocks.

        saved: [2, K] int64 of each, as `export` returns them. A clock is not asked for steps before its
        first: it may have dropped their times. Rows last seen then have expired by its present time.
        """
        shown = [one for one in saved if one.shape[1]]
        if not shown:
            return cls()
        steps = torch.unique(torch.cat([first_steps for first_steps, _ in shown]))
        of_clocks = [
            torch.where(steps < one[0, 0], -1, cls.load(one).times_of(steps)) for one in shown
        ]
        times = torch.stack(of_clocks).amax(0)
        is_later = torch.ones_like(times, dtype=torch.bool)
        is_later[1:] = times[1:] > times[:-1]
        return cls.load(torch.stack([steps, times])[:, is_later])
