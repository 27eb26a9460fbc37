"""RowStore: rows of one kind (weights, or one optimizer state) in blocks that never move.

A table grows by appending a block of 2^shift rows; no row is copied (docs/decisions/0002). A fresh block is
reserved, not written: Linux commits its pages on first touch, so memory follows the rows in use.

Legend: R rows allocated, M rows asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_dyn import ops

# Upper bound of a block: large enough that a table has few of them, small enough that the last,
# partly used one is no burden where memory is committed at once.
_BLOCK_BYTES = 32 << 20


def block_shift(row_limit: int, row_bytes: int) -> int:
    """Returns the binary logarithm of the rows of a block.

    Args:
        row_limit: rows the table may reach; a small table takes one small block.
        row_bytes: bytes of a row's weights.
    """
    rows = max(1, min(_BLOCK_BYTES // max(1, row_bytes), row_limit))
    return max(4, rows.bit_length() - 1)


class RowStore:
    """Holds rows of `columns` numbers.

    Attributes:
        blocks: each [2^shift, columns] of dtype.
        shift: binary logarithm of the rows of a block.
        columns: width of a row.
    """

    def __init__(self, columns: int, shift: int, dtype: torch.dtype, device: torch.device) -> None:
        self.columns = columns
        self.shift = shift
        self.dtype = dtype
        self.device = device
        self.blocks: list[Tensor] = []
        self._spare: list[Tensor] = []

    @property
    def capacity(self) -> int:
        """Rows that the blocks can hold."""
        return len(self.blocks) << self.shift

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.columns * self.dtype.itemsize

    def reserve(self, rows: int) -> None:
        """Appends blocks until `rows` rows fit. Rows that exist stay where they are."""
        while self.capacity < rows:
            if not self._spare:
                self._spare = self._several_blocks()
            self.blocks.append(self._spare.pop())

    def _several_blocks(self) -> list[Tensor]:
        """Returns blocks out of one reservation: as many as there are, up to _BLOCK_BYTES in all.

        The blocks of a state of one number a row are smaller than a huge page; side by side they
        share huge pages.
        """
        block_rows, count = 1 << self.shift, 1
        if self.device.type == "cpu":  # elsewhere memory is committed at once
            count = max(1, min(len(self.blocks), _BLOCK_BYTES // (block_rows * self.row_bytes)))
        together = torch.empty(
            count * block_rows, self.columns, dtype=self.dtype, device=self.device
        )
        ops.advise_huge_pages(together)
        return list(together.split(block_rows))[::-1]

    def read(self, rows: Tensor) -> Tensor:
        """Copies rows out.

        Args:
            rows: [M] int64; -1 reads as zeros.

        Returns:
            [M, columns].
        """
        return ops.gather_rows(rows, self.blocks, self.shift, self.columns, self.dtype)

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Copies values in; of two values for one row the last stays.

        Args:
            rows: [M] int64.
            values: [M, columns]; converted to the rows' dtype, to nearest.
        """
        if rows.numel() == 0:  # before the first block the op cannot know our dtype
            return
        values = values.to(self.dtype).contiguous()
        ops.scatter_rows_(rows, values, self.blocks, self.shift, self.columns)

    def zero(self, rows: Tensor) -> None:
        """Fills rows with zeros.

        Args:
            rows: [M] int64.
        """
        constant = [0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
        ops.init_rows_(rows, rows, self.blocks, self.shift, self.columns, 0, 0, constant, 0)
