"""Scores: the last step and the number of occurrences of each row; they decide eviction (csrc/life/scores.h).

Legend: M rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.storage import IdMap, RowStore

SCORE_BYTES = 8
# A step has 32 bits; the last number marks a row without an id.
NO_STEP = (1 << 32) - 1


class Scores:
    """One word for each row: the training step at which it was last seen, and its occurrences.

    Attributes:
        store: the words, in blocks that never move.
    """

    def __init__(self, shift: int, device: torch.device) -> None:
        self.store = RowStore(1, shift, torch.int64, device)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns last_seen and counts of rows [M] int64, [M] int64 each.

        last_seen is a step. A row without an id, and row -1, have last_seen -1 and count 0.
        """
        return ops.read_scores(rows, self.store.blocks, self.store.shift)

    def write(self, rows: Tensor, last_seen: Tensor, counts: Tensor) -> None:
        """Writes last_seen [M] int64, steps, and counts [M] int64, up to MOST_COUNT, of distinct rows [M]."""
        ops.write_scores_(rows, last_seen, counts, self.store.blocks, self.store.shift)

    def forget(self, rows: Tensor) -> None:
        """Marks rows [M] int64 as rows without an id."""
        self.write(rows, *self.blank(rows))

    def blank(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns last_seen and counts of rows [M] int64 without an id, [M] int64 each."""
        return torch.full_like(rows, -1), torch.zeros_like(rows)

    def lowest(
        self, id_map: IdMap, high: int, before: int, most: int, by_count: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns the `most` rows of lowest scores, exactly; of equal scores the lowest mixed ids, unsigned.

        Compares last_seen; with `by_count`, counts. Rows of step `before` and later are never chosen, except
        rows assigned at it and not seen yet (count 0). `high` is the high-water mark of its row numbers.

        Returns:
            ids: [M] int64, in the order of `ops.lowest_scores`: use the set of them only.
            rows: [M] int64.
        """
        slots, moved = id_map.arrays()
        blocks, shift = self.store.blocks, self.store.shift
        return ops.lowest_scores(slots, moved, blocks, shift, high, by_count, before, most)
