"""Maps, appends to and replaces the files of served tables; a reader sees a whole change or no change.

A full disk is an OSError that names the file: see checkpoint_format/file_writer.py.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import FileWriter, naming

LOCK = "lock"
# MAP_NORESERVE of Linux; Python has the name from 3.13 on. Pages are only read, so no memory is reserved for
# copies of them.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


class DamagedTables(ValueError):
    """A file of served tables is damaged or missing: they must be built again."""


def mapped(path: Path, size: int, is_whole: bool = False) -> Tensor:
    """Maps the first bytes of a file, [size] uint8: pages are read at first use, and processes share them.

    Writes change this process's own copy of the page. A file that is shorter than `size`, or longer and
    `is_whole`, is damaged.
    """
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length < size or (is_whole and length > size):
            what = "truncated" if length < size else "too long"
            raise DamagedTables(
                f"{path}: expected {size} bytes, got {length}: it is {what}. Build it again."
            )
        return _map(file.fileno(), size, mmap.MAP_PRIVATE | _NO_RESERVE)


def new_mapped(path: Path, size: int, copied: Tensor | None = None) -> Tensor:
    """Creates a file and maps it, [size] uint8; writes change the file. copied: [size] uint8; None: zeros."""
    # All bytes get their room first: a write to a page without room would end the process.
    with closing(FileWriter(path)) as file:
        if copied is None:
            zeros = memoryview(bytes(knobs.HUGE_PAGE_BYTES))
            for place in range(0, size, knobs.HUGE_PAGE_BYTES):
                file.write(place, zeros[: size - place])
        else:
            file.write(0, copied.numpy())
    with open(path, "r+b") as opened:
        return _map(opened.fileno(), size, mmap.MAP_SHARED)


def _map(file: int, size: int, flags: int) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mmap.mmap(file, size, flags=flags), dtype=torch.uint8)


class SecondWriter(ValueError):
    """Another process, or another thread, writes to the same directory of served tables."""


class Appender:
    """A writer that appends rows to a file, after the `used` bytes in use, which do not change.

    Row r of a table is at byte r * row_bytes of the file. All tables share the file, and the rows of a table
    begin at multiples of the table's row_bytes; zeros are between the tables. Rows reach the file in whole
    huge pages, the last by `flush`. Bytes behind those in use are from a writer that did not finish.
    """

    def __init__(self, path: Path, used: int = 0) -> None:
        self._file = FileWriter(path)
        self._waiting: list[Tensor] = []
        self._written = used
        self.used = used

    def append(self, written: Tensor) -> Tensor:
        """Appends encoded rows, written [M, row_bytes] uint8, and returns their numbers, [M] int64."""
        count, width = written.shape
        first = -(-self.used // width)
        if count:
            gap = torch.zeros(first * width - self.used, dtype=torch.uint8, device="cpu")
            self._waiting += [gap, written.contiguous().view(-1)]
            self.used = (first + count) * width
            self._write_until(self.used // knobs.HUGE_PAGE_BYTES * knobs.HUGE_PAGE_BYTES)
        return torch.arange(first, first + count, device="cpu")

    def flush(self) -> None:
        """Writes the rows that wait; readers of the file see them from then on."""
        self._write_until(self.used)

    def _write_until(self, end: int) -> None:
        if end > self._written:
            waiting, count = torch.cat(self._waiting), end - self._written
            self._file.write(self._written, waiting[:count].numpy())
            self._written, self._waiting = end, [waiting[count:].clone()]

    def finish(self, size: int) -> None:
        """Writes the rows that wait, extends the file to `size` bytes by a hole, and commits it."""
        self.flush()
        if self._file.length() < size:
            self._file.resize(size)
        self._file.sync()

    def close(self) -> None:
        """Closes the file. Without `finish` its bytes may not be on the disk yet."""
        self._file.close()


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Holds the lock of a directory. The end of the process frees it, even if the process is killed."""
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
