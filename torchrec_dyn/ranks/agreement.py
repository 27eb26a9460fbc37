"""Agreement between ranks in a collective call: an error of one rank is raised on all.

If one rank raised alone, the other ranks would wait in the next collective. So all work between two
collectives, down to the memory that it allocates, runs in a function here.

An agreement sends 24 bytes a rank: a number of the call, whether the rank has a fault, and the size of its
value. Values and errors follow only where there are any.

In all functions `group` has the ranks, or is None for one process, and `call` names table and method, the
same on every rank.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.ranks.groups import host_group

T = TypeVar("T")


def agree(
    group: dist.ProcessGroup | None, call: str, fault: Exception | None = None, value: Any = None
) -> list[Any]:
    """Waits until all ranks are at the same point of the same call. Collective.

    Returns the value of each rank, by rank; a value is small and picklable. `fault` is the error that stops
    this rank; without a group it is raised as it is.

    Raises:
        ValueError: on every rank, if the fault of the lowest faulty rank is a ValueError, or if no rank has
            a fault but the ranks are in different calls.
        OSError: on every rank, with its number and file, if the fault is an error of the system.
        RuntimeError: on every rank, if the fault of the lowest faulty rank is any other exception.
    """
    if group is None:
        try:
            if fault is not None:
                raise fault
        finally:
            del fault  # an error whose frames refer to it would keep their tensors
        return [value]
    try:
        sent = b"" if value is None else pickle.dumps(value)
    except Exception as error:
        sent, fault = b"", fault or error
    heads = _gather_heads(group, [_number_of(call), int(fault is not None), len(sent)])
    if any(has_fault or number != heads[0][0] for number, has_fault, _ in heads):
        raise _fault_of_ranks(group, call, fault) from fault
    sizes = [size for *_, size in heads]
    if not any(sizes):
        return [None] * len(sizes)
    of_ranks = _gather_bytes(group, sent, sizes)
    return [pickle.loads(words) if words else None for words in of_ranks]


def _fault_of_ranks(group: dist.ProcessGroup, call: str, fault: Exception | None) -> Exception:
    """Returns the error that all ranks raise. Collective, on ranks with a fault or in different calls."""
    text = None if fault is None else str(fault) or type(fault).__name__
    system = None  # a full disk must look so on all ranks: who saves tries again
    if isinstance(fault, OSError) and fault.errno is not None:
        system = fault.errno, str(fault.strerror), fault.filename
    mine = pickle.dumps((call, isinstance(fault, ValueError), system, text))
    sizes = [size for (size,) in _gather_heads(group, [len(mine)])]
    told = [pickle.loads(words) for words in _gather_bytes(group, mine, sizes)]
    for rank, (other_call, is_value_error, system, text) in enumerate(told):
        if text is not None:
            return _agreed(is_value_error, system, f"{other_call}(rank={rank})", text)
    rank = next(rank for rank, (other_call, *_) in enumerate(told) if other_call != told[0][0])
    return ValueError(
        f"{told[0][0]}: expected the same call on every rank, got {told[rank][0]} on rank {rank}."
    )


def _number_of(call: str) -> int:
    """Returns a number of 63 bits for a call, the same on every rank."""
    return int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "big") >> 1


def _gather_heads(group: dist.ProcessGroup, head: Sequence[int]) -> list[list[int]]:
    """Returns the numbers of all ranks, by rank; each rank gives as many. Collective."""
    mine = torch.tensor(head, dtype=torch.int64, device="cpu")
    return [one.tolist() for one in _gather(group, mine)]


def _gather_bytes(group: dist.ProcessGroup, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Returns the bytes of all ranks, by rank. Collective. `sizes` are their numbers of bytes."""
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(mine)] = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[: len(mine)]
    parts = zip(_gather(group, padded), sizes, strict=True)
    return [part[:size].numpy().tobytes() for part, size in parts]


def _gather(group: dist.ProcessGroup, mine: Tensor) -> list[Tensor]:
    parts = list(mine.new_empty(dist.get_world_size(group), mine.numel()).unbind())
    dist.all_gather(parts, mine, group=host_group(group))
    return parts


def _agreed(
    is_value_error: bool, system: tuple[int, str, Any] | None, where: str, text: str
) -> Exception:
    """Returns an error that is raised on all ranks, which `settle` sees by its attribute.

    `system` has number, reason and file of an OSError.
    """
    made: Any
    if system is not None:
        number, reason, file = system
        made = OSError(number, f"{where}: {reason}", file)
    else:
        made = (ValueError if is_value_error else RuntimeError)(f"{where}: {text}")
    made.is_agreed = True
    error: Exception = made
    return error


def gather_results(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> list[T]:
    """Runs this rank's part of a call and returns the results of all ranks, by rank. Collective.

    A result is small and picklable. If `work` fails on some rank, every rank raises, as in `agree`.
    """
    fault: Exception | None = None
    done: Any = None
    try:
        done = work()
    except Exception as error:
        fault = error
    try:
        return agree(group, call, fault, done)
    finally:
        del fault  # an error whose frames refer to it would keep their tensors


def run_together(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> T:
    """Runs this rank's part of a call and returns its result, which is not sent. Collective.

    Errors are those of `gather_results`.
    """
    done: list[T] = []
    gather_results(group, call, lambda: done.append(work()))
    return done[0]


def settle(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> T:
    """Runs a part of a call that is collective itself, and returns its result. Collective.

    An error that `work` raises on one rank only is raised on the others where they meet next: in an agreement
    inside `work`, or at its end. Errors are those of `gather_results`.
    """
    fault: Exception | None = None
    done: list[T] = []
    try:
        done.append(work())
    except Exception as error:
        if getattr(error, "is_agreed", False):
            raise  # on all ranks already
        fault = error
    try:
        agree(group, call, fault)
    finally:
        del fault
    return done[0]


def exchange(
    group: dist.ProcessGroup,
    call: str,
    make: Callable[[], Tensor],
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
) -> Tensor:
    """Sends numbers to all ranks after every rank has made its numbers; returns those received, by sender.

    Collective. The group sends tensors of the CPU. make: returns the numbers to send, one-dimensional, on the
    CPU, by receiver; of one dtype on all ranks. The sizes [ranks] count the numbers for and from each rank.

    Raises:
        ValueError, RuntimeError: on every rank, if `make` fails on some rank, or a rank has no memory for
            the numbers that it receives; see `agree`. Nothing was sent then.
    """

    def prepare() -> tuple[Tensor, Tensor, Tensor, int]:
        sent = make().contiguous()
        received = torch.empty(sum(receive_sizes), dtype=sent.dtype, device="cpu")
        # As bytes: backends differ in the dtypes that they can send.
        return received, received.view(torch.uint8), sent.view(torch.uint8), sent.element_size()

    received, into, sent, size = run_together(group, call, prepare)
    dist.all_to_all_single(
        into,
        sent,
        [count * size for count in receive_sizes],
        [count * size for count in send_sizes],
        group=group,
    )
    return received
