"""The index of a saved table: five numbers from which a rank finds its rows before it reads any.

Mixed ids are spread evenly, so the place of a row in the canonical order follows from its mixed id, up to a
drift: about the square root of the number of rows. The index has the number of rows and the largest drift at
the bounds of 2^k cells, the same of the waiting ids, and k. DCP's planners know no numbers of tensors, only
sizes of chunks: each number is the size of a chunk of "cells", a tensor without numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_dyn.checkpoint_format import Part, SavedTensor
from torchrec_dyn.storage import CELL_BITS, CanonicalRows

# Chunks of "cells". Earlier versions read an index of 2^k chunks, one for each of 2^k cells; they take any
# other number of chunks as no index and read all rows.
_CHUNKS = 5
_MOST_BITS = 32
# Rows of "cells", more than its chunks ever have. It is as large in every state dict, and the first tensor of
# its table: so DCP's own planner gets to our error, not to one about sizes (`__create_chunk_list__`).
_SIZE = 1 << 62


class CellCounts(NamedTuple):
    """Numbers of ids in cells, from the first to the last cell with an id; all-gathered before saving.

    Of a thousand ranks that share the rows of a table each has ids in a few cells.

    Attributes:
        first: number of the first cell.
        counts: the numbers as int32, 4 bytes a cell.
    """

    first: int
    counts: bytes

    @classmethod
    def of(cls, rows: CanonicalRows) -> CellCounts:
        """Returns the numbers of ids of a map."""
        counts = rows.cells(CELL_BITS)
        held = counts.nonzero().flatten()
        if not held.numel():
            return cls(0, b"")
        first, last = int(held[0]), int(held[-1])
        return cls(first, counts[first : last + 1].int().numpy().tobytes())


def indexed(parts: Sequence[CellCounts]) -> tuple[int, int]:
    """Returns the number of ids in the cells of all parts, and their largest drift."""
    counts = torch.zeros(1 << CELL_BITS, dtype=torch.int64, device="cpu")
    for first, here in parts:
        if here:
            some = torch.frombuffer(bytearray(here), dtype=torch.int32)
            counts[first : first + some.numel()] += some
    ends, total = counts.cumsum(0), int(counts.sum())
    even = torch.arange(1, 1 + len(counts), device="cpu") * total >> CELL_BITS
    return total, int((ends - even).abs().max())


def index_tensor(
    rows: Sequence[CellCounts], waiting: Sequence[CellCounts], is_saved: bool, entry: Any
) -> SavedTensor:
    """Returns "cells", [2^62, 1, 0]: it has no numbers, but DCP's metadata keep the sizes of its chunks.

    `rows` and `waiting` are those of the ranks; `is_saved` is True if this rank saves the tensor.
    """
    parts, begin = [], 0
    for number in (*indexed(rows), *indexed(waiting), CELL_BITS):
        parts.append(Part((begin, 0, 0), (number + 1, 1, 0), _no_numbers))
        begin += number + 1
    return SavedTensor((_SIZE, 1, 0), torch.uint8, parts if is_saved else [], entry)


def _no_numbers(start: int, stop: int) -> Tensor:
    return torch.empty(stop - start, 1, 0, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True)
class RowIndex:
    """Bounds of the places at which cells begin, in the canonical order of a saved table.

    Attributes:
        bits: binary logarithm of the number of cells.
        total: number of rows.
        drift: largest difference of the place of a cell from that of evenly spread rows.
        begins: the place of each cell, and `total`; None: only the drift is known.
    """

    bits: int
    total: int
    drift: int = 0
    begins: tuple[int, ...] | None = None

    def between(self, first: int, last: int) -> tuple[int, int]:
        """Returns a range of places with all rows of cells `first` to `last`."""
        if self.begins is not None:
            return self.begins[first], self.begins[last + 1]
        begin, end = (cell * self.total >> self.bits for cell in (first, last + 1))
        return max(0, begin - self.drift), min(self.total, end + self.drift)


def saved_index(
    saved: Mapping[str, TensorStorageMetadata], total: int, of_waiting: bool = False
) -> RowIndex | None:
    """Returns the index of a saved table, or of its waiting ids; None if it has none for so many rows.

    `saved` is DCP's metadata of the saved tensors, by name, `total` the number of saved rows or waiting ids.
    """
    if "cells" not in saved:
        return None
    chunks = sorted(saved["cells"].chunks, key=lambda chunk: chunk.offsets[0])
    numbers = [chunk.sizes[0] - 1 for chunk in chunks]
    if len(saved["cells"].size) == 3:
        if len(numbers) != _CHUNKS or not 0 <= numbers[-1] <= _MOST_BITS:
            return None
        rows, drift = numbers[2:4] if of_waiting else numbers[:2]
        return RowIndex(numbers[-1], total, drift) if rows == total else None
    # Earlier versions: the number of rows of each cell.
    if of_waiting or sum(numbers) != total or len(numbers) & (len(numbers) - 1):
        return None
    begins = torch.tensor([0, *numbers], dtype=torch.int64, device="cpu").cumsum(0).tolist()
    return RowIndex(len(numbers).bit_length() - 1, total, begins=tuple(begins))
