"""Maps, appends to and replaces the files of served tables: a reader sees all of a change or none."""

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

# MAP_NORESERVE of Linux; Python names it from 3.13 on. Pages are only read: copies need no reserved memory.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


def mapped(path: Path, size: int, writable: bool = False) -> Tensor:
    """Maps the first bytes of a file: pages are read at first use, and processes share them.

    Args:
        path: of the file.
        size: bytes.
        writable: whether writes reach the file; otherwise they reach this process's own copy of the page.

    Returns:
        [size] uint8.

    Raises:
        ValueError: if the file is shorter.
    """
    with open(path, "r+b" if writable else "rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length < size:
            raise ValueError(
                f"{path}: expected {size} bytes, got {length}: it is truncated. Build it again."
            )
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE | _NO_RESERVE
        return torch.frombuffer(mmap.mmap(file.fileno(), size, flags=flags), dtype=torch.uint8)


class Appender:
    """Appends rows to a file behind the bytes in use, which do not change.

    Row r of a table is at byte r * row_bytes of the file: all tables share the file, and the rows of each
    begin at multiples of their own width.

    Args:
        path: of the file; made if it does not exist.
        used: bytes in use. Bytes behind them are from a writer that never finished, and are overwritten.
    """

    def __init__(self, path: Path, used: int) -> None:
        self._file = open(path, "r+b" if path.exists() else "x+b")  # noqa: SIM115
        self._file.truncate(max(used, os.fstat(self._file.fileno()).st_size))
        self.used = used

    def append(self, written: Tensor) -> Tensor:
        """Appends rows.

        Args:
            written: [M, row_bytes] uint8.

        Returns:
            [M] int64, their row numbers.
        """
        count, width = written.shape
        first = -(-self.used // width)
        self._file.seek(first * width)
        self._file.write(written.contiguous().numpy().data)
        self.used = (first + count) * width if count else self.used
        return torch.arange(first, first + count)

    def close(self, size: int) -> None:
        """Commits the file to the disk.

        Args:
            size: its least length; behind the rows it is sparse.
        """
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
    """Holds the lock of a directory; the end of this process, however it ends, frees it.

    Raises:
        ValueError: if another process, or thread, holds it.
    """
    with open(folder / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{folder}: expected one writer at a time, got a second one. Wait for the first."
            ) from None
        yield
