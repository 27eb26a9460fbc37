"""Maps, appends to and replaces the files of served tables; a reader sees a whole change or no change."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

# MAP_NORESERVE of Linux; Python has the name from 3.13 on. Pages are only read, so no memory is reserved for
# copies of them.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


def mapped(path: Path, size: int, writable: bool = False, is_whole: bool = False) -> Tensor:
    """Maps the first bytes of a file, [size] uint8: pages are read at first use, and processes share them.

    Writes change the file if it is `writable`, else this process's own copy of the page.

    Raises:
        ValueError: if the file is shorter than `size`, or longer and `is_whole`.
    """
    with open(path, "r+b" if writable else "rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length < size or (is_whole and length > size):
            what = "truncated" if length < size else "too long"
            raise ValueError(
                f"{path}: expected {size} bytes, got {length}: it is {what}. Build it again."
            )
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE | _NO_RESERVE
        return torch.frombuffer(mmap.mmap(file.fileno(), size, flags=flags), dtype=torch.uint8)


class Appender:
    """A writer that appends rows to a file, after the bytes in use. The bytes in use do not change.

    Row r of a table is at byte r * row_bytes of the file. All tables share the file, and the rows of a table
    begin at multiples of the table's row_bytes.

    The file is created if it does not exist. The first `used` bytes are in use. Bytes after them are from a
    writer that did not finish, and are overwritten.
    """

    def __init__(self, path: Path, used: int) -> None:
        self._file = open(path, "r+b" if path.exists() else "x+b")  # noqa: SIM115
        self._file.truncate(max(used, os.fstat(self._file.fileno()).st_size))
        self.used = used

    def append(self, written: Tensor) -> Tensor:
        """Appends rows and returns their numbers, [M] int64.

        Args:
            written: [M, row_bytes] uint8, encoded rows.
        """
        count, width = written.shape
        first = -(-self.used // width)
        self._file.seek(first * width)
        self._file.write(written.contiguous().numpy().data)
        self.used = (first + count) * width if count else self.used
        return torch.arange(first, first + count)

    def close(self, size: int) -> None:
        """Commits the file to the disk with `size` bytes or more, sparse after the rows, and closes it."""
        self._file.flush()
        self._file.truncate(max(size, os.fstat(self._file.fileno()).st_size))
        os.fsync(self._file.fileno())
        self._file.close()


def commit(path: Path) -> None:
    """Commits a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replaces a text file: readers see the old text or the new text."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    commit(beside)
    os.replace(beside, path)
    commit(path.parent)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Holds the lock of a directory. The end of the process frees it, even if the process is killed.

    Raises:
        ValueError: if another process, or another thread, holds the lock.
    """
    with open(folder / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{folder}: expected one writer at a time, got a second writer. Wait for the first."
            ) from None
        yield
