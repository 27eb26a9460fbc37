"""A memory limit for processes: a control group of Linux, which needs the right to make one (root)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Version 1 of control groups, and version 2 where its root controls memory.
_PLACES = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.stat"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.stat"),
)


class NoLimitError(Exception):
    """Control groups of memory cannot be made here."""


@contextmanager
def limited_group(limit: int) -> Iterator[Path]:
    """Makes a control group whose processes have at most `limit` bytes of memory, page cache included.

    Yields its folder. A process enters it by `enter`; all must have ended when the code inside ends.
    """
    for root, limit_name, _ in _PLACES:
        group = root / f"torchrec_dyn_{os.getpid()}_{time.monotonic_ns()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            try:
                (group / limit_name).write_text(str(limit))
            except OSError:
                continue
            yield group
            return
        finally:
            _remove(group)
    raise NoLimitError("no control group of memory can be made here: this needs root")


def _remove(group: Path) -> None:
    """Removes an empty group; the last process may leave it a moment after its parent knows its end."""
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


def enter(group: Path) -> None:
    """Moves this process into a group: what it allocates from now on counts there."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
