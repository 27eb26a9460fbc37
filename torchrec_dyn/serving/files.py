"""Maps, appends to and replaces the files of served tables; a reader sees a whole change or no change.

A full disk is an OSError that names the file: see checkpoint_format/file_writer.py.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import FileWriter, RunningSums, naming

LOCK = "lock"
# MAP_NORESERVE of Linux; Python has the name from 3.13 on. Pages are only read, so no memory is reserved for
# copies of them.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
# Linux keeps what one write fills in pages of 2 MiB, if it begins at a multiple of their size and the file
# system can (ext4 since Linux 6.16). Random rows of a mapped file then miss the TLB far less often.
HUGE_PAGE = 2 << 20


def mapped(path: Path, size: int, is_whole: bool = False, readable: int = 0) -> Tensor:
    """Maps the first bytes of a file, [size] uint8: pages are read at first use, and processes share them.

    Writes change this process's own copy of the page. Memory behind the tensor can be read up to byte
    `readable`; if the file has no page for it, the file is read into memory.

    Raises:
        ValueError: if the file is shorter than `size`, or longer and `is_whole`.
    """
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length < size or (is_whole and length > size):
            what = "truncated" if length < size else "too long"
            raise ValueError(
                f"{path}: expected {size} bytes, got {length}: it is {what}. Build it again."
            )
        end = min(length, max(size, readable))
        if readable - end <= -end % mmap.PAGESIZE:
            return _map(file.fileno(), end, mmap.MAP_PRIVATE | _NO_RESERVE, size)
        memory = bytearray(readable)
        with naming(path):
            file.readinto(memoryview(memory)[:end])
        return _tensor(memory, size)


def new_mapped(path: Path, size: int, copied: Tensor | None = None) -> Tensor:
    """Creates a file and maps it, [size] uint8; writes change the file.

    The bytes have room on the disk before they are mapped: a write to a page without room would end the
    process.

    copied: [size] uint8, its bytes; None: zeros.

    Raises:
        OSError: if the disk has no room for the file.
    """
    file = FileWriter(path)
    try:
        if copied is None:
            file.allocate(size)
            # Without zeros, the first write to each small page would add this page.
            zeros = bytes(HUGE_PAGE)
            for place in range(0, size, HUGE_PAGE):
                file.write(place, memoryview(zeros)[: size - place])
        else:
            file.write(0, copied.numpy())
    finally:
        file.close()
    with open(path, "r+b") as opened:
        return _map(opened.fileno(), size, mmap.MAP_SHARED, size)


def _map(file: int, end: int, flags: int, size: int) -> Tensor:
    return _tensor(mmap.mmap(file, end, flags=flags) if end else b"", size)


def _tensor(memory: Any, size: int) -> Tensor:
    """Returns the first bytes of a buffer, [size] uint8."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8, count=size)


class SecondWriter(ValueError):
    """Another process, or another thread, writes to the same directory of served tables."""


class Appender:
    """A writer that appends rows to a file, after the bytes in use. The bytes in use do not change.

    Rows reach the file in whole huge pages, the last by `flush`.

    Row r of a table is at byte r * row_bytes of the file. All tables share the file, and the rows of a table
    begin at multiples of the table's row_bytes; zeros are between the tables.

    The file is created if it does not exist. The first `used` bytes are in use. Bytes after them are from a
    writer that did not finish, and are overwritten. `sums` are the sums of the bytes in use and get
    the bytes that are appended; None: nothing is summed.
    """

    def __init__(self, path: Path, used: int, sums: RunningSums | None) -> None:
        self._file = FileWriter(path)
        self._sums = sums
        self._waiting: list[Tensor] = []
        self._written = used
        self.used = used

    def append(self, written: Tensor) -> Tensor:
        """Appends encoded rows, written [M, row_bytes] uint8, and returns their numbers, [M] int64."""
        count, width = written.shape
        first = -(-self.used // width)
        if count:
            self._add(torch.zeros(first * width - self.used, dtype=torch.uint8, device="cpu"))
            self._add(written.contiguous().view(-1))
        return torch.arange(first, first + count, device="cpu")

    def _add(self, data: Tensor) -> None:
        self._waiting.append(data)
        self.used += data.numel()
        if self._sums is not None:
            self._sums.add(data)
        end = self.used // HUGE_PAGE * HUGE_PAGE
        if end > self._written:
            self._write_until(end)

    def _write_until(self, end: int) -> None:
        waiting, count = torch.cat(self._waiting), end - self._written
        self._file.write(self._written, waiting[:count].numpy())
        self._written, self._waiting = end, [waiting[count:].clone()]

    def flush(self) -> None:
        """Writes the rows that wait; readers of the file see them from then on."""
        if self.used > self._written:
            self._write_until(self.used)

    def close(self) -> None:
        """Closes the file. Its bytes may not be on the disk yet."""
        self._file.close()


def extend(path: Path, size: int) -> None:
    """Extends a file to `size` bytes by a hole, and commits it; a longer file keeps its length."""
    file = FileWriter(path)
    try:
        if file.length() < size:
            file.resize(size)
        file.commit()
    finally:
        file.close()


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Holds the lock of a directory. The end of the process frees it, even if the process is killed.

    Raises:
        SecondWriter: if another process, or another thread, holds the lock.
        OSError: if the file system has no locks.
    """
    with open(folder / LOCK, "a") as file:
        try:
            with naming(folder / LOCK):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SecondWriter(
                f"{folder}: expected one writer at a time, got a second writer. Wait for the first."
            ) from None
        try:
            yield
        finally:  # a process that was forked meanwhile has the file open, too
            fcntl.flock(file, fcntl.LOCK_UN)
