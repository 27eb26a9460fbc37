"""Policies in Python for tests: some equal built-in ones, the others no built-in one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import torchrec_dyn as dyn


class AsLeastRecent(dyn.OwnEviction):
    """As `LeastRecentlyUsed`."""

    def score(self, last_seen, counts, times, step):
        return last_seen


class AsLeastFrequent(dyn.OwnEviction):
    """As `LeastFrequentlyUsed`."""

    def score(self, last_seen, counts, times, step):
        return counts


class Dense(dyn.OwnEviction):
    """Occurrences in a step of the age of a row, in 256ths: no order by count or age."""

    def score(self, last_seen, counts, times, step):
        return counts * 256 // (step + 1 - last_seen)


class ByTime(dyn.OwnEviction):
    """The time of the last occurrence, before it the count, by 5 units of time."""

    keeps_times = True

    def score(self, last_seen, counts, times, step):
        return times // 5 * 100 + counts.clamp(max=99)


class SmallNorm(dyn.OwnEviction):
    """Squared norms of rows, in 2^20ths."""

    reads_rows = True

    def score(self, last_seen, counts, times, step, rows):
        return (rows.double().square().sum(1) * 2**20).long()


@dataclass(frozen=True)
class Often(dyn.OwnAdmission):
    """Ids that have occurred `least` times; even ids half as often."""

    least: int = 2
    counters: int | None = None

    def admit(self, ids, counts, step):
        return counts * torch.where(ids % 2 == 0, 2, 1) >= self.least


class Late(dyn.OwnAdmission):
    """Any waiting id from a step on."""

    def __init__(self, step, counters=None):
        self.step, self.counters = step, counters

    def admit(self, ids, counts, step):
        return torch.full_like(ids, step >= self.step, dtype=torch.bool)
