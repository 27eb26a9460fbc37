"""RowMarks: one small number for each row, 0 until the row is marked.

The update of rows marks in its own pass, and with one bit for each row: these bits fit a core's cache. They
stand for the latest number, and become numbers before the next number is used.

Legend: T tables, N rows in table order, M rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.storage.block_memory import lasting

# Approximate block count of a full table on a GPU: each block of a call costs host time.
_MOST_BLOCKS = 16
_LEAST_SHIFT = 9  # 64 stripes of bits, of whole bytes


def marks_bytes(rows: int, row_limit: int, device_type: str = "cpu") -> int:
    """Returns the bytes of the marks of a table with `rows` rows in use."""
    return 33 * bits_bytes(rows, row_limit, device_type)  # 32 bits and one


def bits_bytes(rows: int, row_limit: int, device_type: str = "cpu") -> int:
    """Returns the bytes of one bit for each row of a table with `rows` rows in use."""
    shift = block_shift_of(row_limit, device_type)
    return -(-rows >> shift) * (1 << shift - 3)


def block_shift_of(row_limit: int, device_type: str) -> int:
    """Returns the binary logarithm of the rows of a block of marks."""
    most = (
        knobs.MARKED_ROWS
        if device_type == "cpu"
        else max(knobs.MARKED_ROWS, row_limit // _MOST_BLOCKS)
    )
    return max(_LEAST_SHIFT, min(most, row_limit).bit_length() - 1)


class RowMarks:
    """An int32 for each row of a table, in `blocks` [2^shift, 1] that never move.

    `bits` are those of the rows of each block, [2^(shift - 3)] uint8 (csrc/storage/row_marks.h).
    """

    def __init__(self, row_limit: int, device: torch.device) -> None:
        self.shift = block_shift_of(row_limit, device.type)
        self.blocks: list[Tensor] = []
        self.bits: list[Tensor] = []
        self._words: list[Tensor] = []  # the same memory as float32, for the op that copies rows
        self._device = device

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows."""
        while len(self.blocks) << self.shift < rows:
            block, bits = self._new_block(), clear_bits(self.shift, self._device)
            self._words[len(self.blocks) :] = [block.view(torch.float32)]
            self.bits[len(self.blocks) :] = [bits]
            self.blocks.append(block)

    @lasting
    def _new_block(self) -> Tensor:
        return torch.zeros(1 << self.shift, 1, dtype=torch.int32, device=self._device)

    def read(self, rows: Tensor) -> Tensor:
        """Returns the marks of rows [M] int64, [M] int32."""
        words = ops.gather_rows(rows, self._words, self.shift, 1, torch.float32)
        return words.view(torch.int32).flatten()

    def fill(self, mark: int) -> None:
        """Marks all rows in the blocks."""
        for block in self.blocks:
            block.fill_(mark)

    def write(self, rows: Tensor, mark: int) -> None:
        """Writes one mark for all rows [M] int64."""
        write_marks([self], rows, torch.tensor([0, rows.numel()], device="cpu"), [mark])

    def settle(self, mark: int) -> None:
        """Writes the mark that the bits stand for, and clears the bits. Nothing may set bits meanwhile."""
        for block, bits in zip(self.blocks, self.bits, strict=False):
            block.masked_fill_(flags_of(bits).unsqueeze(1), mark)
            bits.zero_()  # after the marks: an interrupt may come between the two

    def at_least(self, mark: int) -> Tensor:
        """Returns for each row in the blocks, [capacity] bool, whether its mark is at least `mark`.

        `mark` is at most the mark that the bits stand for.
        """
        nothing = torch.zeros(0, dtype=torch.bool, device=self._device)
        blocks = list(self.blocks)  # another thread may append some
        # Bits before numbers: another thread may settle them meanwhile.
        flags = torch.cat([*map(flags_of, self.bits[: len(blocks)]), nothing])
        for block, own in zip(blocks, flags.split(1 << self.shift), strict=False):
            own |= block.flatten() >= mark
        return flags

    @property
    def capacity(self) -> int:
        """Rows in the blocks."""
        return len(self.blocks) << self.shift

    @property
    def bytes(self) -> int:
        """Bytes of the blocks."""
        return sum(block.nbytes for block in (*self.blocks, *self.bits))


def write_marks(
    tables: Sequence[RowMarks | None], rows: Tensor, table_offsets: Tensor, marks: Sequence[int]
) -> None:
    """Writes marks [T] for rows [N] int64 in table order, -1 is skipped; table_offsets [T + 1] int64.

    None stands for a table without marks.
    """
    listed = _list_blocks(
        [None if table is None else (table.blocks, table.shift) for table in tables]
    )
    ops.mark_rows_(rows, table_offsets, *listed, torch.tensor(marks, device="cpu"))


def list_bits(tables: Sequence[tuple[list[Tensor], int] | None]) -> tuple[list[Tensor], Tensor]:
    """Returns bits and shifts of T tables as ops take them: all blocks, and their layout [T, 4]."""
    return _list_blocks([None if table is None else (table[0], table[1] - 3) for table in tables])


def _list_blocks(
    tables: Sequence[tuple[list[Tensor], int] | None],
) -> tuple[list[Tensor], Tensor]:
    blocks: list[Tensor] = []
    layout = []
    for table in tables:
        own, shift = ([], _LEAST_SHIFT - 3) if table is None else table
        layout.append([len(blocks), len(own), shift, 1])
        blocks.extend(own)
    return blocks, torch.tensor(layout, device="cpu")


@lasting
def clear_bits(shift: int, device: torch.device) -> Tensor:
    """Returns the bits of a block of 2^shift rows, all clear, [2^(shift - 3)] uint8."""
    return torch.zeros(1 << shift - 3, dtype=torch.uint8, device=device)


def flags_of(bits: Tensor) -> Tensor:
    """Returns the bits of a block, bits [B] uint8, by row, [8 B] bool."""
    stripes = bits.view(64, -1, 1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (stripes & 1).permute(1, 2, 0).reshape(-1).bool()
