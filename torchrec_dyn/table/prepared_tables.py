"""PreparedTables: the maps, rows and scores of tables in the form that ops take, checked once for many calls.

Legend: T tables.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import get_args

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.config import OnNonfinite
from torchrec_dyn.optimizers import RULES, OptimizerKind
from torchrec_dyn.storage import (
    BLOCKS,
    SLOTS,
    CachedTables,
    RowStore,
    TableBlocks,
    arrays_of,
    blocks_of,
    host_numbers,
)
from torchrec_dyn.table.arrays import TableArrays

_ON_NONFINITE = get_args(OnNonfinite)
_NO_SCORES = RowStore(1, 0, torch.int64, torch.device("cpu"))


class PreparedTables:
    """T tables of one row dtype and one optimizer, prepared again when they have other slots or blocks.

    Steps give rows to absent ids, and score the rows of tables with a life, but for the numbers in `frozen`.

    Attributes:
        tables: in the order of the ops.
        has_caches: True if rows of a table are in frames: ops that read or write rows take their `places`.
    """

    def __init__(self, tables: Sequence[TableArrays], frozen: Collection[int] = ()) -> None:
        self.tables = tables
        self._frozen = frozenset(frozen)
        self._tokens: tuple[object, object] = (None, None)
        self._handle = torch.empty(0, device="cpu")
        self._cached = CachedTables({}, [])
        self.has_caches = any(table.weights.cache is not None for table in tables)
        self._rows: TableBlocks
        self._states: list[Tensor]
        self._scores: TableBlocks
        initial = [table.initial_rows.numbers() for table in tables]
        flags = [
            (table.config.unseen == "initial") + 2 * (t in self._frozen)
            for t, table in enumerate(tables)
        ]
        self._initial = host_numbers(
            [(*words, flag) for (words, _), flag in zip(initial, flags, strict=True)]
        )
        parameters = [numbers for _, numbers in initial]
        self._parameters = torch.tensor(parameters, dtype=torch.float64, device="cpu")

    def get(self) -> Tensor:
        """Returns the result of `ops.prepare_tables`."""
        slots, blocks = SLOTS.now, BLOCKS.now
        if self._tokens[0] is not slots or self._tokens[1] is not blocks:
            self._prepare(blocks)
            self._tokens = slots, blocks
        return self._handle

    def rows(self) -> TableBlocks:
        """Returns the blocks of the weights."""
        self.get()
        return self._rows

    def cache_rows(
        self, rows: Tensor, table_offsets: Tensor, is_new: bool = False, loads: bool = True
    ) -> None:
        """Gives frames to the rows of a batch: `CachedTables.cache_rows`."""
        handle = self.get()
        self._cached.cache_rows(rows, table_offsets, handle, is_new, loads)

    def places(self, rows: Tensor, table_offsets: Tensor) -> Tensor:
        """Returns where the rows of a batch are, as ops take rows: `CachedTables.places`."""
        if not self.has_caches:
            return rows
        self.get()
        return self._cached.places(rows, table_offsets)

    def _prepare(self, blocks: object) -> None:
        # Slots of a map that grows move in most steps, but blocks do not change.
        if self._tokens[1] is not blocks:
            self._rows, self._states, self._cached = _list_rows(self.tables)
            self._scores = blocks_of(self._score_stores())
        optimizer, nonfinite = self.tables[0].optimizer, _nonfinite_of(self.tables)
        rule, states, numbers = optimizer.rule, self._states, list(optimizer.initial_states)
        if optimizer.own is not None:  # the kernel writes no state of its rule
            rule, states, numbers = RULES[OptimizerKind.EXACT_SGD].number, [], []
        what = [_ON_NONFINITE.index(table.config.on_nonfinite) for table in self.tables]
        slots, moved = arrays_of([table.id_map for table in self.tables])
        self._handle = ops.prepare_tables(
            slots, moved, self._rows.blocks, states, self._rows.layout, rule,
            what if nonfinite else [], nonfinite, self._initial, self._parameters, numbers,
            self._scores.blocks, self._scores.layout,
        )  # fmt: skip

    def _score_stores(self) -> list[RowStore]:
        return [
            _NO_SCORES if table.life is None or t in self._frozen else table.life.scores.store
            for t, table in enumerate(self.tables)
        ]


def _list_rows(tables: Sequence[TableArrays]) -> tuple[TableBlocks, list[Tensor], CachedTables]:
    # An interrupt may have left more rows in some stores of a table. In ranges, rows of fewer bytes have more
    # room: memory is committed by the page.
    rows = [min(store.capacity for store in table.stores) for table in tables]
    caches = {
        t: cache for t, table in enumerate(tables) if (cache := table.weights.cache) is not None
    }
    bases = [-(-rows[t] >> tables[t].weights.shift) << tables[t].weights.shift for t in caches]
    states = [
        block
        for stores in zip(*(table.states for table in tables), strict=True)
        for store, count in zip(stores, rows, strict=True)
        for block in store.blocks_of_first(count)
    ]
    blocks = blocks_of([table.weights for table in tables], rows)
    return blocks, states, CachedTables(caches, bases)


def _nonfinite_of(tables: Sequence[TableArrays]) -> list[Tensor]:
    """Returns where the tables count refused updates; empty if none does."""
    counts = [table.nonfinite for table in tables]
    if all(count is None for count in counts):
        return []
    device = tables[0].device
    unused = torch.zeros(len(tables), dtype=torch.int64, device=device)
    return [unused[t : t + 1] if count is None else count for t, count in enumerate(counts)]
