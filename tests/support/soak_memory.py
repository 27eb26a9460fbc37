"""The memory of processes over a run: samples, and their slope with its standard error."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

_BLOCKS = 20  # samples side by side are not independent: the line goes through the means of blocks


class Slope(NamedTuple):
    """A slope and its standard error, a minute; how many minutes, and the mean."""

    slope: float
    error: float
    minutes: float
    mean: float


class Samples:
    """Numbers of processes by name, over time: "MB" of memory of its own, and "maps" of memory and files."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)

    def take(self, name: str, pid: int, now: float) -> None:
        """Reads and notes the numbers of a process; nothing if it has ended."""
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            maps = Path(f"/proc/{pid}/maps").read_text().count("\n")
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return
        for line in status.splitlines():
            if line.startswith("RssAnon:"):
                self.note(
                    name, now, {"MB": int(line.split()[1]) / 1024, "maps": maps, "files": files}
                )

    def note(self, name: str, now: float, numbers: dict[str, float]) -> None:
        """Notes numbers of a process that were read at a moment, in seconds."""
        for what, number in numbers.items():
            self._of[name, what].append((now, number))

    def taken(self, name: str, what: str) -> list[tuple[float, float]]:
        """Returns the moments, in seconds, and the numbers of a process."""
        return list(self._of[name, what])

    def forget(self, name: str) -> None:
        """Forgets a process, for another one of the same name."""
        for what in ("MB", "maps", "files"):
            self._of.pop((name, what), None)

    def slope(self, name: str, what: str, after: float) -> Slope | None:
        """Returns the slope of the samples after a time; None if they are too few."""
        taken = [
            (moment / 60, number) for moment, number in self.taken(name, what) if moment > after
        ]
        if len(taken) < 2 * _BLOCKS:
            return None
        cuts = [len(taken) * block // _BLOCKS for block in range(_BLOCKS + 1)]
        means = [
            tuple(sum(values) / len(values) for values in zip(*taken[first:end], strict=True))
            for first, end in pairwise(cuts)
        ]
        x, y = (sum(values) / _BLOCKS for values in zip(*means, strict=True))
        spread = sum((at - x) ** 2 for at, _ in means)
        slope = sum((at - x) * (number - y) for at, number in means) / spread
        rest = sum((number - y - slope * (at - x)) ** 2 for at, number in means)
        error = math.sqrt(rest / (_BLOCKS - 2) / spread)
        return Slope(slope, error, taken[-1][0] - taken[0][0], y)
