"""Ranks agree before they go on: what is wrong on one of them is raised on all.

A rank that raised alone would leave the others waiting in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def agree(
    group: dist.ProcessGroup | None, call: str, fault: Exception | None = None, told: Any = None
) -> list[Any]:
    """Waits for all ranks to come to the same point of the same call. Collective.

    Args:
        group: the ranks; None: there is one process, and it raises its own fault.
        call: table and method, the same on every rank.
        fault: why this rank cannot go on; None: it can.
        told: what this rank tells the others, small and picklable.

    Returns:
        What each rank told, by rank.

    Raises:
        ValueError: on every rank if the fault of the lowest faulty rank is one, or if the
            ranks are in different calls.
        RuntimeError: on every rank if that fault is anything else.
    """
    if group is None:
        if fault is not None:
            raise fault
        return [told]
    mine = (call, isinstance(fault, ValueError), None if fault is None else str(fault), told)
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    for rank, (their_call, is_value_error, text, _) in enumerate(everyones):
        if text is not None:
            error = ValueError if is_value_error else RuntimeError
            raise error(f"{their_call}(rank={rank}): {text}") from fault
    for rank, (their_call, *_) in enumerate(everyones):
        if their_call != everyones[0][0]:
            raise ValueError(
                f"{everyones[0][0]}: expected the same call on every rank, "
                f"got {their_call} on rank {rank}."
            )
    return [their_word for *_, their_word in everyones]


def told_together(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> list[T]:
    """Does this rank's part of a call; what any rank raised is raised on all, as `agree` does. Collective.

    Args:
        group: the ranks; None: there is one process.
        call: the same on every rank.
        work: what it returns is small and picklable.

    Returns:
        What the part of each rank returned.
    """
    fault: Exception | None = None
    done: Any = None
    try:
        done = work()
    except Exception as error:
        fault = error
    return agree(group, call, fault, done)


def done_together(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> T:
    """Does the same, and returns what this rank's part returned, which the others are not told.

    Args:
        group: the ranks; None: there is one process.
        call: the same on every rank.
        work: this rank's part.
    """
    done: list[T] = []
    told_together(group, call, lambda: done.append(work()))
    return done[0]
