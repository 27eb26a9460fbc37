"""AdmissionCounters: occurrences of the ids that wait for admission.

Legend: M ids, Q waiting ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn.life.clock import Clock
from torchrec_dyn.life.eviction_candidates import EvictionCandidates
from torchrec_dyn.life.expiry import AgeLimit
from torchrec_dyn.life.scores import SCORE_BYTES, Scores
from torchrec_dyn.storage import IdMap, OutstandingForwards, RowNumbers, block_shift, run_to_end

# At least a 64th of the counters, or rows, is freed at once, so that searches for the lowest scores are rare.
FREED_SHARE = 64
# Candidates listed at once, in such shares. By age: 24 bytes a candidate, so 3 bytes for each counter or row.
SHARES_AHEAD = 8


class AdmissionCounters:
    """One counter for each waiting id: the step at which it was last seen, and its occurrences.

    Attributes:
        limit: the most counters that a training step keeps, whatever the rows in use.
        id_map: id -> row of its counter.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = limit
        self.id_map = IdMap(limit)
        self._numbers = RowNumbers(OutstandingForwards())
        self._scores = Scores(block_shift(limit, SCORE_BYTES, device.type), device)
        self._candidates = EvictionCandidates()

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

    def counts(self, ids: Tensor, since: int = 0) -> Tensor:
        """Returns the counts of ids, [M] int64; 0 for an id without a counter.

        Args:
            ids: [M] int64.
            since: step; ids last seen before it have the count 0.
        """
        last_seen, counts = self._scores.read(self.id_map.lookup(ids))
        return counts.masked_fill_(last_seen < since, 0)

    def expired(self, age_limit: AgeLimit, step: int, clock: Clock) -> Tensor:
        """Returns the waiting ids expired at `step`, [M] int64; drops nothing.

        Args:
            age_limit: age limit of these counters only.
            step: the training step that begins.
            clock: clock of the table.
        """
        high = self._numbers.high
        return age_limit.expired(step, clock, self._scores, self.id_map, high)[0]

    def write(self, ids: Tensor, last_seen: Tensor, counts: Tensor) -> None:
        """Writes the counters of ids, with or without a counter so far.

        Args:
            ids: [M] int64, distinct.
            last_seen: [M] int64, steps.
            counts: [M] int64.
        """
        rows = self.id_map.lookup(ids)
        is_new = rows < 0
        new_ids = ids[is_new]
        self.reserve(new_ids.numel())
        taking = self._numbers.prepare(new_ids.numel())
        num_ids = len(self) + new_ids.numel()
        rows[is_new] = taking.rows

        def commit(again: bool) -> None:
            self._numbers.commit(taking)
            self.id_map.put(new_ids, taking.rows, num_ids, again)
            self._scores.write(rows, last_seen, counts)

        run_to_end(commit)

    def shrink(self, step: int, limit: int) -> None:
        """Drops the counters above a limit, ids seen longest ago first.

        Args:
            step: the present training step.
            limit: the most counters to keep.
        """
        surplus = len(self) - limit
        if surplus <= 0:
            return
        share = limit // FREED_SHARE
        most, ahead, high = max(surplus, share), SHARES_AHEAD * share, self._numbers.high
        self._remove(
            *self._candidates.lowest(self._scores, self.id_map, high, step + 1, most, ahead)
        )

    def forget_listed(self) -> None:
        """Drops the listed candidates. Call it after counters were written other than by a training step."""
        self._candidates = EvictionCandidates()

    def forget(self, ids: Tensor) -> None:
        """Drops counters.

        Args:
            ids: [M] int64, distinct; ids without a counter are skipped.
        """
        if ids.numel() and len(self):
            self._remove(*self.id_map.find(ids))

    def _remove(self, ids: Tensor, rows: Tensor) -> None:
        """Drops counters by id and row."""
        if not ids.numel():
            return
        left = len(self) - rows.numel()

        def commit(_: bool) -> None:
            self.id_map.remove(ids, left)
            self._scores.forget(rows)
            self._numbers.give_back(rows)

        run_to_end(commit)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns last_seen and counts, [M] int64 each.

        Args:
            rows: [M] int64, rows of `id_map`.
        """
        return self._scores.read(rows)

    def export(self) -> Tensor:
        """Returns ids, last_seen and counts in canonical order, [3, Q] int64."""
        ids, rows = self.id_map.contents()
        return torch.stack([ids, *self.read(rows)])
