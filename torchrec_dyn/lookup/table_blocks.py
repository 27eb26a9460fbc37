"""The blocks of several tables in the form that the ops take: one flat list, and a layout of each table.

Legend: T tables, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.optimizers import STATE_NAMES
from torchrec_dyn.storage import BLOCKS, RowStore, host_numbers
from torchrec_dyn.table import DynamicTable, ranges_of


@dataclass(frozen=True)
class TableBlocks:
    """The blocks of one store of each of T tables.

    Attributes:
        weights: the blocks of all tables, one after another.
        layout: [T, 4] int64 (csrc/storage/blocks.h).
    """

    weights: list[Tensor]
    layout: Tensor


def blocks_of(stores: Sequence[RowStore], rows: Sequence[int] | None = None) -> TableBlocks:
    """Returns the blocks of T stores, one for each table; with `rows` [T], only those of its first rows."""
    lines: list[list[int]] = []
    blocks: list[Tensor] = []
    for place, store in enumerate(stores):
        own = store.blocks if rows is None else store.blocks_of_first(rows[place])
        lines.append([len(blocks), len(own), store.shift, store.columns])
        blocks.extend(own)
    return TableBlocks(blocks, host_numbers(lines))


class BlockLists:
    """The blocks of the tables of a group, listed again when a store has other blocks."""

    def __init__(self, tables: Sequence[DynamicTable]) -> None:
        self._tables = tables
        self._rows_token: object = None
        self._scores_token: object = None
        self._rows: tuple[TableBlocks, tuple[list[Tensor], ...]]
        self._scores: TableBlocks

    def rows(self) -> tuple[TableBlocks, tuple[list[Tensor], ...]]:
        """Returns the blocks of the weights and, for each of `STATE_NAMES`, those of that optimizer state."""
        token = BLOCKS.now
        if self._rows_token is not token:
            self._rows, self._rows_token = _list_rows(self._tables), token
        return self._rows

    def scores(self) -> TableBlocks:
        """Returns the blocks of the scores; a table without a life has no blocks."""
        token = BLOCKS.now
        if self._scores_token is not token:
            stores = [_NO_SCORES if t.life is None else t.life.scores.store for t in self._tables]
            self._scores, self._scores_token = blocks_of(stores), token
        return self._scores


_NO_SCORES = RowStore(1, 0, torch.int64, torch.device("cpu"))


def _list_rows(tables: Sequence[DynamicTable]) -> tuple[TableBlocks, tuple[list[Tensor], ...]]:
    # An interrupt may have left more rows in some stores of a table. In ranges, rows of fewer bytes have more
    # room: memory is committed by the page.
    rows = [min(store.capacity for store in table.stores) for table in tables]
    states: tuple[list[Tensor], ...] = tuple([] for _ in STATE_NAMES)
    for table, count in zip(tables, rows, strict=True):
        for place, state in enumerate(table.states):
            states[place].extend(state.blocks_of_first(count))
    return blocks_of([table.weights for table in tables], rows), states


def blocks_with_initial_rows(
    tables: Sequence[DynamicTable], ids: Tensor, rows: Tensor, table_offsets: Tensor
) -> tuple[TableBlocks, Tensor]:
    """Returns the blocks of the tables and, for one forward, initial rows of unseen ids.

    The tables do not change. A table whose `unseen` is "zeros" gets no initial rows.

    ids [N] int64 in table order; rows [N] int64, -1 for an unseen id, written in place: rows in the returned
    blocks; table_offsets [T + 1] int64, where the ids of each table begin.

    Returns:
        The blocks, and [N] int64: -1 for an id that was not unseen, else 0 or more.
    """
    new_ids, _, new_offsets, new_index = ops.collect_new(ids, rows, table_offsets)
    stores = [table.weights for table in tables]
    new_rows: list[Tensor] = []
    for t, unseen_of_table in ranges_of(new_offsets).items():
        table, weights, unseen = tables[t], tables[t].weights, new_ids[unseen_of_table]
        if table.config.unseen != "initial":
            new_rows.append(torch.full_like(unseen, -1))
            continue
        if weights.grows_in_place:
            # The addresses after its last row are for later rows. A copy of the batch's rows costs little
            # more than their pooling.
            begin, end = table_offsets[t : t + 2].tolist()
            found, first = rows[begin:end], end - begin
            stores[t] = weights.with_copies(found, unseen.numel())
            copies = torch.arange(first, device=rows.device)
            found.copy_(copies.masked_fill_(found < 0, -1))
        else:
            first = weights.capacity
            stores[t] = weights.with_added_blocks(unseen.numel())
        fresh = torch.arange(first, first + unseen.numel(), device=rows.device)
        table.initial_rows.write(unseen, fresh, stores[t])
        new_rows.append(fresh)
    ops.fill_new_(rows, new_index, torch.cat(new_rows))
    return blocks_of(stores), new_index
