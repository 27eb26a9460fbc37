"""Keeps the ranks in step over streams of their own: they stop together and they fail together.

Every training step is a collective. A rank whose part of the file ends one batch early, or holds
a broken line, must not leave the others waiting in an all-to-all: they agree before each step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from parts.clicks import Clicks

FAILED = -1


class AnotherRankFailed(RuntimeError):
    """This rank is fine, but another could not read its next batch; that one tells why."""


def in_step(batches: Iterator[Clicks], group: dist.ProcessGroup | None = None) -> Iterator[Clicks]:
    """Yields batches of one size on all ranks, until the first rank has no more.

    The size is the smallest that any rank has for this step (clicks beyond it are dropped: at most
    one batch, at the end of a file).

    Args:
        batches: this rank's own.
        group: of all ranks, on CPU. None is the default group.

    Raises:
        Exception: what this rank's `batches` raised, once all ranks know of it.
        AnotherRankFailed: on the ranks that did not fail.
    """
    while True:
        batch, error = None, None
        try:
            batch = next(batches, None)
        except Exception as failure:
            error = failure
        size = torch.tensor(FAILED if error else len(batch) if batch else 0)
        dist.all_reduce(size, dist.ReduceOp.MIN, group)
        if size == FAILED:
            raise error or AnotherRankFailed()
        if size == 0:
            return
        yield batch.first(int(size))
