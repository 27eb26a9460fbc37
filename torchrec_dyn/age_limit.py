"""AgeLimit: finds the rows that are too old without looking at every row at every step.

A row that is too old at step t was last seen before some step, the horizon, which only advances. Now and
then all rows are searched for those that the horizon will reach next, a 64th of the window between it and
the present ahead; they are listed by last sight. Until the horizon gets to the end of the list, only the
list is asked. A listed row that was seen since, or was erased, no longer has the last sight it was listed
with: it is passed over.

Legend: M rows that are too old.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn.clock import Clock
from torchrec_dyn.id_map import IdMap
from torchrec_dyn.policies import ExpireAfter
from torchrec_dyn.scores import Scores

# So a search is paid by the 64th of the rows' lifetimes that pass until the next.
_AHEAD_SHARE = 64


class AgeLimit:
    """Rows may be this old.

    Args:
        policy: in steps or in the clock's unit.
    """

    def __init__(self, policy: ExpireAfter) -> None:
        self._policy = policy
        # Every row last seen before this step is listed, or is seen no more where the list was cut.
        self._listed_until = 0
        empty = torch.empty(0, dtype=torch.int64)
        self._ids, self._rows, self._last_seen = empty, empty, empty

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
            self._list(scores, id_map, high, max(horizon, min(step - 1, ahead)))
        reached = int(torch.searchsorted(self._last_seen, horizon))
        rows = self._rows[:reached]
        last_seen, _ = scores.read(rows)
        stay_away = last_seen == self._last_seen[:reached]
        return self._ids[:reached][stay_away], rows[stay_away]

    def passed(self, step: int, clock: Clock) -> None:
        """Takes note that the rows too old at `step` have left."""
        reached = int(torch.searchsorted(self._last_seen, self.horizon(step, clock)))
        self._ids, self._rows = self._ids[reached:], self._rows[reached:]
        self._last_seen = self._last_seen[reached:]

    def _list(self, scores: Scores, id_map: IdMap, high: int, until: int) -> None:
        ids, rows = scores.lowest(id_map, high, until, high)
        last_seen, order = torch.sort(scores.read(rows)[0])
        self._ids, self._rows, self._last_seen = ids[order], rows[order], last_seen
        self._listed_until = until
