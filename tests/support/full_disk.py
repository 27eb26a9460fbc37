"""Disks that are full, limited or failing, for the writers of files."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

Try = Callable[[], None]
FULL, LIMITED, FAILED = errno.ENOSPC, errno.EFBIG, errno.EIO


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mounts a tmpfs of `size` bytes in a new folder; skips the test where this is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no program `mount`")
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def room_left(disk: Path, size: int) -> Iterator[None]:
    """Fills a disk except for `size` bytes."""
    filler = disk / "filler"
    with open(filler, "xb") as file:
        taken = shutil.disk_usage(disk).free - size
        if taken > 0:
            os.posix_fallocate(file.fileno(), 0, taken)
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Limits the length of files that this process writes. Python ignores the signal SIGXFSZ."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FailingFiles:
    """The functions of `os` that change files, of which one call fails and every other write is short.

    Calls are counted for files below `folder` only; the `at`-th call raises OSError(EIO).
    """

    def __init__(self, folder: Path, at: int) -> None:
        self._folder, self._at, self.calls = str(folder), at, 0

    def __enter__(self) -> FailingFiles:
        names = ("pwrite", "fsync", "ftruncate", "replace", "rename", "mkdir", "posix_fallocate")
        self._real = {name: getattr(os, name) for name in names if hasattr(os, name)}
        for name, real in self._real.items():
            setattr(os, name, self._failing(name, real))
        return self

    def __exit__(self, *error: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *arguments: Any, **named: Any) -> Any:
            where = (
                os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
            )
            if not where.startswith(self._folder):
                return real(file, *arguments, **named)
            self.calls += 1
            if self.calls == self._at:
                named_file = () if isinstance(file, int) else (where,)  # as the real functions do
                raise OSError(FAILED, os.strerror(FAILED), *named_file)
            if name == "pwrite" and self.calls % 2 and len(arguments[0]) > 1:
                half = len(arguments[0]) // 2
                return real(file, arguments[0][:half], *arguments[1:], **named)
            return real(file, *arguments, **named)

        return call


def fails_or_succeeds(write: Try, number: int, below: Path) -> bool:
    """Calls a writer; returns True if it succeeded.

    An OSError must have the number `number` and name a file below a folder.
    """
    try:
        write()
    except OSError as error:
        assert error.errno == number, repr(error)
        assert error.filename is not None, repr(error)
        assert str(error.filename).startswith(str(below)), repr(error)
        return False
    return True
