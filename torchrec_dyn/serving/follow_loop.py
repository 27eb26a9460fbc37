"""Follows a directory of `Checkpoints` without end: a `Follower` that looks every few seconds, and warns."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from numbers import Real

import torch

from torchrec_dyn.serving.follower import Followed, Follower
from torchrec_dyn.storage import lacks_memory

# The longest time between two looks while errors last, if `every` is shorter.
_LONGEST_WAIT = 60.0
_MOST_SECONDS = 10**9  # time.sleep refuses more than 2^63 nanoseconds


def follow(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    every: float = 1.0,
    rows: torch.dtype | None = None,
    tables: Sequence[str] | None = None,
    since: str | None = None,
    follow_forks: bool = False,
) -> Iterator[Followed]:
    """Yields what is served, then each newer entry, without end; a `Follower` that looks every few seconds.

    An entry that cannot be used, a fork, a full disk, or too little memory, is a warning, once, and is tried
    again, in longer intervals while it lasts.

    Args:
        path: the directory of `Checkpoints`.
        to: the directory of served tables.
        every: seconds between two looks, from 0 to 10^9.
        rows: as of `Follower`.
        tables: as of `Follower`.
        since: as of `Follower`.
        follow_forks: as of `Follower`.

    Raises:
        ValueError: `every` is no such number, or as of `Follower`; at the call, before the first look.
    """
    if not isinstance(every, Real) or not 0 <= every <= _MOST_SECONDS:
        raise ValueError(
            f"serving.follow: expected every to be a number of seconds from 0 to 10^9, got {every!r}. "
            "Write every=1.0."
        )
    follower = Follower(path, to, rows=rows, tables=tables, since=since, follow_forks=follow_forks)
    return _looks(follower, every)


def _looks(follower: Follower, every: float) -> Iterator[Followed]:
    told: set[str] = set()
    wait = every
    while True:
        try:
            followed, wait = follower.poll(), every
            faults = {line: line for line in follower.skipped}
        except Exception as error:
            if not isinstance(error, (ValueError, OSError)) and not lacks_memory(error):
                raise
            followed, wait = None, min(2 * wait, max(every, _LONGEST_WAIT))
            fault, text = _told(error)
            faults = {fault: text}
        for fault in sorted(faults.keys() - told) if followed is None else ():
            warnings.warn(f"serving.follow: {faults[fault]}", stacklevel=2)
        told = set(faults)
        if followed is not None:
            yield followed
        else:
            time.sleep(wait)


def _told(error: Exception) -> tuple[str, str]:
    """Returns what is the same each time that an error is raised again, and its text."""
    if isinstance(error, OSError):  # its text has the name of a new file each time
        return str(error.errno or error), str(error)
    if isinstance(error, ValueError):
        return str(error), str(error)
    kind = type(error).__name__
    return kind, f"expected memory to serve an entry, got {kind}: {error}. It is tried again."
