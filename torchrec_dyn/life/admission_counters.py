"""WaitingIds: how often ids were seen that have not been admitted yet.

Legend: M ids, Q ids that wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn.life.scores import SCORE_BYTES, Scores
from torchrec_dyn.storage import IdMap, OutstandingForwards, RowNumbers, block_shift

# Above the limit a 64th of the counters goes at once, so that the search for them is rare.
FREED_SHARE = 64


class WaitingIds:
    """Counters by id, at most `limit` of them; those that were not seen for longest go first.

    Attributes:
        limit: most counters.
        id_map: id -> counter.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = limit
        self.id_map = IdMap(limit)
        self._numbers = RowNumbers(OutstandingForwards())
        self._scores = Scores(block_shift(limit, SCORE_BYTES), device)

    def __len__(self) -> int:
        return self.id_map.num_ids

    @property
    def bytes(self) -> int:
        """Bytes of slots and counters."""
        return self.id_map.bytes + self._numbers.high * SCORE_BYTES

    def reserve(self, additional: int) -> None:
        """Makes room for `additional` more counters."""
        self.id_map.reserve(additional)
        self._scores.reserve(self._numbers.highest_after(additional))

    def counts(self, ids: Tensor) -> Tensor:
        """Returns how often ids were seen, 0 for those that do not wait.

        Args:
            ids: [M] int64.

        Returns:
            [M] int64.
        """
        return self._scores.read(self.id_map.lookup(ids))[1]

    def write(self, ids: Tensor, last_seen: Tensor, counts: Tensor) -> None:
        """Writes counters, whether the ids have waited before or not.

        Args:
            ids: [M] int64, distinct.
            last_seen: [M] int64, steps.
            counts: [M] int64.
        """
        rows = self.id_map.lookup(ids)
        is_new = rows < 0
        new_ids = ids[is_new]
        self.reserve(new_ids.numel())
        new_rows = self._numbers.take(new_ids.numel())
        self.id_map.insert(new_ids, new_rows)
        rows[is_new] = new_rows
        self._scores.write(rows, last_seen, counts)

    def shrink(self, step: int) -> int:
        """Drops counters where there are more than `limit`, those of this step last.

        Args:
            step: the present training step.

        Returns:
            How many went.
        """
        surplus = len(self) - self.limit
        if surplus <= 0:
            return 0
        most = max(surplus, self.limit // FREED_SHARE)
        ids, _ = self._scores.lowest(self.id_map, self._numbers.high, step + 1, most)
        return self.forget(ids)

    def forget(self, ids: Tensor) -> int:
        """Drops counters.

        Args:
            ids: [M] int64; those that do not wait are passed over.

        Returns:
            How many went.
        """
        if not len(self):
            return 0
        _, rows = self.id_map.erase(ids)
        self._scores.forget(rows)
        self._numbers.give_back(rows)
        return rows.numel()

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns last sights and counts, [M] int64 each, of what `id_map` gives for ids.

        Args:
            rows: [M] int64.
        """
        return self._scores.read(rows)

    def export(self) -> Tensor:
        """Returns ids, last sights and counts in canonical order, [3, Q] int64."""
        ids, rows = self.id_map.contents()
        return torch.stack([ids, *self.read(rows)])
