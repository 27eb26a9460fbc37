"""TableWriter: the file writer of torch.distributed.checkpoint (DCP), with two differences that save time.

While one chunk of a dynamic table is written, a thread reads the next chunk from the table. Archives of rows
have no CRC-32, which torch.load does not compare: the rows of dynamic tables have content sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture
from torch.serialization import get_crc32_options, set_crc32_options

from torchrec_dyn.checkpoint_format import ROW_TENSORS, SavedTensor, digest_of_file

_DIGESTS = "__digests"


class TableWriter(FileSystemWriter):
    """The storage writer for `torch.distributed.checkpoint.save` of a state dict with dynamic tables.

    It takes the arguments of DCP's `FileSystemWriter` and writes the same files, faster::

        dcp.save(state_dict, storage_writer=TableWriter(path))

    A thread reads the next chunk of a table while one is written, so a save needs the memory of one chunk
    more. Archives with rows of dynamic tables have no CRC-32, but with a GPU, where DCP writes in another
    order than it reads. DCP and torch.load read them as others; a program that takes such an archive for a
    zip file reports a wrong CRC-32.
    """

    files: Sequence[Path] = ()  # that the ranks have written; on rank 0
    digests: Mapping[str, str] = {}  # of them, by path in the folder above; on rank 0
    # Writes one file more of each rank, and has digests made: DCP brings them to rank 0, and an error to all.
    _write_beside: Callable[[], Path] | None = None

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
        files = [self._write_beside(), *self._files(written.value())]
        folder = Path(self.path).parent
        digests = {str(file.relative_to(folder)): digest_of_file(file) for file in files}
        results: TorchFuture[list[WriteResult]] = TorchFuture()
        results.set_result([*written.value(), WriteResult(MetadataIndex(_DIGESTS), 0, digests)])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Takes over the digests, and writes DCP's metadata; called by DCP on the coordinator."""
        both = [result for of_rank in results for result in of_rank]
        written = [result for result in both if result.index.fqn != _DIGESTS]
        digests = [result.storage_data for result in both if result.index.fqn == _DIGESTS]
        self.digests = {name: digest for of_rank in digests for name, digest in of_rank.items()}
        self.files = self._files(written)
        super().finish(metadata, [written])

    def _files(self, written: Sequence[WriteResult]) -> list[Path]:
        names = {result.storage_data.relative_path for result in written}
        return [Path(self.path) / name for name in sorted(names)]


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
