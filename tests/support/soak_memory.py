"""The memory of processes over a run: samples, and their slope with its standard error.

Resident memory alone does not tell a leak from a heap with free pieces between pieces in use. So each process
also tells how much of its memory malloc has given out, and how much malloc keeps free.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

_BLOCKS = 20  # samples side by side are not independent: the line goes through the means of blocks


class _Mallinfo2(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def of_malloc() -> tuple[float, float]:
    """Returns the MB that this process has from malloc, and those that malloc keeps free for it."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    now = mallinfo2()
    return (now.uordblks + now.hblkhd) / 2**20, now.fordblks / 2**20


def tell_memory(folder: Path) -> None:
    """Writes `of_malloc` to a file that is named by the id of this process."""
    # Not cut to nothing first: it is read while it is written, and every text is as long.
    file = os.open(folder / str(os.getpid()), os.O_CREAT | os.O_WRONLY)
    os.pwrite(file, "{:20.6f} {:20.6f}".format(*of_malloc()).encode(), 0)
    os.close(file)


def keep_telling_memory(folder: Path) -> None:
    """Calls `tell_memory` each second, from a thread."""

    def run() -> None:
        while True:
            time.sleep(1)
            tell_memory(folder)

    tell_memory(folder)
    threading.Thread(target=run, daemon=True).start()


class Slope(NamedTuple):
    """A slope and its standard error, a minute; how many minutes, and the mean."""

    slope: float
    error: float
    minutes: float
    mean: float


class Samples:
    """Numbers of processes by name, over time.

    "MB resident" are memory of its own, "MB in use" what malloc does not keep free of it: tables, Python's
    objects and stacks are not malloc's. "MB in malloc" are in use; "maps" are of memory and files, "files"
    are open.

    Args:
        folder: where processes tell their memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._of: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)

    def take(self, name: str, pid: int, now: float) -> None:
        """Reads and notes the numbers of a process; nothing if it has ended or not told its memory."""
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            maps = Path(f"/proc/{pid}/maps").read_text().count("\n")
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            in_malloc, free = map(float, (self._folder / str(pid)).read_text().split())
        except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError):
            return
        for line in status.splitlines():
            if line.startswith("RssAnon:"):
                resident = int(line.split()[1]) / 1024
                numbers = {
                    "MB resident": resident,
                    "MB in malloc": in_malloc,
                    "MB in use": resident - free,
                    "maps": maps,
                    "files": files,
                }
                self.note(name, now, numbers)

    def note(self, name: str, now: float, numbers: dict[str, float]) -> None:
        """Notes numbers of a process that were read at a moment, in seconds."""
        for what, number in numbers.items():
            self._of[name, what].append((now, number))

    def taken(self, name: str, what: str) -> list[tuple[float, float]]:
        """Returns the moments, in seconds, and the numbers of a process."""
        return list(self._of[name, what])

    def forget(self, name: str) -> None:
        """Forgets a process, for another one of the same name."""
        for key in [key for key in self._of if key[0] == name]:
            del self._of[key]

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
