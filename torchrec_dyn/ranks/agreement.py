"""Agreement of ranks: an error on one rank of a call is raised on all.

A rank that raised alone would leave the others waiting in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def agree(
    group: dist.ProcessGroup | None, call: str, fault: Exception | None = None, value: Any = None
) -> list[Any]:
    """Waits until all ranks are at the same point of the same call, and gathers a value. Collective.

    Args:
        group: the ranks; None: this process alone.
        call: table and method, the same on every rank.
        fault: why this rank cannot go on; None: it can.
        value: of this rank, small and picklable.

    Returns:
        The values of all ranks, by rank.

    Raises:
        ValueError: on every rank if the fault of the lowest faulty rank is one, or if the
            ranks are in different calls.
        RuntimeError: on every rank if that fault is anything else.
    """
    if group is None:
        if fault is not None:
            raise fault
        return [value]
    mine = (call, isinstance(fault, ValueError), None if fault is None else str(fault), value)
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
    return [their_value for *_, their_value in everyones]


def gather_results(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> list[T]:
    """Runs a part of a call on every rank; an error on one is raised on all, as by `agree`. Collective.

    Args:
        group: the ranks; None: this process alone.
        call: the same on every rank.
        work: this rank's part; its result is small and picklable.

    Returns:
        The results of all ranks, by rank.
    """
    fault: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        fault = error
    return agree(group, call, fault, result)


def run_together(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> T:
    """Runs a part of a call as `gather_results` does, but returns this rank's own result. Collective.

    Args:
        group: the ranks; None: this process alone.
        call: the same on every rank.
        work: this rank's part; its result is sent nowhere.
    """
    results: list[T] = []
    gather_results(group, call, lambda: results.append(work()))
    return results[0]
