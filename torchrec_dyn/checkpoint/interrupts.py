"""Interrupts in a call of DCP: Ctrl-C, or the SystemExit of a signal handler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Raises an interrupt of the block on every rank: DCP wraps all that is raised, as if it were damage."""
    try:
        yield
    except CheckpointException as error:
        for fault, _ in error.failures.values():
            if not isinstance(fault, Exception):
                raise fault from error
        raise
