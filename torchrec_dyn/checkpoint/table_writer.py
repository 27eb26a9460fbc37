"""TableWriter: the file writer of torch.distributed.checkpoint (DCP), with three differences that save time.

While one chunk of a dynamic table is written, a thread reads the next chunk from the table. Archives of rows
have no CRC-32, which torch.load does not compare: the rows of dynamic tables have content sums. And the rows
of a state dict of `only_to_save` are summed while they are written: the ranks tell their sums to the
coordinator with what they have written, as DCP gathers it, and it writes the checksums into one file more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture
from torch.serialization import get_crc32_options, set_crc32_options

from torchrec_dyn.checkpoint_format import ROW_TENSORS, LeftSums, SavedTensor, add_sums

# The file of the checksums that are made when all rows are written.
_SUMS_PREFIX = "__sums_"


@dataclass(frozen=True)
class _SumsOfRank:
    """What a rank tells the coordinator.

    Attributes:
        by_table: content sums of the rows that it has written, by tensor, by key of the checksum.
        items: the checksums that it was to write.
    """

    by_table: Mapping[str, Mapping[str, int]]
    items: Sequence[WriteItem]


class TableWriter(FileSystemWriter):
    """The storage writer for `torch.distributed.checkpoint.save` of a state dict with dynamic tables.

    It takes the arguments of DCP's `FileSystemWriter` and writes the same files, faster::

        dcp.save(state_dict, storage_writer=TableWriter(path))

    A thread reads the next chunk of a table while one is written, so a save needs the memory of one chunk
    more. Archives with rows of dynamic tables have no CRC-32, but with a GPU, where DCP writes in another
    order than it reads. DCP and torch.load read them as others; a program that takes such an archive for a
    zip file reports a wrong CRC-32.
    """

    _left: Mapping[str, LeftSums]
    _plan: SavePlan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Writes the files of this rank; called by DCP.

        Raises:
            ValueError: for a state dict of `only_to_save`, if the ranks do not tell each other their sums.
        """
        tensors = _tensors_of_tables(planner)
        self._left = {k: one.left_sums for k, one in tensors.items() if one.left_sums is not None}
        if self._left and not self.use_collectives:
            raise ValueError(
                "TableWriter: expected dcp.save(use_collectives=True) of a state dict that was made in a "
                "block of only_to_save, got False. Call state_dict outside of the block."
            )
        items = [one for one in plan.items if one.index.fqn not in self._left]
        self._plan = replace(plan, items=items)
        with _crc_restored(), ThreadPoolExecutor(1, "TableWriter") as reader:
            # With several threads each reads its own chunks while the others write.
            of_tables = [one for one in items if one.index.fqn in tensors]
            ahead = _Ahead(planner, tensors, of_tables if self.thread_count == 1 else [], reader)
            written = super().write_data(self._plan, cast(SavePlanner, ahead))
        if not self._left:
            return written
        left = [one for one in plan.items if one.index.fqn in self._left]
        told = _SumsOfRank(self._sums_of(items, tensors), left)
        results: TorchFuture[list[WriteResult]] = TorchFuture()
        results.set_result([*written.value(), WriteResult(MetadataIndex(_SUMS_PREFIX), 0, told)])
        return results

    def _sums_of(
        self, items: Iterable[WriteItem], tensors: Mapping[str, SavedTensor]
    ) -> dict[str, dict[str, int]]:
        """Returns the content sums of the chunks that were written, by tensor, by key of the checksum."""
        sums: dict[str, dict[str, int]] = {}
        for item in items:
            prefix, _, name = item.index.fqn.rpartition(".")
            key, tensor = f"{prefix}.checksum", tensors.get(item.index.fqn)
            if key in self._left and tensor is not None:
                of_chunk = tensor.sum_of_chunk(tuple(item.index.offset or ()))
                sums[key] = add_sums(sums.get(key, {}), {name: of_chunk})
        return sums

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the checksums that were left, and DCP's metadata; called by DCP on the coordinator."""
        told, written = [], []
        for one in [one for of_rank in results for one in of_rank]:
            if isinstance(one.storage_data, _SumsOfRank):
                told.append(one.storage_data)
            else:
                written.append(one)
        super().finish(metadata, [[*written, *self._write_sums(told)]])

    def _write_sums(self, told: Sequence[_SumsOfRank]) -> list[WriteResult]:
        words = {
            key: left.settle(one.by_table.get(key, {}) for one in told)
            for key, left in self._left.items()
        }
        items = [item for one in told for item in one.items]
        if not items:
            return []
        prefix = replace(self._plan.storage_data, prefix=_SUMS_PREFIX)
        plan = replace(self._plan, items=items, storage_data=prefix)
        return super().write_data(plan, cast(SavePlanner, _Words(words))).value()


@dataclass
class _Words:
    """A planner whose items are checksums."""

    words: Mapping[str, Tensor]

    def resolve_data(self, item: WriteItem) -> Tensor:
        return self.words[item.index.fqn]


def _tensors_of_tables(planner: SavePlanner) -> dict[str, SavedTensor]:
    """Returns the tensors of dynamic tables in the state dict, by key."""
    state = getattr(planner, "state_dict", {})
    return {key: one for key, one in state.items() if isinstance(one, SavedTensor)}


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
        self._places = {one.index: place for place, one in enumerate(items)}
        self._waiting: dict[MetadataIndex, Future[Any]] = {}

    def resolve_data(self, item: WriteItem) -> Any:
        """Returns the numbers of an item; called in the thread that writes them."""
        name = item.index.fqn.rpartition(".")[2]
        has_sum = item.index.fqn in self._tables and name in ROW_TENSORS
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
