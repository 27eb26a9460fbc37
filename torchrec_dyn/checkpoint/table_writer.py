"""TableWriter: the file writer of torch.distributed.checkpoint (DCP), with two differences that save time.

While one chunk of a dynamic table is written, a thread reads the next chunk from the table. And archives of
rows have no CRC-32, which torch.load does not compare: the rows of dynamic tables have content sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture
from torch.serialization import get_crc32_options, set_crc32_options

from torchrec_dyn.checkpoint_format import ROW_TENSORS, SavedTensor


class TableWriter(FileSystemWriter):
    """The storage writer for `torch.distributed.checkpoint.save` of a state dict with dynamic tables.

    It takes the arguments of DCP's `FileSystemWriter` and writes the same files, faster::

        dcp.save(state_dict, storage_writer=TableWriter(path))

    A thread reads the next chunk of a table while one is written, so a save needs the memory of one chunk
    more. Archives with rows of dynamic tables have no CRC-32, but with a GPU, where DCP writes in another
    order than it reads. DCP and torch.load read them as others; a program that takes such an archive for a
    zip file reports a wrong CRC-32.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Writes the files of this rank; called by DCP."""
        with _crc_restored(), ThreadPoolExecutor(1, "TableWriter") as reader:
            # With several threads each reads its own chunks while the others write.
            tables = _items_of_tables(plan.items, planner) if self.thread_count == 1 else []
            ahead = _Ahead(planner, tables, reader)
            return super().write_data(plan, cast(SavePlanner, ahead))


def _items_of_tables(items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteItem]:
    """Returns the items that are chunks of dynamic tables."""
    return [one for one in items if _is_of_table(one, planner)]


def _is_of_table(item: WriteItem, planner: SavePlanner) -> bool:
    return isinstance(getattr(planner, "state_dict", {}).get(item.index.fqn), SavedTensor)


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

    Args:
        planner: DCP's planner.
        items: the items that are read ahead, in the order in which they are likely to be written.
        reader: the thread that reads.
    """

    def __init__(
        self, planner: SavePlanner, items: Sequence[WriteItem], reader: ThreadPoolExecutor
    ) -> None:
        self._planner, self._items, self._reader = planner, items, reader
        self._places = {one.index: place for place, one in enumerate(items)}
        self._waiting: dict[MetadataIndex, Future[Any]] = {}

    def resolve_data(self, item: WriteItem) -> Any:
        """Returns the numbers of an item; called in the thread that writes them."""
        name = item.index.fqn.rpartition(".")[2]
        has_sum = _is_of_table(item, self._planner) and name in ROW_TENSORS
        # For the next archive of this thread, which is that of the item, unless DCP copies from a GPU
        # meanwhile. In torch 2.13 the option is one of the thread.
        set_crc32_options(torch.cuda.is_available() or not has_sum)
        waiting = self._waiting.pop(item.index, None)
        found = self._planner.resolve_data(item) if waiting is None else waiting.result()
        following = self._places.get(item.index, -2) + 1
        if 0 < following < len(self._items) and not self._waiting:
            one = self._items[following]
            self._waiting[one.index] = self._reader.submit(self._planner.resolve_data, one)
        return found
