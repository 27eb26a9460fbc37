"""Sums of the bytes of a file, by chunks of 1 MiB: they show whether a byte has changed, and where.

The sum of a chunk is its content sum (csrc/storage/content_sum.h): the file is read as rows of 128 int64,
with zeros after its last byte, and the row numbers are the ids. One changed byte always changes the sum. The
sums of two parts of a chunk add up to the sum of the chunk, so appending to a file reads nothing.

They guard against accidents. Whoever can write a file can write its sums too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.initializers import table_key
from torchrec_dyn.storage import unsigned

SUMMED_BYTES = 1 << 20
_ROW_BYTES = 1 << 10
_ROWS = SUMMED_BYTES // _ROW_BYTES


@dataclass(frozen=True)
class FileSums:
    """The number of bytes of a file, and a sum in [0, 2^64) for each chunk of these bytes."""

    bytes: int = 0
    sums: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """The sum of the whole file, in [0, 2^64)."""
        return unsigned(sum(self.sums))


def chunk_sum(number: int, chunk: Tensor) -> int:
    """Returns the sum of a chunk, in [0, 2^64).

    Args:
        number: number of the chunk in its file.
        chunk: [SUMMED_BYTES] uint8, zeros after the last byte of the file.
    """
    rows, key = _rows_and_key()
    words = chunk.view(torch.int64).view(_ROWS, -1)
    return unsigned(int(ops.content_sum(rows + number * _ROWS, words, 0, key)))


@cache
def _rows_and_key() -> tuple[Tensor, int]:
    return torch.arange(_ROWS, device="cpu"), table_key(0, "", "sum bytes")


def sums_of(data: Tensor) -> FileSums:
    """Returns the sums of a whole file.

    Args:
        data: [bytes] uint8, its bytes.
    """
    sums = tuple(chunk_sum(number, chunk) for number, chunk in enumerate(chunks_of(data)))
    return FileSums(data.numel(), sums)


def chunks_of(data: Tensor) -> Iterator[Tensor]:
    """Yields bytes as chunks for `chunk_sum`.

    Args:
        data: [bytes] uint8, all bytes of a file.
    """
    for part in data.split(SUMMED_BYTES):
        if part.numel() == SUMMED_BYTES and part.data_ptr() % 8 == 0:
            yield part
        elif part.numel():
            padded = torch.zeros(SUMMED_BYTES, dtype=torch.uint8, device="cpu")
            padded[: part.numel()] = part
            yield padded


class RunningSums:
    """The sums of a file that is appended to, after the bytes that `before` has the sums of."""

    def __init__(self, before: FileSums) -> None:
        self._sums, self._bytes = list(before.sums), before.bytes
        # The bytes that were added to the last chunk, at their places; zeros elsewhere.
        self._added = torch.zeros(SUMMED_BYTES, dtype=torch.uint8, device="cpu")

    def add(self, data: Tensor) -> None:
        """Adds bytes.

        Args:
            data: [M] uint8, the next bytes of the file.
        """
        while data.numel():
            place = self._bytes % SUMMED_BYTES
            if place == 0:
                self._sums.append(0)
            part, data = data[: SUMMED_BYTES - place], data[SUMMED_BYTES - place :]
            self._added[place : place + part.numel()] = part
            self._bytes += part.numel()
            if self._bytes % SUMMED_BYTES == 0:
                self._end_chunk()

    def sums(self) -> FileSums:
        """Returns the sums of all bytes so far."""
        if self._sums:
            self._end_chunk()
        return FileSums(self._bytes, tuple(self._sums))

    def _end_chunk(self) -> None:
        """Moves the added bytes into the sum of the last chunk."""
        number = len(self._sums) - 1
        self._sums[-1] = unsigned(self._sums[-1] + chunk_sum(number, self._added))
        self._added.zero_()
