"""What saves one sharded table in the model's state dict, and what does in the optimizer's, have in common.

Letters: R rows of the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import Part, SavedTensor, add_sums, as_words, sum_of_small
from torchrec_dyn.state_dict.pieces import ShardPieces
from torchrec_dyn.state_dict.places import Run, Runs, Share, fewer_cells, runs_of
from torchrec_dyn.storage import CanonicalRows, cell_bits
from torchrec_dyn.table import DynamicTable, read_tensor

Reader = Callable[[int, int], Tensor]


class ToldOfShards(Protocol):
    """What a rank tells the others of its shards of one table before it is saved."""

    @property
    def share(self) -> Share:
        """Of the rows."""
        ...

    @property
    def cells(self) -> Tensor | None:
        """[2^CELL_BITS] int64, its rows in each; None where the table's first column is not here."""
        ...

    @property
    def sums(self) -> dict[str, int]:
        """Of its tensors."""
        ...


class ShardSource:
    """Reads the shards of one table, as long as they do not change.

    Args:
        pieces: what this rank holds.
        entry: what the tensors are loaded by.
    """

    def __init__(self, pieces: ShardPieces, entry: Any) -> None:
        self.pieces = pieces
        self._entry = entry
        self._canonical = [pieces.canonical(shard) for shard in pieces.shards]

    def check_unchanged(self) -> None:
        """Raises RuntimeError if a shard has changed since this was made."""
        for rows in self._canonical:
            rows.check_unchanged()

    def runs(self, told: Sequence[ToldOfShards]) -> Runs:
        """Tells where this rank's rows are in the whole table.

        Args:
            told: by each rank that holds any.
        """
        return runs_of([one.share for one in told], self.pieces.part)

    def not_by_row(
        self,
        small: Mapping[str, Tensor],
        told: Sequence[ToldOfShards],
        order: tuple[str, ...],
    ) -> dict[str, SavedTensor]:
        """Makes the tensors that are not by row: those given, "checksum" and "cells".

        Args:
            small: by name.
            told: by each rank that holds any rows.
            order: of the sums in the checksum.
        """
        name, saves, total = self.pieces.name, self.pieces.rank == 0, self.runs(told).total
        of_small = {one: sum_of_small(name, one, tensor) for one, tensor in small.items()}
        checksum = as_words(add_sums(*(one.sums for one in told), of_small), order)
        whole = {**small, "checksum": checksum}
        made = {one: whole_tensor(tensor, saves, self._entry) for one, tensor in whole.items()}
        counts = torch.stack([one.cells for one in told if one.cells is not None]).sum(0)
        return {**made, "cells": cells_tensor(counts, total, saves, self._entry)}


def whole_tensor(value: Tensor, is_saved: bool, entry: Any) -> SavedTensor:
    """Makes a small tensor that every rank has, and one saves.

    Args:
        value: the tensor.
        is_saved: whether this rank saves it.
        entry: of the tensor.
    """

    def read(start: int, stop: int) -> Tensor:
        return value[start:stop] if value.dim() else value

    part = Part((0,) * value.dim(), tuple(value.shape), read, is_saved)
    return SavedTensor(value.shape, value.dtype, [part] if value.numel() else [], entry)


def cells_tensor(counts: Tensor, total: int, is_saved: bool, entry: Any) -> SavedTensor:
    """Makes "cells", [total + K, 0]: without numbers, but DCP's metadata tells the sizes of its chunks.

    Args:
        counts: [2^CELL_BITS] int64, rows of the whole table in each.
        total: rows of the whole table.
        is_saved: whether this rank saves it.
        entry: of the tensor.
    """
    cells = fewer_cells(counts, cell_bits(total)).tolist()
    parts, begin = [], 0
    for rows in cells:
        parts.append(Part((begin, 0), (rows + 1, 0), _no_numbers))
        begin += rows + 1
    return SavedTensor((begin, 0), torch.uint8, parts if is_saved else [], entry)


def _no_numbers(start: int, stop: int) -> Tensor:
    return torch.empty(stop - start, 0, dtype=torch.uint8)


def shifted(run: Run, read: Reader) -> Reader:
    """Reads rows [start, stop) of a run by reading those of this rank."""
    return lambda start, stop: read(run.here + start, run.here + stop)


def reader_of(rows: CanonicalRows, run: Run, shard: DynamicTable, name: str) -> Reader:
    """Reads rows [start, stop) of a run of one tensor of a shard."""

    def read(start: int, stop: int) -> Tensor:
        ids, places = rows.read(start, stop)
        return ids if name == "ids" else read_tensor(shard, name, places)

    return shifted(run, read)
