"""Meetings of ranks in a collective call: an error of one rank is raised on all.

A collective call meets twice, beside its exchange of data: where the ranks compare their arguments, and once
each of them has prepared its change, before any of them commits. An error between two meetings is an error of
its rank alone: the others end by the time-out of their group (docs/failures.md).

In all functions `group` has the ranks, or is None for one process, and `call` names table and method, the
same on every rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.storage import lacks_memory

T = TypeVar("T")
# What a rank sends: the call, its error as a type with arguments, if it has one, and its result, pickled.
_Report = tuple[str, tuple[Any, ...], bytes]

_HOST = torch.device("cpu")
_host_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_background_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def gather_results(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> list[T]:
    """Runs this rank's part of a call, then meets: returns the results of all ranks, by rank. Collective.

    A result is small and picklable, without tensors. All ranks raise the error of the lowest faulty rank, as
    ValueError, OSError, torch.OutOfMemoryError or RuntimeError; ValueError if they are in different calls.
    """
    if group is None:
        return [work()]
    try:
        sent = pickle.dumps(work())
    except Exception as error:
        if getattr(error, "agreed_by", None) is group:
            raise  # `work` met, too: all ranks have the error already
        where = f"{call}(rank={dist.get_rank(group)})"
        reports = _gather(group, (call, _raised_by_all(where, error), b""))
        raise _error_of(group, reports) from error
    reports = _gather(group, (call, (), sent))
    if any(other != call or error for other, error, _ in reports):
        raise _error_of(group, reports)
    return [pickle.loads(result) for _, _, result in reports]


def run_together(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> T:
    """Runs this rank's part of a call, which may meet, too, then meets: returns its own result."""
    done: list[T] = []
    gather_results(group, call, lambda: done.append(work()))
    return done[0]


def exchange(
    group: dist.ProcessGroup, sent: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
) -> Tensor:
    """Sends numbers to all ranks, without a meeting; returns those received, by sender. Collective.

    `sent` [n], on the CPU, by receiver; of one dtype on all ranks. The sizes [ranks] count the numbers for
    and from each rank.
    """
    received = torch.empty(sum(receive_sizes), dtype=sent.dtype, device="cpu")
    size = sent.element_size()
    dist.all_to_all_single(
        # As bytes: backends differ in the dtypes that they can send.
        received.view(torch.uint8),
        sent.contiguous().view(torch.uint8),
        [count * size for count in receive_sizes],
        [count * size for count in send_sizes],
        group=group,
    )
    return received


def _gather(group: dist.ProcessGroup, report: _Report) -> list[_Report]:
    """Returns the reports of all ranks, by rank. Collective."""
    reports = [report] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, host_group(group))
    return reports


def _raised_by_all(where: str, error: Exception) -> tuple[Any, ...]:
    """Returns the type and the arguments of the error that all ranks raise for one of this rank."""
    if isinstance(error, OSError) and error.errno is not None:
        # A full disk must look so on all ranks: who saves tries again.
        return OSError, error.errno, f"{where}: {error.strerror}", error.filename
    kind: type[Exception] = ValueError if isinstance(error, ValueError) else RuntimeError
    if lacks_memory(error):
        kind = torch.OutOfMemoryError
    return kind, f"{where}: {str(error) or type(error).__name__}"


def _error_of(group: dist.ProcessGroup, reports: Sequence[_Report]) -> Exception:
    """Returns the error of the lowest faulty rank; without one, that of ranks in different calls."""
    for _, error, _ in reports:
        if error:
            agreed: Any = error[0](*error[1:])
            agreed.agreed_by = group
            return cast(Exception, agreed)
    calls = [call for call, _, _ in reports]
    rank = next(rank for rank, other in enumerate(calls) if other != calls[0])
    return ValueError(
        f"{calls[0]}: expected the same call on every rank, got {calls[rank]} on rank {rank}."
    )


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns `group`, or one of gloo if it sends no tensors of the CPU; the first call is collective."""
    if _HOST in group._device_types:
        return group
    return _group_of_gloo(
        group,
        _host_groups,
        f"got backend '{dist.get_backend(group)}' alone. Create the group with "
        "backend='cpu:gloo,cuda:nccl'.",
    )


def background_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a group of gloo of the same ranks, for another thread. The first call is collective."""
    return _group_of_gloo(group, _background_groups, "got some. Use `save`, not `async_save`.")


def _group_of_gloo(
    group: dist.ProcessGroup,
    groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup],
    fault: str,
) -> dist.ProcessGroup:
    """Returns the group of gloo in `groups` with the ranks of another group, and creates it once."""
    if group not in groups:
        # torch sorts the ranks of a new group, and counts the groups of a rank to name a group of some
        # ranks: ranks in different numbers of groups would wait for each other.
        ranks, world_size = dist.get_process_group_ranks(group), dist.get_world_size()
        if ranks != list(range(world_size)):
            raise ValueError(
                f"process group of ranks {ranks}: expected all {world_size} ranks in order, {fault}"
            )
        backend: Any = group._get_backend(group._device_types[0])
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        groups[group] = cast(dist.ProcessGroup, dist.new_group(timeout=timeout, backend="gloo"))
    return groups[group]
