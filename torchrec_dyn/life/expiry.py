"""AgeLimit: finds expired rows without a search over all rows at every step.

A row has expired at step t if it was last seen before a certain step, the horizon, which only advances. A
search over all rows lists the rows that will expire next: it looks ahead by a 16th of the steps between the
horizon and the present. Until the horizon reaches the end of this list, only the list is read.

The counters of waiting ids have scores too, so they expire in the same way.

Legend: M expired rows.
"""

from __future__ import annotations

import torch

from torchrec_dyn.life.clock import Clock
from torchrec_dyn.life.lowest_rows import ListedRows, Listing
from torchrec_dyn.policies import ExpireAfter

# One search serves a 16th of the lifetime of a row.
_AHEAD_SHARE = 16


class AgeLimit:
    """The age limit of a policy, in steps or in the clock's unit, and the rows that expire next.

    Attributes:
        steps: the limit in steps; None if it is in the clock's unit.
        listed: the rows that expire next: all that were last seen before its end, but for removed rows.
    """

    def __init__(self, policy: ExpireAfter, device: torch.device) -> None:
        self.steps, self._time = policy.steps, policy.time
        self._device = device
        self.listed = ListedRows(device)

    def horizon(self, step: int, clock: Clock) -> int:
        """Returns the horizon at `step`: rows last seen before it have expired at `step`."""
        if self.steps is not None:
            return step - self.steps
        if clock.now is None or self._time is None:
            return 0
        return clock.first_step_since(clock.now - self._time)

    def listing(self, table: int, high: int, step: int, clock: Clock) -> Listing | None:
        """Returns the list that is needed to know the rows that have expired when `step` begins, if any is.

        `high` is the high-water mark of their numbers.
        """
        horizon = self.horizon(step, clock)
        if horizon <= self.listed.until:
            return None
        # Rows seen or assigned from now on must not belong on the list, even if this step fails.
        ahead = horizon + max(1, (step - horizon) // _AHEAD_SHARE)
        return Listing(table, high, high, max(horizon, min(step - 1, ahead)), self.listed)

    def num_due(self, step: int, clock: Clock) -> int:
        """Returns how many listed rows have expired when `step` begins, if not seen since the search."""
        return self.listed.seen_before(self.horizon(step, clock))

    @property
    def next_horizon(self) -> int:
        """The least horizon at which rows may be due, after those due earlier were removed."""
        return 1 + min(self.listed.until, self.listed.first_seen)

    def forget_listed(self) -> None:
        """Drops the list. Call it after scores were written other than by a training step."""
        self.listed = ListedRows(self._device)

    def drop_expired(self, step: int, clock: Clock) -> None:
        """Drops the rows expired at `step` from the list. Call it after they were removed."""
        self.listed.drop(self.num_due(step, clock))
