"""TableScores: what a table tells of its scores, and its clock.

Legend: M ids.
"""

from __future__ import annotations

from torch import Tensor

from torchrec_dyn.life import RowLife, has_life, time_fault
from torchrec_dyn.storage import IdMap
from torchrec_dyn.table.checks import check_ids


class TableScores:
    """The part of a DynamicTable that asks its life.

    Attributes:
        life: scores, counters and clock; None without a policy.
        step: training forwards so far.
        id_map: id -> row.
    """

    life: RowLife | None
    step: int
    id_map: IdMap

    @property
    def where(self) -> str:
        """The table, for messages."""
        raise NotImplementedError

    def last_seen(self, ids: Tensor) -> Tensor:
        """Tells when ids were last seen in training: a step, or a time under `ExpireAfter(time=...)`.

        Args:
            ids: [M] int64.

        Returns:
            [M] int64; -1 for an id without a row.
        """
        where = f"{self.where}.last_seen"
        return has_life(where, self.life).last_seen(self.id_map.lookup(check_ids(where, ids)))

    def count(self, ids: Tensor) -> Tensor:
        """Tells how often ids were seen in training since they were made or began to wait.

        Args:
            ids: [M] int64.

        Returns:
            [M] int64; 0 for an id that has no row and does not wait.
        """
        where = f"{self.where}.count"
        ids = check_ids(where, ids)
        return has_life(where, self.life).counts(ids, self.id_map.lookup(ids))

    @property
    def time(self) -> int | None:
        """What the clock shows, None before it was set."""
        return None if self.life is None else self.life.clock.now

    def set_time(self, time: int) -> None:
        """Sets the clock of `ExpireAfter(time=...)` for the steps to come; it never goes back."""
        if fault := time_fault(time, self.time):
            raise ValueError(f"{self.where}.set_time: {fault}")
        if self.life is not None and self.life.is_timed:
            self.life.clock.set(time, self.step + 1)
