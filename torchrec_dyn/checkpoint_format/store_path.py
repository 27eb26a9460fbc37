"""StorePath: a place in an object store, with those calls of `pathlib.Path` that checkpoints need.

A driver of fsspec does the work: s3fs, gcsfs and others. Drivers keep listings; each question about names
drops them first, since other clients write, too. A store has no folders, only names with slashes: nothing
is made, and nothing is renamed.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

# Drivers whose exclusive create had one winner in each race of 8 writers (tests/checkpoint/test_stores.py).
WRITTEN = ("memory", "s3", "s3a")
# A longer read is made of parallel reads of this length.
_PART_BYTES = 8 << 20
# Archives of torch.save are read by many short reads, at their begin and end.
_WINDOW_BYTES, _WINDOWS = 128 << 10, 4
# fsspec's memory:// looks for the name, then writes.
_CREATING = threading.Lock()


class StorePath:
    """A file, or what is below a name, in the store of a URL. Its errors are OSErrors with the URL."""

    def __init__(self, url: str, driver: Any = None) -> None:
        self._url = url if url.endswith("://") else url.rstrip("/")
        if driver is None:
            try:
                driver, _ = url_to_fs(self._url)
            except (ImportError, ValueError) as error:
                raise ValueError(
                    f"{url}: expected a URL that fsspec can open, got {type(error).__name__}: {error}. "
                    "Install its driver, such as s3fs for s3://."
                ) from error
        self._driver = driver

    def __str__(self) -> str:
        return self._url

    def __fspath__(self) -> str:
        return self._url  # DCP, and drivers, take URLs as paths

    def __repr__(self) -> str:
        return f"StorePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str | os.PathLike[str]) -> StorePath:
        return StorePath(f"{self._url}/{os.fspath(name)}", self._driver)

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """The URL without its last part."""
        return StorePath(self._url.rpartition("/")[0], self._driver)

    @property
    def is_written(self) -> bool:
        """True if the driver, or one that it is derived from, creates a file for one of several writers."""
        # Drivers before 2024.10 ignore the mode.
        call = getattr(self._driver, "_pipe_file", self._driver.pipe_file)
        if "mode" not in inspect.signature(call).parameters:
            return False
        protocols = (getattr(kind, "protocol", ()) for kind in type(self._driver).__mro__)
        names = ((name,) if isinstance(name, str) else name for name in protocols)
        return not set(WRITTEN).isdisjoint(chain.from_iterable(names))

    def exists(self) -> bool:
        """Returns True if there is a file, or one below this name."""
        with _named(self._url):
            self._driver.invalidate_cache()
            return bool(self._driver.exists(self._url))

    def is_file(self) -> bool:
        """Returns True if there is a file of this name."""
        with suppress(FileNotFoundError), _named(self._url):
            return str(self._info()["type"]) == "file"
        return False

    def is_dir(self) -> bool:
        """Returns True if there is a file below this name."""
        with suppress(FileNotFoundError), _named(self._url):
            return str(self._info()["type"]) == "directory"
        return False

    def size(self) -> int:
        """Returns the length of the file in bytes."""
        with _named(self._url):
            return int(self._info()["size"])

    def _info(self) -> dict[str, Any]:
        self._driver.invalidate_cache()
        info: dict[str, Any] = self._driver.info(self._url)
        return info

    def listing(self) -> dict[str, int | None]:
        """Returns the lengths of files one level below by name, None of names with more below them."""
        with suppress(FileNotFoundError, NotADirectoryError), _named(self._url):
            self._driver.invalidate_cache()
            below = self._driver.ls(self._url, detail=True)
            return {
                one["name"].rstrip("/").rpartition("/")[2]: one["size"]
                if one["type"] == "file"
                else None
                for one in below
            }
        return {}

    def iterdir(self) -> Iterator[StorePath]:
        """Yields the places one level below."""
        yield from (self / name for name in self.listing())

    def read_bytes(self) -> bytes:
        """Returns the bytes of the file."""
        with _named(self._url):
            self._driver.invalidate_cache()  # s3fs takes the length from a listing
            return bytes(self._driver.cat_file(self._url))

    def read_range(self, first: int, last: int) -> bytes:
        """Returns the bytes [first, last) of the file; long ones are read in parallel."""
        begins = range(first, last, _PART_BYTES)
        ends = [min(begin + _PART_BYTES, last) for begin in begins]
        with _named(self._url):
            if len(begins) == 1:
                parts = [self._driver.cat_file(self._url, start=first, end=last)]
            else:
                parts = self._driver.cat_ranges(
                    [self._url] * len(begins), [*begins], ends, on_error="raise"
                )
            for begin, end, part in zip(begins, ends, parts, strict=True):
                if len(part) != end - begin:  # what follows would be at other places
                    raise OSError(errno.EIO, f"expected {end - begin} bytes, got {len(part)}")
            return b"".join(parts)

    def open(self, mode: str = "rb") -> RangeFile:
        """Opens the file for reading by ranges."""
        assert mode == "rb"
        return RangeFile(self, self.size())

    def write_bytes(self, data: bytes) -> None:
        """Puts the file; one that is there is replaced."""
        with _named(self._url):
            self._driver.pipe_file(self._url, data)

    def create(self, data: bytes) -> None:
        """Puts the file if there is none; else FileExistsError. One of several writers succeeds."""
        with _named(self._url), _CREATING:
            self._driver.pipe_file(self._url, data, mode="create")

    def writer(self) -> StoreWriter:
        """Opens the file for writing from its first byte on; it is there when it is closed."""
        with _named(self._url):
            return StoreWriter(self._url, self._driver.open(self._url, "wb", autocommit=False))

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the file."""
        try:
            with _named(self._url):
                self._driver.rm_file(self._url)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_all(self) -> None:
        """Removes the files below this name."""
        with suppress(FileNotFoundError), _named(self._url):
            self._driver.invalidate_cache()
            self._driver.rm(self._url, recursive=True)
        if left := self.listing():  # s3fs passes over files that it may not delete
            raise OSError(errno.EACCES, f"{', '.join(left)} could not be removed", self._url)


class RangeFile(io.RawIOBase):
    """The first `size` bytes of a file of a store. Long reads are as long; short ones share windows."""

    def __init__(self, path: StorePath, size: int) -> None:
        self._path, self._size, self._place = path, size, 0
        self._windows: dict[int, bytes] = {}  # by number, as they were read
        self.name = str(path)

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the place of the next byte."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Goes to a place, and returns it."""
        if whence == io.SEEK_CUR:
            offset += self._place
        elif whence == io.SEEK_END:
            offset += self._size
        self._place = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer, less at the end; returns the number of bytes."""
        into = memoryview(buffer).cast("B")
        wanted, filled = max(0, min(len(into), self._size - self._place)), 0
        if wanted >= _WINDOW_BYTES:
            data = self._path.read_range(self._place, self._place + wanted)
            into[: len(data)] = data
            filled = len(data)
        while filled < wanted < _WINDOW_BYTES:
            number, first = divmod(self._place + filled, _WINDOW_BYTES)
            data = self._window(number)[first : first + wanted - filled]
            if not data:
                break
            into[filled : filled + len(data)] = data
            filled += len(data)
        self._place += filled
        return filled

    def _window(self, number: int) -> bytes:
        if number not in self._windows:
            first = number * _WINDOW_BYTES
            data = self._path.read_range(first, min(first + _WINDOW_BYTES, self._size))
            if len(self._windows) == _WINDOWS:
                del self._windows[next(iter(self._windows))]
            self._windows[number] = data
        return self._windows[number]


class StoreWriter:
    """A file of a store that is being written, by parts where the driver does so."""

    def __init__(self, url: str, file: Any) -> None:
        self._url, self._file = url, file

    def write(self, place: int, data: Any) -> None:
        """Writes data at the end, which is byte `place`."""
        with _named(self._url):
            assert self._file.tell() == place
            self._file.write(data)

    def close(self) -> None:
        """Sends what is left, and makes the file be there."""
        try:
            with _named(self._url):
                self._file.close()
                self._file.commit()
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Gives up the file. No error: the error that led here is the one to tell."""
        with suppress(Exception):
            self._file.discard()


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Raises errors of a driver, and of the libraries below it, as OSErrors with the URL."""
    try:
        yield
    except MemoryError:
        raise
    except OSError as error:
        if error.filename is not None:
            raise
        kind, number = next(
            ((kind, number) for kind, number in _NUMBERS.items() if isinstance(error, kind)),
            (OSError, error.errno or errno.EIO),
        )
        raise kind(number, str(error.strerror or error) or os.strerror(number), url) from error
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error


_NUMBERS: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    NotADirectoryError: errno.ENOTDIR,
}
