"""The disk of the soak, which is full for a while: a small tmpfs, or a limit on the length of files."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_SIZE = 96 << 20
_LEAST = 4096  # bytes that files may have while they are limited


def _mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(folder)]
    try:
        return not subprocess.run(command, capture_output=True, check=False).returncode
    except FileNotFoundError:
        return False


class Disk:
    """A folder on a disk that can be made full.

    Where a tmpfs can be mounted, it is one, and a file takes its room. Elsewhere, and if `mount` is False,
    the files of the processes are limited in length.

    Attributes:
        spells: (begin, end) of the times when it was full; the last end is infinite while it is.
    """

    def __init__(self, folder: Path, draw: random.Random, mount: bool = True) -> None:
        folder.mkdir()
        self.folder, self._draw = folder, draw
        self.is_mounted = mount and _mount(folder)
        self.spells: list[tuple[float, float]] = []
        self._filler, self._left = folder / "filler", 0
        self._limited: set[int] = set()

    @property
    def is_full(self) -> bool:
        """True in a spell."""
        return bool(self.spells) and self.spells[-1][1] == float("inf")

    def fill(self) -> None:
        """Begins a spell: little room is left, each time another amount."""
        self.spells.append((time.time(), float("inf")))
        self._left = self._draw.choice([0, self._draw.randrange(1 << 12, 1 << 19)])

    def keep_full(self, pids: Iterable[int]) -> None:
        """Takes the room that others have given back, or limits the processes that are new."""
        if not self.is_full:
            return
        if self.is_mounted:
            with suppress(OSError), open(self._filler, "ab") as file:
                free = shutil.disk_usage(self.folder).free - self._left
                if free > 0:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
            return
        for pid in set(pids) - self._limited:
            with suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (_LEAST + self._left, hard))
                self._limited.add(pid)

    def free(self) -> None:
        """Ends a spell."""
        if not self.is_full:
            return
        self._filler.unlink(missing_ok=True)
        for pid in self._limited:
            with suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        self._limited.clear()
        self.spells[-1] = self.spells[-1][0], time.time()

    def may_fail(self, began: float, ended: float) -> bool:
        """Returns True if it was full at some moment between two times."""
        return any(began <= end and begin <= ended for begin, end in self.spells)

    def close(self) -> None:
        """Unmounts it."""
        self.free()
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)
