"""The tables of a compiled program: inputs of each call, as the index of a generation names them.

A program that holds tables as constants would copy them, and fix the sizes of the id maps and of the rows. As
inputs they are mapped files of any generation, so a delta that grows a table needs no new program.

Legend: T tables, N ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchrec_dyn import ops
from torchrec_dyn.serving.tensor_index import ALL_ROWS, name_in_index

# One block of up to 2^31 rows, the most that a layout can name.
_SHIFT = 31


class GivenTables(nn.Module):
    """The counterpart of Generation while a program is traced. It has tensors inside of `given` only.

    `tables` are the names of T tables with their columns, in the order of the ids of a call. `nbit` is as of
    the generation.
    """

    def __init__(self, tables: Mapping[str, int], nbit: str) -> None:
        super().__init__()
        self.nbit = nbit
        self._names = list(tables)
        self._columns = list(tables.values())
        self._given: Mapping[str, Tensor] = {}

    def tensor_names(self) -> list[str]:
        """Returns the names in the index of the tensors that the tables consist of."""
        parts = "slots", "key", "rows"
        names = [name_in_index(table, part) for table in self._names for part in parts]
        return [*names, ALL_ROWS] if self.nbit else names

    @contextmanager
    def given(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Has the tensors of the tables, by the names of `tensor_names`, until the context ends."""
        self._given = tensors
        try:
            yield
        finally:  # torch.export warns of a module that keeps traced tensors
            self._given = {}

    @property
    def rows(self) -> Tensor:
        """The rows of all tables, [bytes] uint8, for rows of int8 and int4."""
        return self._given[ALL_ROWS]

    @property
    def layout(self) -> Tensor:
        """The layout of `blocks`, [T, 4] int64: each table has one block."""
        return torch.tensor(
            [[t, 1, _SHIFT, width] for t, width in enumerate(self._columns)], device="cpu"
        )

    def find(self, ids: Tensor, table_offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Finds the rows of ids as Generation does."""
        return ops.lookup(ids, table_offsets, self._of("slots"), torch.cat(self._of("key")))

    def blocks(self) -> Sequence[Tensor]:
        """Returns the rows of each table, for rows of float32 or float16."""
        # The file may have more rows of this width, of other tables.
        return [
            rows.narrow(0, 0, torch.sym_min(rows.shape[0], 1 << _SHIFT))
            for rows in self._of("rows")
        ]

    def _of(self, part: str) -> list[Tensor]:
        return [self._given[name_in_index(table, part)] for table in self._names]
