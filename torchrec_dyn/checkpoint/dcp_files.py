"""DCP (torch.distributed.checkpoint) with `TableWriter`, and a full disk as an OSError that names the file.

DCP itself raises CheckpointException, and leaves the files of a save that failed.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture
from torch.serialization import get_crc32_options, set_crc32_options

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import (
    ROW_TENSORS,
    FileWriter,
    Place,
    PlaceFiles,
    PlaceLike,
    PlaceReader,
    SavedTensor,
    StorePath,
    digest_of,
    naming,
    new_digest,
    open_writer,
    place_of,
    remove_all,
)
from torchrec_dyn.ranks import run_together
from torchrec_dyn.storage import lacks_memory

_BUFFER_BYTES = 1 << 20


def save_files(
    state: dict[str, Any], path: PlaceLike, group: dist.ProcessGroup | None, call: str
) -> None:
    """Saves a state dict to a new or empty directory, which an error removes. Collective with a `group`."""
    place = place_of(path)
    writer = TableWriter(place)
    try:
        save_part(state, writer, group)
        if group is not None:
            files = writer.files or [place / "__0_0.distcp"]  # rank 0 knows all files
            run_together(group, call, lambda: check_is_shared(files))
    except BaseException:
        remove_all(place)
        raise


def save_part(state: dict[str, Any], writer: TableWriter, group: dist.ProcessGroup | None) -> None:
    """Saves a state dict with a writer of files. Collective, unless `group` is None."""
    with _faults_raised(writer.place):
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)


def load_files(
    state: dict[str, Any], path: PlaceLike, planner: LoadPlanner, group: dist.ProcessGroup | None
) -> None:
    """Loads a state dict from a directory. Collective, unless `group` is None."""
    with _faults_raised(path):
        dcp.load(
            state,
            storage_reader=PlaceReader(path),
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )


@contextmanager
def _faults_raised(path: PlaceLike) -> Iterator[None]:
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


def check_is_shared(files: Iterable[Place]) -> None:
    """Raises ValueError unless the files that other ranks have written are seen here."""
    deadline = time.monotonic() + knobs.SEEN_WITHIN_SECONDS
    for file in files:
        while not file.exists():
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{file.parent}: expected a directory that all ranks share, got one without {file.name} "
                    "of another rank. Give a path on a file system that all ranks see."
                )
            time.sleep(0.1)


class _Files(PlaceFiles):
    """DCP's files; a file that cannot be written raises an OSError with its name when it is complete.

    Attributes:
        digests: of the files that were written, by name, taken while their bytes are sent.
    """

    def __init__(self, takes_digests: bool) -> None:
        super().__init__()
        self._takes_digests = takes_digests  # of all files; of DCP's metadata always
        self.digests: dict[str, str] = {}
        self._metadata = b""  # for a store

    @contextmanager
    def create_stream(self, path: PlaceLike, mode: str) -> Generator[io.IOBase, None, None]:
        """Opens a file."""
        place = place_of(path)
        if mode != "wb":
            with super().create_stream(place, mode) as opened:
                yield opened
        elif isinstance(place, StorePath) and place.name.endswith(".metadata.tmp"):
            memory = io.BytesIO()
            yield memory
            self._metadata = memory.getvalue()
            self.digests[place.name] = digest_of(self._metadata)
        else:
            takes_digest = self._takes_digests or place.name.endswith(".metadata.tmp")
            raw = _Stream(place, new_digest() if takes_digest else None)
            stream = io.BufferedWriter(raw, _BUFFER_BYTES)
            try:
                with naming(place):
                    yield stream
            except BaseException:
                with suppress(OSError):
                    stream.close()
                raw.drop()
                raise
            stream.close()
            raw.end()
            if raw.digest is not None:
                self.digests[place.name] = raw.digest.hexdigest()

    def rename(self, path: PlaceLike, new_path: PlaceLike) -> None:
        """Gives DCP's metadata its name; a store, which cannot rename, gets it under that name only."""
        place = place_of(new_path)
        self.digests[place.name] = self.digests.pop(place_of(path).name)
        if isinstance(place, StorePath):
            place.write_bytes(self._metadata)
        else:
            super().rename(path, new_path)


class _Stream(io.RawIOBase):
    """A stream into a file. An error of a write is kept until `end`, and nothing more is written.

    The archives of torch.save are written by C++ code, which ends the process if it is given an error while
    it cleans up after an error.
    """

    def __init__(self, path: Place, digest: hashlib.blake2b | None) -> None:
        self._file = open_writer(path)
        self._place = 0
        self._error: OSError | None = None
        self.digest = digest

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        given = memoryview(data).cast("B")
        if self._error is None:
            try:
                self._file.write(self._place, given)
                if self.digest is not None:
                    self.digest.update(given)
            except OSError as error:
                self._error = error
        self._place += len(given)
        return len(given)

    def tell(self) -> int:
        return self._place

    def fileno(self) -> int:
        if isinstance(self._file, FileWriter):
            return self._file.fileno()
        return super().fileno()

    def drop(self) -> None:
        """Gives up the file."""
        self._file.drop()

    def end(self) -> None:
        """Closes the file, or drops it and raises the error that was kept."""
        if self._error is not None:
            self.drop()
            raise self._error
        self._file.close()


_DIGESTS = "__digests"


class TableWriter(FileSystemWriter):
    """The storage writer for `torch.distributed.checkpoint.save` of a state dict with dynamic tables.

    It takes the arguments of DCP's `FileSystemWriter`, with a path or a URL of fsspec, and writes the same
    files, faster::

        dcp.save(state_dict, storage_writer=TableWriter(path))

    A thread reads the next chunk of a table while the present chunk is written, so a save needs memory for
    one more chunk. Archives with rows of dynamic tables have no CRC-32, except with a GPU, where DCP writes
    in another order than it reads. DCP and torch.load read these archives as usual; a program that reads them
    as zip files reports a wrong CRC-32.
    """

    files: Sequence[Place] = ()  # that the ranks have written; on rank 0
    digests: dict[str, str]  # of them and of DCP's metadata, by path in the folder above; on rank 0

    def __init__(
        self,
        path: PlaceLike,
        *args: Any,
        write_beside: Callable[[], tuple[str, str]] | None = None,
        before: Callable[[], object] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, *args, **options)
        self._files = self.fs = _Files(takes_digests=write_beside is not None)
        self.place = self.path = place_of(path)
        if isinstance(self.place, StorePath):
            self.sync_files = False
        # Writes one file more of each rank and returns its name and digest: DCP brings the digests to rank 0,
        # and an error to all.
        self._write_beside = write_beside
        self.digests = {}
        self._before = before  # called before any file is written

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the directory; called by DCP, which brings an error to all ranks."""
        if self._before is not None:
            self._before()
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Writes the files of this rank; called by DCP."""
        state = getattr(planner, "state_dict", {})
        tables = {key for key, tensor in state.items() if isinstance(tensor, SavedTensor)}
        with _crc_restored(), ThreadPoolExecutor(1, "TableWriter") as reader:
            # With several threads each reads its own chunks while the others write.
            is_serial = self.thread_count == 1
            items = [item for item in plan.items if is_serial and item.index.fqn in tables]
            ahead = _Ahead(planner, tables, items, reader)
            written = super().write_data(plan, cast(SavePlanner, ahead))
        if self._write_beside is None:
            return written
        digests = {f"{self.place.name}/{name}": text for name, text in self._files.digests.items()}
        beside, digest = self._write_beside()
        digests[beside] = digest
        results: TorchFuture[list[WriteResult]] = TorchFuture()
        results.set_result([*written.value(), WriteResult(MetadataIndex(_DIGESTS), 0, digests)])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Takes over the digests, and writes DCP's metadata; called by DCP on the coordinator."""
        written: list[WriteResult] = []
        for result in chain.from_iterable(results):
            if result.index.fqn == _DIGESTS:
                self.digests |= result.storage_data
            else:
                written.append(result)
        names = {result.storage_data.relative_path for result in written}
        self.files = [self.place / name for name in sorted(names)]
        super().finish(metadata, [written])
        self.digests[f"{self.place.name}/.metadata"] = self._files.digests[".metadata"]


@contextmanager
def _crc_restored() -> Iterator[None]:
    """Restores torch's option at the end of the block; `_Ahead` changes it in each thread that writes."""
    before = get_crc32_options()
    try:
        yield
    finally:
        set_crc32_options(before)


class _Ahead:
    """A planner whose items are read ahead, one item at a time.

    `tables` are the keys of the tensors of dynamic tables. The items that are read ahead, by the thread
    `reader`, are in the order in which they are likely to be written.
    """

    def __init__(
        self,
        planner: SavePlanner,
        tables: Collection[str],
        items: Sequence[WriteItem],
        reader: ThreadPoolExecutor,
    ) -> None:
        self._planner, self._tables, self._items, self._reader = planner, tables, items, reader
        self._places = {item.index: place for place, item in enumerate(items)}
        self._waiting: dict[MetadataIndex, Future[Any]] = {}

    def resolve_data(self, item: WriteItem) -> Any:
        """Returns the numbers of an item; called in the thread that writes them."""
        name = item.index.fqn.rpartition(".")[2]
        has_sum = item.index.fqn in self._tables and name in ROW_TENSORS
        # For the next archive of this thread, which is that of the item, unless DCP copies from a GPU
        # meanwhile. In torch 2.13 the option is one of the thread.
        set_crc32_options(torch.cuda.is_available() or not has_sum)
        waiting = self._waiting.pop(item.index, None)
        numbers = self._planner.resolve_data(item) if waiting is None else waiting.result()
        following = self._places.get(item.index, -2) + 1
        if 0 < following < len(self._items) and not self._waiting:
            ahead = self._items[following]
            self._waiting[ahead.index] = self._reader.submit(self._planner.resolve_data, ahead)
        return numbers
