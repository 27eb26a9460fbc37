"""Keeps ranks with separate streams in step: all ranks stop together and fail together.

Every training step is a collective. If the part of one rank ends one batch early or has a bad line, the
other ranks must not wait in an all-to-all without end. So all ranks agree before each step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from parts.clicks import Clicks

FAILED = -1


class AnotherRankFailed(RuntimeError):
    """Another rank could not read its next batch. That rank prints the reason."""


def in_step(batches: Iterator[Clicks], group: dist.ProcessGroup | None = None) -> Iterator[Clicks]:
    """Yields batches of equal size on all ranks, until a rank has no more batches.

    The size is the smallest size of any rank in this step. Clicks above this size are dropped: at most one
    batch, at the end of a file.

    Args:
        batches: batches of this rank.
        group: process group of all ranks, on CPU. None is the default group.

    Raises:
        Exception: the error of this rank's `batches`, after all ranks got the failure.
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
