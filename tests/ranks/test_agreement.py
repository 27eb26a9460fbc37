"""Errors of one rank are raised on all ranks, and keep no memory afterwards."""

import gc
import weakref
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers

from torchrec_dyn.ranks import exchange, gather_results, run_together


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


def gather_beside(faults: dict[int, Exception]) -> list[str]:
    """Returns the errors of a call in which some ranks fail, alone and within another call."""
    assert dist.group.WORLD is not None
    rank, texts = dist.get_rank(), []

    def work() -> int:
        if rank in faults:
            raise faults[rank]
        return rank

    def settled(group: dist.ProcessGroup, call: str, work: Callable[[], int]) -> None:
        run_together(group, "around", lambda: run_together(group, call, work))

    for call in (gather_results, run_together, settled):
        with pytest.raises((ValueError, RuntimeError, OSError)) as caught:
            call(dist.group.WORLD, "call", work)
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
    return texts


@pytest.mark.parametrize(
    ("faults", "raised"),
    [
        ({1: ValueError("expected a")}, "ValueError: call(rank=1): expected a"),
        ({2: KeyError("a")}, "RuntimeError: call(rank=2): 'a'"),
        (
            {1: OSError(28, "No space left", "/a")},
            "OSError: [Errno 28] call(rank=1): No space left: '/a'",
        ),
        ({1: OSError("no number")}, "RuntimeError: call(rank=1): no number"),
        (
            {1: MemoryError("expected memory"), 2: ValueError("expected b")},
            "OutOfMemoryError: call(rank=1): expected memory",
        ),
    ],
)
def test_every_rank_raises_the_error_of_the_lowest_rank(
    faults: dict[int, Exception], raised: str
) -> None:
    assert workers.run(gather_beside, faults, world_size=3) == [[raised] * 3] * 3


def call_by_rank() -> str:
    with pytest.raises(ValueError) as caught:
        run_together(dist.group.WORLD, f"call_{dist.get_rank() // 2}", lambda: None)
    return str(caught.value)


def test_ranks_in_different_calls_are_an_error_of_all() -> None:
    said = "call_0: expected the same call on every rank, got call_1 on rank 2."
    assert workers.run(call_by_rank, world_size=3) == [said] * 3


def give_values() -> list[list[Any]]:
    """Returns the values of all ranks: of none, of some and of all, and one that cannot be sent."""
    assert dist.group.WORLD is not None
    rank, world = dist.get_rank(), dist.group.WORLD
    large = list(range(1000))
    values = [None, large if rank == 1 else None, "a" * 1000 * rank, (rank, large)]
    got = [gather_results(world, "call", partial(copy, value)) for value in values]
    with pytest.raises(RuntimeError, match=r"call\(rank=2\): .*pickle"):
        gather_results(world, "call", lambda: (lambda: None) if rank == 2 else 0)
    return got


def test_values_are_gathered_by_rank() -> None:
    for got in workers.run(give_values, world_size=3):
        nothing, of_one, texts, of_all = got
        assert nothing == [None] * 3 and texts == ["", "a" * 1000, "a" * 2000]
        assert of_one[0] is of_one[2] is None and of_one[1] == list(range(1000))
        assert [rank for rank, _ in of_all] == [0, 1, 2] and len(of_all[2][1]) == 1000


def exchange_uneven() -> list[int]:
    """Sends to rank s the number 10 * rank + s, s + 1 times. The sent tensor has strides."""
    assert dist.group.WORLD is not None
    rank, ranks = dist.get_rank(), range(dist.get_world_size())

    numbers = [10 * rank + to for to in ranks for _ in range(to + 1)]
    sent = torch.tensor(numbers).repeat_interleave(2)[::2]
    send_sizes, receive_sizes = [to + 1 for to in ranks], [rank + 1] * len(ranks)
    return exchange(dist.group.WORLD, sent, send_sizes, receive_sizes).tolist()


def test_numbers_are_exchanged_by_rank() -> None:
    for rank, received in enumerate(workers.run(exchange_uneven, world_size=3)):
        assert received == [10 * sender + rank for sender in range(3) for _ in range(rank + 1)]
