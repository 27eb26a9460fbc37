"""Follows a directory of `Checkpoints` without end: a `Follower` that looks every few seconds, and warns."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from numbers import Real

import torch

from torchrec_dyn.serving.follower import Followed, Follower

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

    An entry that cannot be used, a fork, or a full disk, is a warning, once, and is tried again, in longer
    intervals while it lasts.

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
        except (ValueError, OSError) as error:
            followed, wait = None, min(2 * wait, max(every, _LONGEST_WAIT))
            # The text of an OSError has the name of a new file each time.
            faults = {str(getattr(error, "errno", None) or error): str(error)}
        for fault in sorted(faults.keys() - told) if followed is None else ():
            warnings.warn(f"serving.follow: {faults[fault]}", stacklevel=2)
        told = set(faults)
        if followed is not None:
            yield followed
        else:
            time.sleep(wait)
