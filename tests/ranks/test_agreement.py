"""Errors of one rank are raised on all ranks, and keep no memory afterwards."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers

from torchrec_dyn.ranks import gather_results, run_together


def fail(held: list[Any]) -> None:
    rows = torch.zeros(1000)
    held.append(weakref.ref(rows))
    raise MemoryError


def drop_rows(group: dist.ProcessGroup | None) -> list[str]:
    """Fails in a call; asserts that the tensors of the call are dropped with the error, without the gc."""
    held, texts = list[Any](), []
    gc.disable()
    try:
        for call in (gather_results, run_together):
            with pytest.raises((MemoryError, RuntimeError)) as caught:
                call(group, "call", lambda: fail(held))
            texts.append(str(caught.value))
            del caught
            assert held.pop()() is None
    finally:
        gc.enable()
    return texts


def drop_rows_of_ranks() -> list[str]:
    return drop_rows(dist.group.WORLD)


def test_a_call_that_failed_keeps_no_tensors() -> None:
    drop_rows(None)
    for texts in workers.run(drop_rows_of_ranks, world_size=2):
        assert texts == ["call(rank=0): MemoryError"] * 2
