"""AdmissionChance: decides which ids `AdmitWithProbability` admits.

The draw of an id at a step is a pure function of the table's key, the id and the step, so every column shard
and every run decides the same. Chances are made by multiplications alone, so every machine decides the same:
`pow` may differ in its last bit.

Legend: M ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn import ops

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
