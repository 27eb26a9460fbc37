"""DCP's reader and file system (torch.distributed.checkpoint) over places: paths, and names in a store."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from torchrec_dyn.checkpoint_format.file_writer import naming
from torchrec_dyn.checkpoint_format.places import place_of
from torchrec_dyn.checkpoint_format.store_path import RangeFile, StorePath


class PlaceFiles(FileSystem):
    """The file system of DCP's reader and writer. Its paths are places."""

    def init_path(self, path: Any) -> Any:
        """Returns the place of a path or URL."""
        return place_of(path)

    def concat_path(self, path: Any, suffix: str) -> Any:
        """Returns the place of a file in a folder."""
        return place_of(path) / suffix

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Opens a file."""
        if isinstance(path, StorePath):
            yield io.BufferedReader(path.open())
            return
        with super().create_stream(path, mode) as opened:
            yield opened

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Makes a folder; a store has none."""
        if not isinstance(path, StorePath):
            super().mkdir(path)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Returns True if there is a file."""
        return place_of(path).exists()

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Removes a file."""
        place_of(path).unlink()


class PlaceReader(FileSystemReader):
    """DCP's reader of a checkpoint at a path or URL."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs = PlaceFiles()
        self.place = self.path = place_of(path)
        self._files: dict[str, RangeFile] = {}  # in a store
        self._lock = threading.Lock()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns DCP's metadata; called by DCP, which takes any error for a missing file."""
        try:
            return super().read_metadata(*args, **kwargs)
        except OSError:
            if not isinstance(self.place, StorePath):
                raise
            return super().read_metadata(*args, **kwargs)

    @contextmanager
    def open_file(self, name: str) -> Iterator[io.BufferedReader | RangeFile]:
        """Opens a file of the checkpoint; one of a store is kept, with what was read of it."""
        place = self.place / name
        if not isinstance(place, StorePath):
            with naming(place), open(place, "rb") as file:
                yield file
            return
        with self._lock:
            if name not in self._files:
                self._files[name] = place.open()
            yield self._files[name]
