"""AgeLimit: finds expired rows without a search over all rows at every step.

A row has expired at step t if it was last seen before a certain step, the horizon, which only advances. A
search over all rows lists the rows that will expire next: it looks ahead by a 16th of the steps between the
horizon and the present. Until the horizon reaches the end of this list, only the list is read.

The counters of waiting ids have scores too, so they expire in the same way.

Legend: M expired rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn.life.clock import Clock
from torchrec_dyn.life.eviction_candidates import EvictionCandidates
from torchrec_dyn.life.scores import Scores
from torchrec_dyn.policies import ExpireAfter
from torchrec_dyn.storage import HostRead, IdMap

# One search serves a 16th of the lifetime of a row.
_AHEAD_SHARE = 16


class AgeLimit:
    """The age limit of a policy, in steps or in the clock's unit, and the rows that expire next.

    Attributes:
        steps: the limit in steps; None if it is in the clock's unit.
    """

    def __init__(self, policy: ExpireAfter, device: torch.device) -> None:
        self.steps, self._time = policy.steps, policy.time
        self._device = device
        self._candidates = EvictionCandidates(device)
        self._listed_until = 0  # every row last seen before this step is listed or was removed

    def horizon(self, step: int, clock: Clock) -> int:
        """Returns the horizon at `step`: rows last seen before it have expired at `step`."""
        if self.steps is not None:
            return step - self.steps
        if clock.now is None or self._time is None:
            return 0
        return clock.first_step_since(clock.now - self._time)

    def num_due(self, step: int, clock: Clock, scores: Scores, id_map: IdMap, high: int) -> int:
        """Returns how many listed rows have expired when `step` begins, if not seen since the search.

        `high` is the high-water mark of its row numbers.
        """
        horizon = self.horizon(step, clock)
        if horizon > self._listed_until:
            # Rows seen or assigned from now on must not belong on the list, even if this step fails.
            ahead = horizon + max(1, (step - horizon) // _AHEAD_SHARE)
            until = max(horizon, min(step - 1, ahead))
            self._candidates.list(scores, id_map, high, until, high)
            self._listed_until = until
        return self._candidates.seen_before(horizon)

    @property
    def next_horizon(self) -> int:
        """The least horizon at which rows may be due, after those due earlier were removed."""
        return 1 + min(self._listed_until, self._candidates.first_seen)

    def expired(self, due: int, scores: Scores) -> HostRead[tuple[Tensor, Tensor]]:
        """Returns the ids [M] int64 and rows [M] int64 that have expired among the first `due` listed."""
        return self._candidates.front(due, scores)

    def forget_listed(self) -> None:
        """Drops the list. Call it after scores were written other than by a training step."""
        self._candidates, self._listed_until = EvictionCandidates(self._device), 0

    def drop_expired(self, step: int, clock: Clock) -> None:
        """Drops the rows expired at `step` from the list. Call it after they were removed."""
        self._candidates.drop(self._candidates.seen_before(self.horizon(step, clock)))
