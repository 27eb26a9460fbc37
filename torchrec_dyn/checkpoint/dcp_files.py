"""Saves a state dict with DCP so that a full disk is an OSError that names the file, and loads one.

DCP itself raises CheckpointException and leaves the files of a save that failed. It wraps an interrupt, too:
Ctrl-C, or the SystemExit of a signal handler.
"""

from __future__ import annotations

import io
import os
import time
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import LoadPlanner

from torchrec_dyn.checkpoint.table_writer import TableWriter
from torchrec_dyn.checkpoint_format import FileWriter, naming
from torchrec_dyn.ranks import gather_results, run_together

_BUFFER_BYTES = 1 << 20
_SEEN_WITHIN = 30.0  # seconds, for file systems that show new files late


def save_files(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    is_new: bool,
    group: dist.ProcessGroup | None,
    call: str,
) -> None:
    """Saves a state dict to a new or empty directory. Collective, unless `group` is None.

    `is_new` is True if the directory did not exist before the call on any rank. `call` is what the user
    called, for messages.

    Raises:
        ValueError: on every rank, if a rank does not see the files of the others; none of its files is left.
        OSError: on every rank, if a file cannot be written; no file is left then.
        CheckpointException: on every rank, for other errors; no file is left then.
    """
    writer = None
    if "://" not in str(path):
        writer = TableWriter(path)
        writer.fs = _Files()
    with _interrupts_raised():
        try:
            dcp.save(
                state,
                checkpoint_id=path if writer is None else None,
                storage_writer=writer,
                process_group=group,
                no_dist=group is None,
            )
        except CheckpointException as error:
            drop_frames(error)
            if writer is not None:
                _remove_files(Path(path), is_new)
            for fault, _ in error.failures.values():
                if isinstance(fault, OSError) and fault.errno is not None:
                    raise OSError(fault.errno, fault.strerror, fault.filename or path) from error
            raise
    if writer is None or group is None:
        return
    try:
        _check_is_shared(Path(path), group, call)
    except BaseException:
        _remove_files(Path(path), is_new)
        raise


def load_files(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    planner: LoadPlanner,
    group: dist.ProcessGroup | None,
) -> None:
    """Loads a state dict from a directory. Collective, unless `group` is None.

    Raises:
        CheckpointException: on every rank, if it fails on one. An interrupt is raised as it is.
    """
    with _interrupts_raised():
        dcp.load(
            state, checkpoint_id=path, planner=planner, process_group=group, no_dist=group is None
        )


def drop_frames(error: BaseException) -> None:
    """Drops the frames of an error that is kept, or of DCP, whose text tells them, and of its causes.

    They hold the rows of the call that failed. DCP's frames refer to their own errors, so the rows would stay
    until Python's garbage collector finds the cycle, beside those of the next try.
    """
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None:
            traceback.clear_frames(one.__traceback__)  # DCP's of several ranks have their own error
            one.__traceback__ = None
            left.append(one.__cause__)
            if isinstance(one, CheckpointException):
                left += [fault for fault, _ in one.failures.values()]


@contextmanager
def _interrupts_raised() -> Iterator[None]:
    """Raises an interrupt of the block on every rank: DCP wraps all that is raised, as if it were damage."""
    try:
        yield
    except CheckpointException as error:
        drop_frames(error)
        for fault, _ in error.failures.values():
            if not isinstance(fault, Exception):
                raise fault from error
        raise


def _check_is_shared(folder: Path, group: dist.ProcessGroup, call: str) -> None:
    """Checks that each rank sees a file that the next rank has written. Collective.

    DCP has looked for ".metadata" on each rank before it was there, and a network file system may go on
    saying so.

    Raises:
        ValueError: on every rank, if one does not see it.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    files = gather_results(
        group, call, lambda: next((one.name for one in folder.glob(f"__{rank}_*.distcp")), None)
    )
    name = files[(rank + 1) % ranks]

    def check() -> None:
        deadline = time.monotonic() + _SEEN_WITHIN
        while name is not None and not (folder / name).exists():
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{folder}: expected a directory that all ranks share, got one without {name} of another "
                    "rank. Give a path on a file system that all ranks see."
                )
            time.sleep(0.1)

    run_together(group, call, check)


def _remove_files(folder: Path, is_new: bool) -> None:
    with suppress(OSError):
        for path in [*folder.glob("__*.distcp"), *folder.glob(".metadata*")]:
            path.unlink(missing_ok=True)
        if is_new:
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
                # Another one: the frames of this one lead to DCP's, which have the row.
                self._error = OSError(error.errno, error.strerror, error.filename)
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
            try:
                raise self._error
            finally:
                self._error = None  # its frames refer to this stream
