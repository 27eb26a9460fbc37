"""AgeLimit: finds the rows that are too old without looking at every row at every step.

A row that is too old at step t was last seen before some step, the horizon, which only advances. Now and
then all rows are searched for those that the horizon will reach next, a 16th of the window between it and
the present ahead. Until the horizon gets to the end of that list, only the list is asked.

Legend: M rows that are too old.
"""

from __future__ import annotations

from torch import Tensor

from torchrec_dyn.life.clock import Clock
from torchrec_dyn.life.eviction_candidates import OldestRows
from torchrec_dyn.life.scores import Scores
from torchrec_dyn.policies import ExpireAfter
from torchrec_dyn.storage import IdMap

# So a search is paid by the 16th of the rows' lifetimes that passes until the next.
_AHEAD_SHARE = 16


class AgeLimit:
    """Rows may be this old.

    Args:
        policy: in steps or in the clock's unit.
    """

    def __init__(self, policy: ExpireAfter) -> None:
        self._policy = policy
        self._oldest = OldestRows()
        self._listed_until = 0  # every row last seen before this step is listed, or has left

    def horizon(self, step: int, clock: Clock) -> int:
        """Returns the step before which a row must have been last seen to be too old at `step`."""
        if self._policy.steps is not None:
            return step - self._policy.steps
        if clock.now is None or self._policy.time is None:
            return 0
        return clock.first_step_since(clock.now - self._policy.time)

    def too_old(
        self, step: int, clock: Clock, scores: Scores, id_map: IdMap, high: int
    ) -> tuple[Tensor, Tensor]:
        """Lists the rows that are too old; takes nothing out.

        Args:
            step: the training step that begins.
            clock: of the table.
            scores: of its rows.
            id_map: of its ids.
            high: rows ever handed out.

        Returns:
            ids: [M] int64.
            rows: [M] int64.
        """
        horizon = self.horizon(step, clock)
        if horizon > self._listed_until:
            # Whatever is seen or assigned from now on, even if this step fails, must not belong on the list.
            ahead = horizon + max(1, (step - horizon) // _AHEAD_SHARE)
            until = max(horizon, min(step - 1, ahead))
            self._oldest.list(scores, id_map, high, until, high)
            self._listed_until = until
        return self._oldest.front(self._oldest.seen_before(horizon), scores)

    def forget_listed(self) -> None:
        """Drops the list: scores were written that do not follow from the steps."""
        self._oldest, self._listed_until = OldestRows(), 0

    def passed(self, step: int, clock: Clock) -> None:
        """Takes note that the rows too old at `step` have left."""
        self._oldest.drop(self._oldest.seen_before(self.horizon(step, clock)))
