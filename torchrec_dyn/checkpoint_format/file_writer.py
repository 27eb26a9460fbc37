"""FileWriter: writes a file in full, or raises an OSError that names the file.

Files are written without a buffer: after an error nothing waits to be written again when the file is closed.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    """An open file for writing, created if it is missing. Its errors are OSErrors with the path of the file.

    A symbolic link is refused: the file that it names may be another program's.
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

    def sync(self) -> None:
        """Waits until the file is on the disk."""
        with naming(self.path):
            os.fsync(self._file)

    def publish(self, path: Path) -> None:
        """Puts the file on the disk, under the name `path`, and closes it; it keeps its lock until then."""
        self.sync()
        os.replace(self.path, path)
        self.close()
        sync_to_disk(path.parent)

    def close(self) -> None:
        """Closes the file; does nothing if it is closed."""
        file, self._file = self._file, -1
        if file >= 0:
            with naming(self.path):
                os.close(file)

    def drop(self) -> None:
        """Removes and closes an open file. No error: the error that led here is the one to tell."""
        if self._file < 0:
            return
        with suppress(OSError):
            os.unlink(self.path)
        with suppress(OSError):
            self.close()


def write_beside(path: str | os.PathLike[str]) -> FileWriter:
    """Opens PATH.partial, empty and locked, which gets the name of the path before it is closed.

    What a killed process left there is dropped; BlockingIOError if another process writes it.
    """
    path = os.fspath(path)
    while True:
        try:
            file = FileWriter(f"{path}.partial")
        except (FileNotFoundError, NotADirectoryError) as error:
            error.filename = path
            raise
        try:
            _lock(file)
            if _is_at_its_path(file):
                file.resize(0)
                return file
        except BlockingIOError:
            file.close()
            raise
        except BaseException:
            file.drop()
            raise
        file.close()  # its writer has renamed or removed it since it was opened


def _is_at_its_path(file: FileWriter) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.path))
    except FileNotFoundError:
        return False


def _lock(file: FileWriter) -> None:
    """Locks a file; does nothing on a file system without locks."""
    with naming(file.path):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass


def sync_to_disk(path: str | os.PathLike[str]) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file: readers see the old bytes or the new bytes; an OSError leaves the old ones."""
    file = FileWriter(path.with_name(path.name + ".new"))
    try:
        file.resize(0)
        file.write(0, data)
        file.publish(path)
    except BaseException:
        file.drop()
        raise
