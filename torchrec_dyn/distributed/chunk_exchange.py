"""Moves the contents of a table between the shards of two plans: as a save and a load, without a file.

The old shards define the chunks that they would save (state_dict/saving.py). The new shards define the blocks
of these chunks that they would read (state_dict/loading.py). In each round every rank reads one of its
chunks and sends the blocks of this chunk to the ranks that read them. So each rank has at most one of its
chunks in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torchrec_dyn.checkpoint_format import SavedTensor
from torchrec_dyn.ranks import Table, exchange, gather_results, ids_per_rank, run_together
from torchrec_dyn.state_dict import Places, TableLoad
from torchrec_dyn.storage import IdMap, canonical_keys, signed, to_host

_TOP_BIT = 1 << 63


class _Block(NamedTuple):
    """A block of a saved tensor: a chunk, or the part of a chunk that a rank reads."""

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.size).numel()

    def within(self, chunk: _Block) -> tuple[slice, ...]:
        """Returns the slices of this block in the chunk that contains it."""
        begins = [own - first for own, first in zip(self.offset, chunk.offset, strict=True)]
        return tuple(slice(b, b + n) for b, n in zip(begins, self.size, strict=True))


def exchange_chunks(
    before: Table, saved: Mapping[str, SavedTensor], load: TableLoad, call: str
) -> None:
    """Fills the load of new shards, before its `begin`, with the blocks that it reads. Collective.

    `saved` are the tensors that the old shards would save, by name: the chunks are on all ranks.
    """
    group = before.group
    assert group is not None
    items = [
        (name, item)
        for name, tensor in saved.items()
        for item in tensor.__create_write_items__(name, tensor)
    ]
    chunks = [
        _block(name, item.tensor_data.chunk) for name, item in items if item.tensor_data is not None
    ]
    parts = load.table.layout.row_ranks
    gathered = gather_results(group, call, lambda: (chunks, _counts_here(before, parts)))
    rank_chunks = [blocks for blocks, _ in gathered]
    counts = [rank_counts for _, rank_counts in gathered if rank_counts is not None]

    def want() -> list[_Block]:
        rows, waiting = (
            _places(load.table, [rank_counts[number] for rank_counts in counts])
            for number in (0, 1)
        )
        load.begin(_metadata(saved, rank_chunks), rows, waiting)
        return [_block(name, chunk) for name in saved for chunk in load.wanted(name)]

    wanted = gather_results(group, call, want)
    routes = _Routes(rank_chunks, wanted, dist.get_rank(group))
    arrived: list[Callable[[], None]] = []  # the blocks of the last round, to be received

    # Raised on all ranks when they meet: until then each takes part. What a rank receives may be wrong since
    # another could not read.
    unread: list[Exception] = []
    unreceived: list[Exception] = []

    def receive() -> None:
        try:
            while arrived and not unreceived:
                arrived.pop()()
        except Exception as fault:
            unreceived.append(fault)

    def read(number: int) -> Tensor:
        blocks = [torch.empty(0, dtype=torch.uint8, device="cpu")]
        try:
            if number < len(items):
                name, item = items[number]
                chunk = saved[name].__get_tensor_shard__(item.index)
                sent = routes.sent(number)
                blocks += [_bytes(chunk[block.within(chunks[number])]) for block in sent]
            return torch.cat(blocks)
        except Exception as fault:
            unread.append(fault)
            return torch.zeros(sum(sizes[0]), dtype=torch.uint8, device="cpu")

    for number in range(max(map(len, rank_chunks))):
        sizes = routes.sizes(saved, number)
        receive()
        received = exchange(group, read(number), *sizes)
        arrived.append(partial(_receive, load, saved, routes.received(number), received))
        del received
    receive()
    for faults in (unread, unreceived):
        run_together(group, call, partial(_raise_first, faults))


def _raise_first(faults: Sequence[Exception]) -> None:
    if faults:
        raise faults[0]


def _counts_here(table: Table, parts: int) -> tuple[list[int], list[int]] | None:
    """Returns how many of this rank's ids, and of its waiting ids, are below the end of each part, and all.

    None if the rank lacks the first column, whose ranks have each id once.
    """
    if not table.has_first_column:
        return None
    life = table.shards[0].life
    waiting = None if life is None else life.waiting
    return (
        _counts(table.shards[0].id_map, parts),
        [0] * (parts + 1) if waiting is None else _counts(waiting.id_map, parts),
    )


def _counts(id_map: IdMap, parts: int) -> list[int]:
    keys = canonical_keys(to_host(id_map.contents()[0]))
    ends = [signed(ids_per_rank(parts) * part ^ _TOP_BIT) for part in range(1, parts + 1)]
    before = torch.searchsorted(keys, torch.tensor(ends, device="cpu"))
    return [*before.tolist(), keys.numel()]


def _places(table: Table, counts: Sequence[Sequence[int]]) -> Places | None:
    """Returns the places of this rank's ids, and those of the last ids, which are of any part; None: all."""
    part = table.part
    if part is None or table.layout.row_ranks == 1:
        return None
    ends = [0, *map(sum, zip(*counts, strict=True))]
    return Places([(ends[part], ends[part + 1]), (ends[-2], ends[-1])])


def _block(name: str, chunk: ChunkStorageMetadata) -> _Block:
    return _Block(name, tuple(chunk.offsets), tuple(chunk.sizes))


def _metadata(
    saved: Mapping[str, SavedTensor], rank_chunks: Sequence[Sequence[_Block]]
) -> dict[str, TensorStorageMetadata]:
    """Returns the metadata that a checkpoint of the tensors would have."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in saved}
    for blocks in rank_chunks:
        for name, offset, size in blocks:
            chunks[name].append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
    return {
        name: TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), tensor.size(), chunks[name]
        )
        for name, tensor in saved.items()
    }


def _bytes(block: Tensor) -> Tensor:
    return block.contiguous().reshape(-1).view(torch.uint8)


def _receive(
    load: TableLoad, saved: Mapping[str, SavedTensor], blocks: Sequence[_Block], received: Tensor
) -> None:
    sizes = [block.numel * saved[block.name].dtype.itemsize for block in blocks]
    for block, raw in zip(blocks, received.split(sizes), strict=True):
        # A copy, because the bytes of a block may begin at an address that is not aligned for its dtype.
        values = raw.clone().view(saved[block.name].dtype).reshape(block.size)
        load.receive(block.name, block.offset, values)


class _Routes:
    """The blocks that this rank sends and receives in each round; all ranks compute the same routes.

    `chunks` of each rank, one a round, and the blocks `wanted` by each rank, each within one chunk.
    """

    def __init__(
        self, chunks: Sequence[Sequence[_Block]], wanted: Sequence[Sequence[_Block]], rank: int
    ) -> None:
        self._world = len(chunks)
        self._sent: dict[int, list[list[_Block]]] = {}
        self._received: dict[int, list[list[_Block]]] = {}
        places = _ChunkPlaces(chunks)
        for reader, blocks in enumerate(wanted):
            for block in blocks:
                holder, number = places.find(block)
                if holder == rank:
                    self._by_rank(self._sent, number)[reader].append(block)
                if reader == rank:
                    self._by_rank(self._received, number)[holder].append(block)

    def _by_rank(self, by_round: dict[int, list[list[_Block]]], number: int) -> list[list[_Block]]:
        return by_round.setdefault(number, [[] for _ in range(self._world)])

    def sent(self, number: int) -> list[_Block]:
        """Returns the blocks that this rank sends in a round, by reader."""
        return [block for blocks in self._by_rank(self._sent, number) for block in blocks]

    def received(self, number: int) -> list[_Block]:
        """Returns the blocks that this rank receives in a round, by holder."""
        return [block for blocks in self._by_rank(self._received, number) for block in blocks]

    def sizes(self, saved: Mapping[str, Any], number: int) -> tuple[list[int], list[int]]:
        """Returns the number of bytes sent to each rank and received from each rank in a round."""

        def size(blocks: Sequence[_Block]) -> int:
            return sum(block.numel * saved[block.name].dtype.itemsize for block in blocks)

        sent, received = (self._by_rank(of, number) for of in (self._sent, self._received))
        return [size(blocks) for blocks in sent], [size(blocks) for blocks in received]


class _ChunkPlaces:
    """Finds the chunk that contains a block."""

    def __init__(self, chunks: Sequence[Sequence[_Block]]) -> None:
        # For each range of columns: the chunks, sorted by their first row.
        self._columns: dict[str, dict[Any, list[tuple[int, int, int]]]] = {}
        for holder, blocks in enumerate(chunks):
            for number, block in enumerate(blocks):
                by_columns = self._columns.setdefault(block.name, {})
                columns = (block.offset[1:], block.size[1:])
                begin = block.offset[0] if block.offset else 0
                by_columns.setdefault(columns, []).append((begin, holder, number))
        for by_columns in self._columns.values():
            for places in by_columns.values():
                places.sort()

    def find(self, block: _Block) -> tuple[int, int]:
        """Returns the rank that holds a block and the number of its chunk there."""
        begin = block.offset[0] if block.offset else 0
        places = next(self._with_columns(block))
        _, holder, number = places[bisect_right(places, begin, key=lambda place: place[0]) - 1]
        return holder, number

    def _with_columns(self, block: _Block) -> Iterator[list[tuple[int, int, int]]]:
        for (offset, size), places in self._columns[block.name].items():
            if all(
                first <= begin and begin + width <= first + columns
                for first, columns, begin, width in zip(
                    offset, size, block.offset[1:], block.size[1:], strict=True
                )
            ):
                yield places
