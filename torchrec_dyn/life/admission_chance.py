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

_GOLDEN = 0x9E3779B97F4A7C15  # as in csrc/mix64.h
_DRAW_BITS = 53  # of a float64
_LIST_BITS = 12
_COUNT_BITS = 33
_NO_CHANCE = 2.0**-60  # 1 - this is 1


class AdmissionChance:
    """Admits an id with the chance 1 - (1 - p)^occurrences."""

    def __init__(self, probability: float, key: int, device: torch.device) -> None:
        self._key = key
        counts = torch.arange(1 << _LIST_BITS, device="cpu")
        refusal = torch.ones(counts.shape, dtype=torch.float64, device="cpu")
        # (1 - p)^(2^bit), for the bits of a count.
        square, self._squares, self._most = 1.0 - probability, list[tuple[int, float]](), 0
        for bit in range(_COUNT_BITS):
            if bit < _LIST_BITS:
                refusal = _times(refusal, square, counts, bit)
            else:
                self._squares.append((bit, square))
            self._most = 1 << bit
            if square < _NO_CHANCE:  # nor has a higher count
                break
            square *= square
        self._refusal = refusal.to(device)  # of each count with these bits

    def admit(self, ids: Tensor, occurrences: Tensor, step: int) -> Tensor:
        """Returns which ids [M] int64 are admitted, [M] bool; occurrences [M] int64 are up to 2^32."""
        # The word before those with which updates round (csrc/storage/rounding.h): no bits are shared.
        word = (self._key + step * _GOLDEN) & (1 << 64) - 1
        of_step = ops.mix64(torch.tensor([word - (word >> 63 << 64)], device="cpu"))
        words = ops.mix64(ops.mix64(ops.mix64(ids) ^ int(of_step)))
        draws = (words >> (64 - _DRAW_BITS) & (1 << _DRAW_BITS) - 1).double() * 2.0**-_DRAW_BITS
        counts = occurrences.clamp(max=self._most)
        refusal = self._refusal[counts & (1 << _LIST_BITS) - 1]
        for bit, square in self._squares:
            refusal = _times(refusal, square, counts, bit)
        return draws < 1.0 - refusal


def _times(refusal: Tensor, square: float, counts: Tensor, bit: int) -> Tensor:
    return torch.where((counts >> bit & 1).bool(), refusal * square, refusal)
