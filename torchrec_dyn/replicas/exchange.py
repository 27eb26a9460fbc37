"""Bytes that the ranks of a replica group send each other, and tensors as bytes.

What a rank computes is a generator: it yields the bytes for each replica, and gets those from each. So
`run_over` sends them over ranks, a test hands them over in one process, and an error between two sends is an
error on all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.ranks import exchange, gather_results

_T = TypeVar("_T")
# Yields [n] uint8 for each replica, in their order, and gets [n] uint8 from each; any numbers of bytes.
Sends = Generator[list[Tensor], list[Tensor], _T]

DIGEST_BYTES = 16
_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


def run_over(
    group: dist.ProcessGroup, ranks: Sequence[int], call: str, work: Sends[_T]
) -> tuple[_T, int]:
    """Runs a generator on every rank of the job; returns its result, and the bytes sent to other replicas.

    Generators of one replica group send equally often; those of other groups may send more or less often.
    `group` are all ranks of the job; it sends tensors of the CPU. `ranks` are those of this replica group in
    it, in the order of the replicas. An error of one rank is one of all.
    """
    place, total = ranks.index(dist.get_rank(group)), 0
    arrived: list[Tensor] = []
    results: list[_T] = []
    while True:
        parts: list[Tensor] = []
        sizes = gather_results(group, call, lambda: _next_sizes(work, arrived, parts, results))  # noqa: B023
        if all(of_rank is None for of_rank in sizes):
            return results[0], total
        sent, received = [0] * len(sizes), [0] * len(sizes)
        by_rank = dict(zip(ranks, parts, strict=False))
        for rank, part in by_rank.items():
            of_other = sizes[rank]
            assert of_other is not None, "generators of a replica group send equally often"
            sent[rank], received[rank] = part.numel(), of_other[place]
        total += sum(sent) - sent[ranks[place]]
        whole = torch.cat([_NO_BYTES, *(by_rank[rank] for rank in sorted(by_rank))])
        of_ranks = exchange(group, whole, sent, received).split(received)
        arrived = [of_ranks[rank] for rank in ranks]


def _next_sizes(
    work: Sends[_T], arrived: list[Tensor], parts: list[Tensor], results: list[_T]
) -> list[int] | None:
    """Runs a generator to its next send: adds its parts, and returns their sizes; None at its end."""
    if results:
        return None
    try:
        parts.extend(work.send(arrived) if arrived else next(work))
    except StopIteration as end:
        results.append(end.value)
        return None
    return [part.numel() for part in parts]


def digest_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a digest of tensors [...] of the CPU, [DIGEST_BYTES] uint8."""
    words = hashlib.blake2b(joined(tensors).numpy().tobytes(), digest_size=DIGEST_BYTES).digest()
    return torch.frombuffer(bytearray(words), dtype=torch.uint8)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of tensors [...] of the CPU, of any dtype, [n] uint8."""
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat([_NO_BYTES, *parts])


def lists_joined(lists: Sequence[Tensor]) -> Tensor:
    """Returns lists [K] int64 of different lengths as bytes, [n] uint8, for `Cursor.lists`; none if empty."""
    if not any(ids.numel() for ids in lists):
        return _NO_BYTES
    sizes = torch.tensor([ids.numel() for ids in lists], dtype=torch.int64, device="cpu")
    return joined([sizes, *lists])


class Cursor:
    """Takes tensors one after the other from bytes, sent [n] uint8."""

    def __init__(self, sent: Tensor) -> None:
        self._sent, self._begin = sent, 0

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Returns the next tensor, of a dtype and a shape."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        part = self._sent[self._begin : self._begin + size]
        self._begin += size
        return part.clone().view(dtype).view(shape)  # a copy: bytes begin anywhere

    def lists(self, count: int) -> list[Tensor]:
        """Returns `count` lists [K] int64 of `lists_joined`, which are all that is left."""
        if self._begin == self._sent.numel():
            return [torch.empty(0, dtype=torch.int64, device="cpu")] * count
        sizes = self.take(torch.int64, count).tolist()
        return [self.take(torch.int64, size) for size in sizes]
