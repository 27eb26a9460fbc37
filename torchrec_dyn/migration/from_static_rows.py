"""Rows of a static table become rows of a dynamic one that has none of them yet: row i is that of id i.

Legend: M rows of a chunk, C columns of the shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from torchrec_dyn.table import DynamicTable, named_states

# Rows are copied so many bytes at a time: beside both tables there is never more than a few of these.
CHUNK_BYTES = 32 << 20


def put_rows(
    table: DynamicTable, ids: Tensor, weight: Tensor, states: Mapping[str, Tensor]
) -> None:
    """Puts rows into a table, whatever its limit; what a policy counts starts at the table's step.

    Args:
        table: one shard.
        ids: [M] int64, distinct, without a row so far.
        weight: [M, C].
        states: optimizer state by name, [M, C] or one number a row; what is missing starts afresh.
    """
    table.reserve(ids.numel())
    rows = table.row_numbers.take(ids.numel())
    table.id_map.insert(ids, rows)
    table.weights.write(rows, weight)
    for one in named_states(table):
        if one.name in states:
            one.store.write(rows, states[one.name].reshape(ids.numel(), one.store.columns))
        else:
            one.store.zero(rows)
    if table.life is not None:
        table.life.born(ids, rows, table.step, None)


def chunks(count: int, columns: int) -> Iterator[tuple[int, int]]:
    """Cuts `count` rows of so many columns into chunks: the first row, and the one after the last."""
    size = max(1, CHUNK_BYTES // (4 * columns))
    for first in range(0, count, size):
        yield first, min(first + size, count)
