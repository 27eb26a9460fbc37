"""Histograms of what a checkpoint holds, filled piece by piece, and drawn as bars of text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_BARS = 10
_BAR_WIDTH = 32


@dataclass(frozen=True)
class Bar:
    """How many values lie in [low, high); whole numbers from low to high - 1."""

    low: float
    high: float
    count: int


class Histogram:
    """Counts values >= 0 by bins that grow with the values.

    Args:
        title: what is counted.
        edges: [E] ascending, where bins begin; the first bin begins at 0.
    """

    def __init__(self, title: str, edges: Tensor) -> None:
        self.title = title
        self._edges = edges
        self._counts = torch.zeros(len(edges) + 1, dtype=torch.int64)

    @property
    def is_whole(self) -> bool:
        """Whether it counts whole numbers."""
        return not self._edges.is_floating_point()

    def add(self, values: Tensor) -> None:
        """Counts more values.

        Args:
            values: [M] of the edges' dtype.
        """
        bins = torch.bucketize(values, self._edges, right=True)
        self._counts += torch.bincount(bins, minlength=len(self._counts))

    def bars(self) -> list[Bar]:
        """Returns bars from the lowest to the highest value, bins joined so that they are few."""
        used = self._counts.nonzero().flatten().tolist()
        if not used:
            return []
        bounds = [0, *self._edges.tolist(), float("inf")]
        first, last = used[0], used[-1] + 1
        step = -(-(last - first) // _MOST_BARS)
        return [
            Bar(bounds[low], bounds[high], int(self._counts[low:high].sum()))
            for low in range(first, last, step)
            for high in [min(low + step, last)]
        ]

    def lines(self, block: str = "█") -> list[str]:
        """Draws the bars.

        Args:
            block: what they are made of.
        """
        bars = self.bars()
        names = [self.name_of(bar) for bar in bars]
        most = max((bar.count for bar in bars), default=0)
        widths = max(map(len, names), default=0), len(f"{most:,}")
        return [
            f"{name:>{widths[0]}}  {bar.count:>{widths[1]},}  "
            f"{block * -(-bar.count * _BAR_WIDTH // most)}".rstrip()
            for name, bar in zip(names, bars, strict=True)
        ]

    def name_of(self, bar: Bar) -> str:
        """Names the values of a bar."""
        if not self.is_whole:
            return f"{bar.low:.3g} to {bar.high:.3g}"
        if bar.high == float("inf"):
            return f"{bar.low:,} or more"
        last = int(bar.high) - 1
        return f"{bar.low:,}" if last == bar.low else f"{bar.low:,} to {last:,}"


def histogram_of_norms() -> Histogram:
    """Counts lengths of rows: 0, and four bins an octave from 2^-64 to 2^64."""
    return Histogram("norm (L2) of rows", 2.0 ** (torch.arange(-256, 257) / 4).to(torch.float64))


def histogram_of_steps(title: str) -> Histogram:
    """Counts whole numbers: 0, 1, 2 to 3, 4 to 7, ...

    Args:
        title: what they are.
    """
    return Histogram(title, 2 ** torch.arange(33))
