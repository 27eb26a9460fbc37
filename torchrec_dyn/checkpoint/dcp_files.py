"""Saves a state dict with DCP so that a full disk is an OSError that names the file, and loads one.

DCP itself raises CheckpointException and leaves the files of a save that failed.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import LoadPlanner

from torchrec_dyn.checkpoint.table_writer import TableWriter
from torchrec_dyn.checkpoint_format import FileWriter, naming
from torchrec_dyn.ranks import run_together
from torchrec_dyn.storage import lacks_memory

_BUFFER_BYTES = 1 << 20
_SEEN_WITHIN = 30.0  # seconds, for file systems that show new files late


def save_files(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    group: dist.ProcessGroup | None,
    call: str,
) -> None:
    """Saves a state dict to a new or empty directory, which an error removes. Collective with a `group`."""
    writer = None if "://" in str(path) else writer_of(path)
    try:
        save_part(state, path, writer, group)
        if writer is not None and group is not None:
            files = writer.files or [Path(path) / "__0_0.distcp"]  # rank 0 knows all files
            run_together(group, call, lambda: check_is_shared(files))
    except BaseException:
        if writer is not None:
            _remove_files(Path(path))
        raise


def writer_of(
    path: str | os.PathLike[str], write_beside: Callable[[], Path] | None = None
) -> TableWriter:
    """Returns a writer whose errors are OSErrors that name the file; `write_beside` is as of TableWriter."""
    writer = TableWriter(path)
    writer.fs, writer._write_beside = _Files(), write_beside
    return writer


def save_part(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    writer: TableWriter | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Saves a state dict with a writer of files. Collective, unless `group` is None."""
    with _faults_raised(path):
        dcp.save(
            state,
            checkpoint_id=path if writer is None else None,
            storage_writer=writer,
            process_group=group,
            no_dist=group is None,
        )


def load_files(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    planner: LoadPlanner,
    group: dist.ProcessGroup | None,
) -> None:
    """Loads a state dict from a directory. Collective, unless `group` is None."""
    with _faults_raised(path):
        dcp.load(
            state, checkpoint_id=path, planner=planner, process_group=group, no_dist=group is None
        )


@contextmanager
def _faults_raised(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises an interrupt, a lack of memory or an error of the disk, all of which DCP wraps."""
    try:
        yield
    except CheckpointException as error:
        for fault, _ in error.failures.values():
            if not isinstance(fault, Exception):
                raise fault from error
            if isinstance(fault, OSError) and fault.errno is not None:
                raise OSError(fault.errno, fault.strerror, fault.filename or path) from error
            if lacks_memory(fault):
                raise torch.OutOfMemoryError(f"{path}: {fault}") from error
        raise


def check_is_shared(files: Iterable[Path]) -> None:
    """Raises ValueError unless the files that other ranks have written are seen here."""
    deadline = time.monotonic() + _SEEN_WITHIN
    for file in files:
        while not file.exists():
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{file.parent}: expected a directory that all ranks share, got one without {file.name} "
                    "of another rank. Give a path on a file system that all ranks see."
                )
            time.sleep(0.1)


def _remove_files(folder: Path) -> None:
    with suppress(OSError):
        for path in [*folder.glob("__*.distcp"), *folder.glob(".metadata*")]:
            path.unlink(missing_ok=True)
        folder.rmdir()


class _Files(FileSystem):
    """DCP's files; a file that cannot be written raises an OSError with its name when it is complete."""

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as opened:
                yield opened
            return
        raw = _Stream(path)
        stream = io.BufferedWriter(raw, _BUFFER_BYTES)
        try:
            with naming(path):
                yield stream
        finally:
            stream.close()
            raw.end()


class _Stream(io.RawIOBase):
    """A stream into a file. An error of a write is kept until `end`, and nothing more is written.

    The archives of torch.save are written by C++ code, which ends the process if it is given an error while
    it cleans up after an error.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = FileWriter(path)
        self._file.resize(0)
        self._place = 0
        self._error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        given = memoryview(data).cast("B")
        if self._error is None:
            try:
                self._file.write(self._place, given)
            except OSError as error:
                self._error = error
        self._place += len(given)
        return len(given)

    def tell(self) -> int:
        return self._place

    def fileno(self) -> int:
        return self._file.fileno()

    def end(self) -> None:
        """Closes the file and raises the error that was kept."""
        self._file.close()
        if self._error is not None:
            raise self._error
