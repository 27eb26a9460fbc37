"""FileWriter: writes a file in full, or raises an OSError that names the file.

Files are written without a buffer: after an error nothing waits to be written again when the file is closed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

_FLAGS = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the path of a file to an OSError of the block that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error


class FileWriter:
    """An open file for writing. Its errors are OSErrors with the path of the file.

    The file is created if it does not exist. A symbolic link is refused: the file that it names may be
    another program's.

    Raises:
        OSError: if the file cannot be opened; of every method, if the disk is full, a limit is reached or
            the disk fails.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = os.open(self.path, _FLAGS | os.O_CREAT, 0o666)

    def write(self, place: int, data: Any) -> None:
        """Writes data, bytes or a buffer of uint8 with one dimension, from byte `place` of the file on."""
        left = memoryview(data)
        with naming(self.path):
            while len(left):
                written = os.pwrite(self._file, left, place)
                if written <= 0:
                    raise OSError(errno.EIO, "no byte written")
                place, left = place + written, left[written:]

    def fileno(self) -> int:
        """Returns the descriptor of the open file."""
        return self._file

    def length(self) -> int:
        """Returns the length of the file in bytes."""
        with naming(self.path):
            return os.fstat(self._file).st_size

    def resize(self, size: int) -> None:
        """Cuts the file, or extends it by a hole, to `size` bytes."""
        with naming(self.path):
            os.ftruncate(self._file, size)

    def commit(self) -> None:
        """Waits until the file is on the disk."""
        with naming(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        """Closes the file; does nothing if it is closed."""
        file, self._file = self._file, -1
        if file >= 0:
            with naming(self.path):
                os.close(file)

    def drop(self) -> None:
        """Closes and removes the file. No error: the error that led here is the one to tell."""
        with suppress(OSError):
            self.close()
        with suppress(OSError):
            os.unlink(self.path)


def write_beside(path: str | os.PathLike[str]) -> FileWriter:
    """Opens PATH.<random digits>.partial, which gets the name of the path when it is complete.

    It is locked until it is closed. Files for the same path that are not locked are removed: their processes
    were killed.

    Raises:
        OSError: if the file cannot be opened; of a directory that is missing with the path itself.
    """
    path = os.fspath(path)
    _remove_left(path)
    while True:
        try:
            file = FileWriter(f"{path}.{secrets.token_hex(8)}.partial")
        except (FileNotFoundError, NotADirectoryError) as error:
            error.filename = path
            raise
        with suppress(OSError):  # a file system without locks: nobody removes the file
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process took it for one that is left


def _remove_left(path: str) -> None:
    """Removes the files of `write_beside` for this path whose processes have ended."""
    name = re.compile(re.escape(os.path.basename(path)) + r"\.[0-9a-f]{16}\.partial")
    with suppress(OSError):
        for one in os.scandir(os.path.dirname(path) or "."):
            if name.fullmatch(one.name):
                remove_left(one.path, partial(os.unlink, one.path))


def remove_left(path: str | os.PathLike[str], remove: Callable[[], None]) -> None:
    """Calls `remove` if a file of `write_beside` is there and its process has ended."""
    with suppress(OSError):
        file = os.open(path, _FLAGS)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may have got its name, and lost its lock, since it was opened.
            if os.path.exists(path):
                remove()
        finally:
            os.close(file)


def commit(path: str | os.PathLike[str]) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file: readers see the old bytes or the new bytes.

    Raises:
        OSError: if the disk is full, or fails; the old file is unchanged then.
    """
    file = FileWriter(path.with_name(path.name + ".new"))
    try:
        file.resize(0)
        file.write(0, data)
        file.commit()
        file.close()
        os.replace(file.path, path)
    except BaseException:
        file.drop()
        raise
    commit(path.parent)
