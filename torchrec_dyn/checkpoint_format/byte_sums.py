"""Sums of the bytes of a file, by chunks of 1 MiB: they show whether a byte has changed, and where.

The sum of a chunk is its content sum (csrc/storage/content_sum.h): the file is read as rows of 128 int64,
with zeros after its last byte, and the row numbers are the ids. One changed byte always changes the sum. The
sums of two parts of a chunk add up to the sum of the chunk, so appending to a file reads nothing.

They guard against accidents. Whoever can write a file can write its sums too.
"""

from __future__ import annotations

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
    """Returns the sum, in [0, 2^64), of chunk `number` of a file.

    chunk: [SUMMED_BYTES] uint8, zeros after the last byte of the file.
    """
    return _sum_of_rows(number * _ROWS, chunk)


def _sum_of_rows(first: int, rows: Tensor) -> int:
    """Returns the sum of rows from row `first` of a file on.

    rows: [M * _ROW_BYTES] uint8, at most one chunk.
    """
    if rows.storage_offset() % 4 or rows.data_ptr() % 4:
        rows = rows.clone()
    numbers, key = _numbers_and_key()
    words = rows.view(torch.float32).view(
        -1, _ROW_BYTES // 4
    )  # two columns for each int64: the same sum
    return unsigned(int(ops.content_sum(numbers[: len(words)] + first, words, 0, key)))


@cache
def _numbers_and_key() -> tuple[Tensor, int]:
    return torch.arange(_ROWS, device="cpu"), table_key(0, "", "sum bytes")


def sums_of(data: Tensor) -> FileSums:
    """Returns the sums of a whole file, data [bytes] uint8."""
    running = RunningSums(FileSums())
    running.add(data)
    return running.sums()


class RunningSums:
    """The sums of a file that is appended to, after the bytes that `before` has the sums of."""

    def __init__(self, before: FileSums) -> None:
        self._sums, self._bytes = list(before.sums), before.bytes
        # Bytes of the last row that have no part in the sum yet, at their places; zeros elsewhere.
        self._row = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device="cpu")

    def add(self, data: Tensor) -> None:
        """Adds the next bytes of the file, data [M] uint8."""
        while data.numel():
            place = self._bytes % SUMMED_BYTES
            if place == 0:
                self._sums.append(0)
            in_row = place % _ROW_BYTES
            whole = min(data.numel(), SUMMED_BYTES - place) // _ROW_BYTES * _ROW_BYTES
            size = _ROW_BYTES - in_row if in_row or not whole else whole
            part, data = data[:size], data[size:]
            if in_row or not whole:
                self._row[in_row : in_row + part.numel()] = part
                if in_row + part.numel() == _ROW_BYTES:
                    self._end_row(place // _ROW_BYTES)
            else:
                self._add_rows(place // _ROW_BYTES, part)
            self._bytes += part.numel()

    def sums(self) -> FileSums:
        """Returns the sums of all bytes so far."""
        place = self._bytes % SUMMED_BYTES
        if place % _ROW_BYTES:
            self._end_row(place // _ROW_BYTES)
        return FileSums(self._bytes, tuple(self._sums))

    def _end_row(self, row: int) -> None:
        self._add_rows(row, self._row)
        self._row.zero_()

    def _add_rows(self, row: int, rows: Tensor) -> None:
        """Adds rows of the last chunk to its sum; the first is row `row` of the chunk."""
        number = len(self._sums) - 1
        added = _sum_of_rows(number * _ROWS + row, rows)
        self._sums[number] = unsigned(self._sums[number] + added)
