"""Admission: the counts of waiting ids (`AdmitAfter`), and draws of a chance (`AdmitWithProbability`).

The draw of an id at a step is a pure function of the table's key, the id and the step, so every column shard
and every run decides the same. Chances are made by multiplications alone: `pow` may differ in its last bit.

Legend: M ids, Q waiting ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.life.clock import Clock
from torchrec_dyn.life.eviction_candidates import EvictionCandidates
from torchrec_dyn.life.expiry import AgeLimit
from torchrec_dyn.life.scores import SCORE_BYTES, Scores
from torchrec_dyn.policies import Admission, AdmitAfter
from torchrec_dyn.storage import (
    HostRead,
    IdMap,
    OpenForwards,
    RowNumbers,
    block_shift,
    places_of,
)

# At least a 64th of the counters, or rows, is freed at once, so that searches for the lowest scores are rare.
FREED_SHARE = 64
# Candidates listed at once, in such shares. Listed by age, a candidate takes 24 bytes: 3 for each counter or
# row.
SHARES_AHEAD = 8
# The default of AdmitAfter.counters: this many for each row, and never fewer than LEAST_COUNTERS.
COUNTERS_A_ROW = 4


def most_counters(admission: Admission | None, row_limit: int, rows: int) -> int:
    """Returns the maximum number of waiting ids of a table with this row limit and `rows` rows in use."""
    if not isinstance(admission, AdmitAfter):
        return 0
    return admission.counters or min(row_limit, max(knobs.LEAST_COUNTERS, COUNTERS_A_ROW * rows))


class Drop(NamedTuple):
    """A prepared drop of counters: ids and rows [M] int64, and blank scores."""

    ids: Tensor
    rows: Tensor
    blank: tuple[Tensor, Tensor]


class Counters(NamedTuple):
    """The counters of ids [M]: their rows, -1 for none, last_seen and counts, [M] int64 each."""

    rows: Tensor
    last_seen: Tensor
    counts: Tensor


class AdmissionCounters:
    """One counter for each waiting id: the step at which it was last seen, and its occurrences.

    Attributes:
        limit: the most counters that a training step keeps, whatever the rows in use.
        id_map: id -> row of its counter.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = limit
        self.id_map = IdMap(limit, device)
        self._numbers = RowNumbers(OpenForwards(), device)
        self._scores = Scores(block_shift(limit, SCORE_BYTES, device.type), device)
        self._device = device
        self._candidates = EvictionCandidates(device)

    def __len__(self) -> int:
        return self.id_map.num_ids

    @property
    def bytes(self) -> int:
        """Bytes of slots and counters."""
        return self.id_map.bytes + self._numbers.high_water_mark * SCORE_BYTES

    def reserve(self, additional: int) -> None:
        """Makes room for `additional` more counters."""
        self.id_map.reserve(additional)
        self._scores.store.reserve(self._numbers.highest_after(additional))

    def waiting(self, ids: Tensor) -> Counters:
        """Returns the counters of ids [M] int64; an id without one has row -1 and count 0."""
        rows = self.id_map.lookup(ids)
        return Counters(rows, *self._scores.read(rows))

    def undo(self, ids: Tensor, counters: Counters) -> Callable[[], None]:
        """Returns a call that brings the present counters of ids [M] int64, distinct, back."""
        renumber = self._numbers.undo()

        def restore() -> None:
            self.drop(self.drop_of(ids))
            places = (counters.rows >= 0).nonzero().flatten()
            rows, last_seen, counts = (values[places] for values in counters)
            self.id_map.insert(ids[places], rows)
            self._scores.write(rows, last_seen, counts)
            renumber()
            self.forget_listed()

        return restore

    def num_due(self, age_limit: AgeLimit, step: int, clock: Clock) -> int:
        """Returns how many counters are to be examined for `expired`. As `AgeLimit.num_due`.

        `age_limit` is of these counters only.
        """
        return age_limit.num_due(
            step, clock, self._scores, self.id_map, self._numbers.high_water_mark
        )

    def expired(self, age_limit: AgeLimit, due: int) -> HostRead[Drop]:
        """Returns the drop of the counters that have expired, `due` of which are examined; drops nothing."""
        return self.drop_found(*(yield from age_limit.expired(due, self._scores)))

    def write(self, ids: Tensor, last_seen: Tensor, counts: Tensor) -> None:
        """Writes the counters of ids, with or without a counter so far. Waits for a GPU.

        ids [M] int64, distinct; last_seen [M] int64, steps; counts [M] int64.
        """
        rows = self.id_map.lookup(ids)
        num_new = int((rows < 0).sum())
        self.reserve(num_new)
        self.write_found(ids, rows, last_seen, counts, num_new)

    def write_found(
        self, ids: Tensor, rows: Tensor, last_seen: Tensor, counts: Tensor, num_new: int
    ) -> None:
        """Writes counters, for which room is reserved. As `AdmissionCounters.write`.

        rows [M] int64 are those of the ids; `num_new` of them are -1: ids without a counter so far. They
        become the new rows.
        """
        new = places_of(rows < 0, num_new)
        rows[new] = new_rows = self._numbers.take(num_new)
        self.id_map.insert(ids.index_select(0, new), new_rows)
        self._scores.write(rows, last_seen, counts)

    def surplus(self, step: int, limit: int) -> HostRead[Drop | None]:
        """Returns the drop of counters above a limit, ids seen longest ago first; None if none is above."""
        surplus = len(self) - limit
        if surplus <= 0:
            return None
        share = limit // FREED_SHARE
        most, ahead, high = max(surplus, share), SHARES_AHEAD * share, self._numbers.high_water_mark
        # Counters of the present step may be dropped, but not listed: a further forward of the step may give
        # their rows to other ids, with the same `last_seen`.
        lowest = self._candidates.lowest(
            self._scores, self.id_map, high, step, most, ahead, until=step + 1
        )
        return self.drop_found(*(yield from lowest))

    def forget_listed(self) -> None:
        """Drops the listed candidates. Call it after counters were written other than by a training step."""
        self._candidates = EvictionCandidates(self._device)

    def drop_of(self, ids: Tensor) -> Drop:
        """Returns the drop of the counters of ids [M] int64, distinct; skips ids without a counter."""
        return self.drop_found(*self.id_map.find(ids))

    def drop_found(self, ids: Tensor, rows: Tensor) -> Drop:
        """Returns the drop of the counters of ids [M] int64, distinct, in rows [M] int64."""
        return Drop(ids, rows, self._scores.blank(rows))

    def drop(self, prepared: Drop) -> None:
        """Drops counters."""
        if prepared.ids.numel():
            self.id_map.remove(prepared.ids)
            self._scores.write(prepared.rows, *prepared.blank)
            self._numbers.free(prepared.rows)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns last_seen and counts of rows [M] int64 of `id_map`, [M] int64 each."""
        return self._scores.read(rows)

    def export(self) -> Tensor:
        """Returns ids, last_seen and counts in canonical order, [3, Q] int64."""
        ids, rows = self.id_map.contents()
        return torch.stack([ids, *self.read(rows)])


_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # as in csrc/mix64.h
_DRAW_BITS = 53  # of a float64
_LIST_BITS = 10  # two lists of 8 KB a table
_COUNT_BITS = 33
_NO_CHANCE = 2.0**-60  # 1 - this is 1


class AdmissionChance:
    """Admits an id with the chance 1 - (1 - p)^occurrences."""

    def __init__(self, probability: float, key: int, device: torch.device) -> None:
        self._key = key
        squares = [1.0 - probability]  # (1 - p)^(2^bit), for the bits of a count
        while squares[-1] >= _NO_CHANCE and len(squares) < _COUNT_BITS:
            squares.append(squares[-1] * squares[-1])
        self._most = 1 << len(squares) - 1  # no higher count has another chance
        counts = torch.arange(1 + min(self._most, (1 << _LIST_BITS) - 1), device="cpu")
        refusal = torch.ones(counts.shape, dtype=torch.float64, device="cpu")
        for bit, square in enumerate(squares[:_LIST_BITS]):
            refusal = _times(refusal, square, counts, bit)
        self._squares = [*enumerate(squares)][_LIST_BITS:]  # of counts that are not listed
        # Computed on the CPU: other streams use them, and only copies are waited for.
        self._refusal, self._limit = refusal.to(device), _limit(refusal).to(device)

    def admit(self, ids: Tensor, occurrences: Tensor, step: int) -> Tensor:
        """Returns which ids [M] int64 are admitted, [M] bool; occurrences [M] int64 are up to 2^32."""
        # The word before those with which updates round (csrc/storage/rounding.h): no bits are shared.
        of_step = _mixed((self._key + step * _GOLDEN) & _WORD)
        words = ops.mix64(ops.mix64(ops.mix64(ids) ^ (of_step - (of_step >> 63 << 64))))
        draws = words >> (64 - _DRAW_BITS) & (1 << _DRAW_BITS) - 1
        counts = occurrences.clamp(max=self._most)
        if not self._squares or (counts.is_cpu and bool((counts < 1 << _LIST_BITS).all())):
            return draws < self._limit.index_select(0, counts)
        refusal = self._refusal.index_select(0, counts & (1 << _LIST_BITS) - 1)
        for bit, square in self._squares:
            refusal = _times(refusal, square, counts, bit)
        return draws < _limit(refusal)


def _mixed(word: int) -> int:
    """Returns the mixed id of one word (csrc/mix64.h): an op and its tensors cost more than all draws."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


def _limit(refusal: Tensor) -> Tensor:
    """Returns the number below which draws are admitted, for each chance of refusal."""
    return (1.0 - refusal) * 2.0**_DRAW_BITS


def _times(refusal: Tensor, square: float, counts: Tensor, bit: int) -> Tensor:
    return torch.where((counts >> bit & 1).bool(), refusal * square, refusal)
