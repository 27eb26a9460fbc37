"""Scores: the last step and the number of occurrences of each row; they decide eviction (csrc/life/scores.h).

Legend: T tables, M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.storage import (
    BLOCKS,
    SLOTS,
    IdMap,
    RowStore,
    arrays_of,
    blocks_of,
    host_numbers,
)

SCORE_BYTES = 8
# A step has 32 bits; the last number marks a row without an id.
NO_STEP = (1 << 32) - 1


_NO_SCORES = RowStore(1, 0, torch.int64, torch.device("cpu"))


class ScoredMaps:
    """The maps and scores of T tables as ops take them, prepared again when slots or blocks have changed."""

    def __init__(self, maps: Sequence[IdMap], scores: Sequence[Scores | None]) -> None:
        self._maps = maps
        self._stores = [_NO_SCORES if own is None else own.store for own in scores]
        self._tokens: tuple[object, object] = (None, None)
        self._handle: Tensor

    def get(self) -> Tensor:
        """Returns the result of `ops.prepare_tables`."""
        tokens = SLOTS.now, BLOCKS.now
        if self._tokens[0] is not tokens[0] or self._tokens[1] is not tokens[1]:
            scores, no_rows = blocks_of(self._stores), [(0, 0, 0, 1)] * len(self._stores)
            self._handle = ops.prepare_tables(
                *arrays_of(self._maps), [], [], host_numbers(no_rows), 0, [], [], None, None, [],
                scores.blocks, scores.layout,
            )  # fmt: skip
            self._tokens = tokens
        return self._handle


class Scores:
    """One word for each row: the training step at which it was last seen, and its occurrences.

    Attributes:
        store: the words, in blocks that never move.
    """

    def __init__(self, shift: int, device: torch.device) -> None:
        self.store = RowStore(1, shift, torch.int64, device)
        self._prepared = ScoredMaps([], [self])

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns last_seen and counts of rows [M] int64, [M] int64 each.

        last_seen is a step. A row without an id, and row -1, have last_seen -1 and count 0.
        """
        if not self.store.blocks:
            return torch.full_like(rows, -1), torch.zeros_like(rows)
        return ops.read_scores(rows, host_numbers([0, rows.numel()]), self._prepared.get())

    def write(self, rows: Tensor, last_seen: Tensor, counts: Tensor) -> None:
        """Writes last_seen [M] int64, steps, and counts [M] int64, up to MOST_COUNT, of rows [M] int64.

        Equal rows have equal scores.
        """
        self.prepare_write(rows, last_seen, counts)()

    def prepare_write(self, rows: Tensor, last_seen: Tensor, counts: Tensor) -> Callable[[], None]:
        """Returns a call that writes scores, which allocates nothing. As `write`."""
        if not rows.numel():
            return lambda: None
        offsets, handle = host_numbers([0, rows.numel()]), self._prepared.get()
        return lambda: ops.write_scores_(rows, offsets, last_seen, counts, handle)
