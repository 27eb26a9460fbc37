"""Meetings of ranks in a collective call: an error of one rank is raised on all.

A collective call meets twice, beside its exchange of data: where the ranks compare their arguments, and once
each of them has prepared its change, before any of them commits. An error between two meetings is an error of
its rank alone: the others end by the time-out of their group (docs/failures.md).

A meeting sends 24 bytes a rank: a number of the call, whether the rank has an error, and the size of its
value. Values and errors follow only where there are any.

In all functions `group` has the ranks, or is None for one process, and `call` names table and method, the
same on every rank.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.storage import lacks_memory

T = TypeVar("T")

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
        result = work()
        sent = b"" if result is None else pickle.dumps(result)
    except Exception as error:
        if getattr(error, "agreed_by", None) is group:
            raise  # `work` met, too: all ranks have the error already
        _gather_numbers(group, [_number_of(call), 1, 0])
        raise _error_of_ranks(group, call, error) from error
    calls, errors, sizes = zip(
        *_gather_numbers(group, [_number_of(call), 0, len(sent)]), strict=True
    )
    if any(errors) or len(set(calls)) > 1:
        raise _error_of_ranks(group, call, None)
    words = _gather_bytes(group, sent, sizes) if any(sizes) else [b""] * len(sizes)
    return [cast(T, pickle.loads(sent) if sent else None) for sent in words]


def run_together(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> T:
    """Runs this rank's part of a call, then meets: returns its own result, which is not sent. Collective.

    `work` may be collective itself. Errors are those of `gather_results`.
    """
    done: list[T] = []
    gather_results(group, call, lambda: done.append(work()))
    return done[0]


def exchange(
    group: dist.ProcessGroup,
    sent: Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
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


def _report_of(call: str, error: Exception | None) -> tuple[Any, ...]:
    """Returns the call of a rank, and the kind, text, number and file of the error that all ranks raise."""
    if error is None:
        return call, None, "", 0, None
    if isinstance(error, OSError) and error.errno is not None:
        # A full disk must look so on all ranks: who saves tries again.
        return call, OSError, str(error.strerror), error.errno, error.filename
    kind: type[Exception] = ValueError if isinstance(error, ValueError) else RuntimeError
    if lacks_memory(error):
        kind = torch.OutOfMemoryError
    return call, kind, str(error) or type(error).__name__, 0, None


def _error_of_ranks(group: dist.ProcessGroup, call: str, error: Exception | None) -> Exception:
    """Returns the error that all ranks raise, some with an error or in another call. Collective."""
    sent = pickle.dumps(_report_of(call, error))
    sizes = [size for (size,) in _gather_numbers(group, [len(sent)])]
    reports = [pickle.loads(words) for words in _gather_bytes(group, sent, sizes)]
    for rank, (other, kind, text, number, file) in enumerate(reports):
        if kind is not None:
            text = f"{other}(rank={rank}): {text}"
            agreed: Any = OSError(number, text, file) if kind is OSError else kind(text)
            agreed.agreed_by = group
            return cast(Exception, agreed)
    calls = [report[0] for report in reports]
    rank = next(rank for rank, other in enumerate(calls) if other != calls[0])
    return ValueError(
        f"{calls[0]}: expected the same call on every rank, got {calls[rank]} on rank {rank}."
    )


def _number_of(call: str) -> int:
    """Returns a number of 63 bits for a call, the same on every rank."""
    return int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "big") >> 1


def _gather_numbers(group: dist.ProcessGroup, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the numbers of all ranks, by rank; each rank gives as many. Collective."""
    layout = struct.Struct(f"{len(numbers)}q")
    return [layout.unpack(words) for words in _gather(group, layout.pack(*numbers))]


def _gather_bytes(group: dist.ProcessGroup, sent: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Returns the bytes of all ranks, by rank. Collective. `sizes` are their numbers of bytes."""
    received = _gather(group, sent.ljust(max(sizes), b"\0"))
    return [words[:size] for words, size in zip(received, sizes, strict=True)]


def _gather(group: dist.ProcessGroup, sent: bytes) -> list[bytes]:
    """Returns the bytes of all ranks, by rank; each rank gives as many. Collective."""
    size, ranks = len(sent), dist.get_world_size(group)
    received = bytearray(size * ranks)
    parts = [
        torch.frombuffer(received, dtype=torch.uint8, count=size, offset=size * rank)
        for rank in range(ranks)
    ]
    own = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
    dist.all_gather(parts, own, group=host_group(group))
    return [bytes(received[begin : begin + size]) for begin in range(0, len(received), size)]


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a group of the same ranks that can send tensors of the CPU. Collective at its first call.

    It is `group` itself if that has a backend for the CPU, as groups of "gloo" and of "cpu:gloo,cuda:nccl"
    have; else a group of gloo with the same time-out.
    """
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
