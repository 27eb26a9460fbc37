"""RowMarks: one small number a row, 0 until it is written.

Legend: T tables, N rows named, M rows asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_dyn import ops

_BLOCK_ROWS = 1 << 18  # a mebibyte; a small table takes less


class RowMarks:
    """An int32 for each row of a table, in blocks that never move.

    Args:
        row_limit: rows the table may reach.
        device: of the table.

    Attributes:
        blocks: each [2^shift, 1] int32.
        shift: binary logarithm of the rows of a block.
    """

    def __init__(self, row_limit: int, device: torch.device) -> None:
        self.shift = max(4, min(_BLOCK_ROWS, row_limit).bit_length() - 1)
        self.blocks: list[Tensor] = []
        self._words: list[Tensor] = []  # the same memory as float32, of which the op copies rows
        self._device = device

    def reserve(self, rows: int, mark: int = 0) -> None:
        """Makes room for `rows` rows; new ones are marked so."""
        while len(self.blocks) << self.shift < rows:
            shape = (1 << self.shift, 1)
            block = torch.full(shape, mark, dtype=torch.int32, device=self._device)
            self._words.append(block.view(torch.float32))
            self.blocks.append(block)

    def read(self, rows: Tensor) -> Tensor:
        """Reads marks.

        Args:
            rows: [M] int64.

        Returns:
            [M] int32.
        """
        words = ops.gather_rows(rows, self._words, self.shift, 1, torch.float32)
        return words.view(torch.int32).flatten()

    def write(self, rows: Tensor, mark: int) -> None:
        """Marks rows.

        Args:
            rows: [M] int64.
            mark: for all of them.
        """
        write_marks([self], rows, torch.tensor([0, rows.numel()]), [mark])

    def at_least(self, mark: int) -> Tensor:
        """Tells of every row in the blocks whether it has this mark or a higher one, [capacity] bool."""
        flags = [block.flatten() >= mark for block in self.blocks]
        return torch.cat([torch.empty(0, dtype=torch.bool, device=self._device), *flags])

    @property
    def bytes(self) -> int:
        """Bytes of the blocks."""
        return sum(block.nbytes for block in self.blocks)


def write_marks(
    tables: Sequence[RowMarks | None], rows: Tensor, table_offsets: Tensor, marks: Sequence[int]
) -> None:
    """Marks the rows of several tables.

    Args:
        tables: T tables, None for one whose rows have no marks.
        rows: [N] int64 in table order; -1 is passed over.
        table_offsets: [T + 1] int64, which rows are whose.
        marks: of each table, for all its rows named.
    """
    parts = rows.split(table_offsets.diff().tolist())
    for table, part, mark in zip(tables, parts, marks, strict=True):
        if table is None:
            continue
        part = part[part >= 0]
        for block in torch.unique(part >> table.shift).tolist():
            here = part[part >> table.shift == block] & ((1 << table.shift) - 1)
            table.blocks[block][here] = mark
