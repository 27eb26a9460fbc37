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
import io
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.ranks.groups import host_group
from torchrec_dyn.storage import lacks_memory

T = TypeVar("T")


def agree(
    group: dist.ProcessGroup | None, call: str, fault: Exception | None = None, value: Any = None
) -> list[Any]:
    """Waits until all ranks are at the same point of the same call. Collective.

    Returns the value of each rank, by rank; a value is small and picklable, without tensors. `fault` is the
    error that stops this rank; without a group it is raised as it is.

    Raises:
        ValueError: on every rank, if the fault of the lowest faulty rank is a ValueError, or if no rank has
            a fault but the ranks are in different calls.
        OSError: on every rank, with its number and file, if the fault is an error of the system.
        RuntimeError: on every rank, if the fault of the lowest faulty rank is any other exception; if it
            lacks memory, torch's OutOfMemoryError.
    """
    if group is None:
        try:
            if fault is not None:
                raise fault
        finally:
            del fault  # an error whose frames refer to it would keep their tensors
        return [value]
    try:
        sent = b"" if value is None else _bytes_of(value)
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


class _Values(pickle.Pickler):
    """Pickles values without tensors: if a rank had no memory for one it gets, the others would wait."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            raise TypeError(
                "torchrec_dyn bug: expected a value without tensors, got one. Send numbers."
            )
        return NotImplemented


def _bytes_of(value: Any) -> bytes:
    written = io.BytesIO()
    _Values(written, pickle.HIGHEST_PROTOCOL).dump(value)
    return written.getvalue()


class _Word(NamedTuple):
    """The words of a rank to the others if some rank has a fault, or is in another call.

    Attributes:
        call: its call.
        kind: type of the error that all ranks raise for its fault; None: it has no fault.
        text: the error's text.
        number: number of an OSError.
        file: file of an OSError.
    """

    call: str
    kind: type[Exception] | None = None
    text: str = ""
    number: int = 0
    file: Any = None


def _word_of(call: str, fault: Exception | None) -> _Word:
    if fault is None:
        return _Word(call)
    if isinstance(fault, OSError) and fault.errno is not None:
        # A full disk must look so on all ranks: who saves tries again.
        return _Word(call, OSError, str(fault.strerror), fault.errno, fault.filename)
    kind: type[Exception] = ValueError if isinstance(fault, ValueError) else RuntimeError
    if fault is not None and lacks_memory(fault):
        kind = torch.OutOfMemoryError
    return _Word(call, kind, str(fault) or type(fault).__name__)


def _fault_of_ranks(group: dist.ProcessGroup, call: str, fault: Exception | None) -> Exception:
    """Returns the error that all ranks raise. Collective, on ranks with a fault or in different calls."""
    mine = pickle.dumps(_word_of(call, fault))
    sizes = [size for (size,) in _gather_heads(group, [len(mine)])]
    words: list[_Word] = [pickle.loads(told) for told in _gather_bytes(group, mine, sizes)]
    made: Any
    for rank, word in enumerate(words):
        if word.kind is not None:
            text = f"{word.call}(rank={rank}): {word.text}"
            is_of_system = word.kind is OSError
            made = OSError(word.number, text, word.file) if is_of_system else word.kind(text)
            made.is_agreed = True  # read by `settle`
            return cast(Exception, made)
    rank = next(rank for rank, word in enumerate(words) if word.call != words[0].call)
    return ValueError(
        f"{words[0].call}: expected the same call on every rank, got {words[rank].call} on rank {rank}."
    )


def _number_of(call: str) -> int:
    """Returns a number of 63 bits for a call, the same on every rank."""
    return int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "big") >> 1


def _gather_heads(group: dist.ProcessGroup, head: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the numbers of all ranks, by rank; each rank gives as many. Collective."""
    layout = struct.Struct(f"{len(head)}q")
    return [layout.unpack(told) for told in _gather(group, layout.pack(*head))]


def _gather_bytes(group: dist.ProcessGroup, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Returns the bytes of all ranks, by rank. Collective. `sizes` are their numbers of bytes."""
    told = _gather(group, mine.ljust(max(sizes), b"\0"))
    return [words[:size] for words, size in zip(told, sizes, strict=True)]


def _gather(group: dist.ProcessGroup, mine: bytes) -> list[bytes]:
    """Returns the bytes of all ranks, by rank; each rank gives as many. Collective.

    No op of torch runs between the ranks' meetings: if it had no memory on one rank, the others would wait.
    """
    size, ranks = len(mine), dist.get_world_size(group)
    told = bytearray(size * ranks)
    parts = [
        torch.frombuffer(told, dtype=torch.uint8, count=size, offset=size * rank)
        for rank in range(ranks)
    ]
    dist.all_gather(
        parts, torch.frombuffer(bytearray(mine), dtype=torch.uint8), group=host_group(group)
    )
    return [bytes(told[begin : begin + size]) for begin in range(0, len(told), size)]


def gather_results(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> list[T]:
    """Runs this rank's part of a call and returns the results of all ranks, by rank. Collective.

    A result is small and picklable, without tensors. If `work` fails on some rank, every rank raises, as in
    `agree`.
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


def gather_settled(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> list[T]:
    """Runs a part of a call that is collective itself; returns the results of all ranks, by rank. Collective.

    An error that `work` raises on one rank only is raised on the others where they meet next: in an agreement
    inside `work`, or at its end. Results and errors are those of `gather_results`.
    """
    fault: Exception | None = None
    done: Any = None
    try:
        done = work()
    except Exception as error:
        if getattr(error, "is_agreed", False):
            raise  # on all ranks already
        fault = error
    try:
        return agree(group, call, fault, done)
    finally:
        del fault


def settle(group: dist.ProcessGroup | None, call: str, work: Callable[[], T]) -> T:
    """Runs a part of a call that is collective itself, and returns its result. Collective.

    Errors are those of `gather_settled`.
    """
    done: list[T] = []
    gather_settled(group, call, lambda: done.append(work()))
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
