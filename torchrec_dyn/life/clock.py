"""Clock: event time as the user tells it, read as training steps.

A row notes the step at which it was last seen, never a time. The clock knows since which step it shows
each time, so "older than this" is "last seen before that step".

Legend: K times shown, M steps asked for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from numbers import Integral

import torch
from torch import Tensor


def time_fault(time: int, now: int | None) -> str:
    """Tells why a clock that shows `now` cannot be set to `time`, nothing if it can."""
    if not isinstance(time, Integral) or isinstance(time, bool) or not 0 <= time < 1 << 63:
        return f"expected an integer time from 0 on, got {time!r}."
    if now is not None and time < now:
        return f"expected a time that is not before {now}, got {time}. The clock never goes back."
    return ""


class Clock:
    """Which time it was at each training step. The first time that is set holds from step 0 on."""

    def __init__(self) -> None:
        self._steps = array("q")  # ascending: from here on ...
        self._times = array("q")  # ... it is this time, ascending too

    @property
    def now(self) -> int | None:
        """The time, or None before anyone has set it."""
        return self._times[-1] if self._times else None

    @property
    def present_step(self) -> int:
        """The first step of the present time."""
        return self._steps[-1] if self._steps else 0

    def set(self, time: int, step: int) -> None:
        """Shows `time`, without fault, from this step on, the next training step."""
        if not self._times:
            self._steps.append(0)
            self._times.append(time)
        elif self._steps[-1] == step:
            self._times[-1] = time
        elif time != self._times[-1]:
            self._steps.append(step)
            self._times.append(time)

    def first_step_since(self, time: int) -> int:
        """Returns the first step at which it was `time` or later, for a time not after the present."""
        return self._steps[bisect_left(self._times, time)] if self._times else 0

    def times_of(self, steps: Tensor) -> Tensor:
        """Returns which time it was at each step.

        Args:
            steps: [M] int64; -1 gives -1.
        """
        if not self._times:
            return torch.where(steps < 0, -1, 0)
        shown = self.export()
        place = torch.searchsorted(shown[0].contiguous(), steps, right=True) - 1
        return torch.where(steps < 0, -1, shown[1][place.clamp(min=0)])

    def forget_before(self, step: int) -> None:
        """Drops what only steps before this one would ask for."""
        dropped = bisect_right(self._steps, step) - 1
        if 2 * dropped > len(self._steps):  # half at least: what moves up has been paid for
            del self._steps[:dropped], self._times[:dropped]

    def export(self) -> Tensor:
        """Returns the steps and their times, [2, K] int64."""
        return torch.tensor([self._steps.tolist(), self._times.tolist()], dtype=torch.int64)

    @classmethod
    def load(cls, shown: Tensor) -> Clock:
        """Makes the clock that was exported.

        Args:
            shown: [2, K] int64.
        """
        clock = cls()
        clock._steps = array("q", shown[0].tolist())
        clock._times = array("q", shown[1].tolist())
        return clock
