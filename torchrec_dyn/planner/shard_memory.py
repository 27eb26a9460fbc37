"""The bytes of a shard of a dynamic table, part by part."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchrec_dyn.life import SCORE_BYTES
from torchrec_dyn.optimizers import STATE_DTYPE, RowOptimizer
from torchrec_dyn.planner.argument_checks import checked_count
from torchrec_dyn.ranks import row_limit
from torchrec_dyn.storage import (
    SLOT_BYTES,
    block_shift,
    most_log_bytes,
    most_slots,
    most_store_bytes,
)
from torchrec_dyn.table import ROW_DTYPES


@dataclass(frozen=True)
class TableSize:
    """An upper bound of the bytes of one shard.

    Attributes:
        weights: bytes of the rows.
        optimizer_state: bytes of the optimizer state of the rows.
        id_map: bytes of the id map.
        scores: bytes of the scores of the rows; 0 without a policy.
        counters: bytes of the counters of waiting ids, with their map.
        marks: bytes of the record of changed rows; 0 without deltas.
    """

    weights: int
    optimizer_state: int
    id_map: int
    scores: int
    counters: int
    marks: int = 0

    @property
    def total(self) -> int:
        """Bytes of the shard."""
        rows = self.weights + self.optimizer_state + self.scores + self.marks
        return rows + self.id_map + self.counters


def table_size(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    optimizer: RowOptimizer,
    device_type: str | torch.device = "cpu",
    limit: int | None = None,
    has_life: bool = False,
    counters: int = 0,
    deltas: bool = False,
) -> TableSize:
    """Returns an upper bound of the bytes of a TableShard with `rows` rows, part by part.

    On the CPU the weights and the optimizer state are exact, because memory is committed when a row is
    first written. A GPU commits pages of 2 MiB, and an eighth (at most 256 MiB) more than a store needs. The
    id map is counted with its largest size up to this number of ids, growth included: 2 / MAX_LOAD slots per
    row while it is small, 1.25 / MAX_LOAD later. A GPU has old and new slots in memory while a map grows:
    3 / MAX_LOAD, later 2.25 / MAX_LOAD. The map of counters is counted in the same way. Not included:
    withheld rows, counters above their limit before the surplus of a batch is dropped, the lists of rows to
    evict next, and the removed ids that deltas need.

    Args:
        rows: number of ids with a row.
        columns: columns of a row in this shard.
        dtype: dtype of the rows.
        optimizer: optimizer of the rows.
        device_type: "cpu" or "cuda", or a device of these.
        limit: the table's row limit, which decides the size of its blocks, `rows` or more; None: `rows`.
        has_life: True if any policy is set, so that each row has a score.
        counters: maximum number of waiting ids in this shard.
        deltas: True if deltas are exported (`checkpoint.mark`), so that changed rows are recorded.

    Raises:
        ValueError: if an argument is not valid.
    """
    _check_kinds(dtype, optimizer)
    device_type = _checked_device_type(device_type)
    rows = checked_count(rows, "table_size.rows", 0, "Pass the ids with a row in this shard.")
    columns = checked_count(columns, "table_size.columns", 1, "Pass the columns of this shard.")
    remedy = f"Pass the table's row limit, at least its rows={rows}, or None for as many as these."
    limit = rows if limit is None else checked_count(limit, "table_size.limit", rows, remedy)
    remedy = "Pass the most ids that wait in this shard; 0 without AdmitAfter."
    counters = checked_count(counters, "table_size.counters", 0, remedy)
    shift = block_shift(limit, columns * dtype.itemsize, device_type)

    def store(row_bytes: int) -> int:
        return most_store_bytes(rows, row_bytes, shift, device_type)

    states = optimizer.state_columns(columns)
    waiting = 0
    if counters:
        # The counters of a table have at most its limit, or the number that the user chose.
        shift_of_counters = block_shift(max(counters, limit), SCORE_BYTES, device_type)
        waiting = most_slots(counters, device_type) * SLOT_BYTES
        waiting += most_store_bytes(counters, SCORE_BYTES, shift_of_counters, device_type)
    return TableSize(
        weights=store(columns * dtype.itemsize),
        optimizer_state=sum(store(width * STATE_DTYPE.itemsize) for width in states),
        id_map=most_slots(rows, device_type) * SLOT_BYTES,
        scores=store(SCORE_BYTES) if has_life else 0,
        counters=waiting,
        marks=most_log_bytes(rows, limit, device_type) if deltas else 0,
    )


def _check_kinds(dtype: object, optimizer: object) -> None:
    if dtype not in ROW_DTYPES:
        raise ValueError(
            f"table_size.dtype: expected torch.float32, torch.float16 or torch.bfloat16, got {dtype!r}."
        )
    if not isinstance(optimizer, RowOptimizer):
        raise ValueError(
            f"table_size.optimizer: expected a RowOptimizer, got {optimizer!r}. Write "
            "RowOptimizer.from_fused_params(fused_params, 'my table')."
        )


def _checked_device_type(device_type: object) -> str:
    kind = device_type.type if isinstance(device_type, torch.device) else device_type
    if not isinstance(kind, str) or kind not in ("cpu", "cuda"):
        raise ValueError(
            f"table_size.device_type: expected 'cpu' or 'cuda', got {device_type!r}. Pass the type of the "
            "device that has the rows."
        )
    return kind


def table_bytes(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    optimizer: RowOptimizer,
    device_type: str | torch.device = "cpu",
    limit: int | None = None,
    has_life: bool = False,
    counters: int = 0,
    deltas: bool = False,
) -> int:
    """Returns `table_size(...).total`: an upper bound of the bytes of a shard, from the same arguments."""
    return table_size(
        rows, columns, dtype, optimizer, device_type, limit, has_life, counters, deltas
    ).total


def print_size(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    optimizer: RowOptimizer,
    row_ranks: int,
    column_shards: int,
    has_life: bool,
    counters: int,
) -> None:
    """Prints the bytes of a table on the CPU: of one shard, and of all shards.

    Args:
        rows: number of ids with a row, over all ranks.
        columns: columns of the table.
        dtype: dtype of the rows.
        optimizer: optimizer of the rows.
        row_ranks: number of ranks that share the rows of a column shard.
        column_shards: number of column shards, of about the same width.
        has_life: True if any policy is set.
        counters: maximum number of waiting ids, over all ranks.

    Raises:
        ValueError: if there are more column shards than columns, or an argument is not valid.
    """
    rows = checked_count(rows, "print_size.rows", 0, "Pass the ids with a row, over all ranks.")
    columns = checked_count(columns, "print_size.columns", 1, "Pass the table's embedding_dim.")
    row_ranks = checked_count(
        row_ranks, "print_size.row_ranks", 1, "Pass 1 if each column shard is on one rank."
    )
    column_shards = checked_count(
        column_shards, "print_size.column_shards", 1, "Pass 1 if the columns are not split."
    )
    counters = checked_count(counters, "print_size.counters", 0, "Pass 0 without AdmitAfter.")
    if column_shards > columns:
        raise ValueError(
            f"size: expected at most {columns} column shards, one per column, got {column_shards}."
        )
    widths = [
        columns // column_shards + (shard < columns % column_shards)
        for shard in range(column_shards)
    ]
    # The limit of a rank is also what it holds at most of the expected rows: ids do not split evenly.
    here, waiting = row_limit(rows, row_ranks), row_limit(counters, row_ranks) if counters else 0

    def size(rows_here: int, width: int, counters_here: int) -> TableSize:
        return table_size(
            rows_here, width, dtype, optimizer, has_life=has_life, counters=counters_here
        )

    largest = size(here, widths[0], waiting)
    # On average a rank holds its even share, so the whole is not the largest shard times the ranks.
    even = [size(-(-rows // row_ranks), width, -(-counters // row_ranks)) for width in widths]
    print(f"{'MiB':<18}{'largest shard':>15}{'all shards':>15}")
    for part in ("weights", "optimizer_state", "id_map", "scores", "counters", "total"):
        whole = row_ranks * sum(getattr(shard, part) for shard in even)
        print(
            f"{part.replace('_', ' '):<18}{getattr(largest, part) / 2**20:>15,.1f}{whole / 2**20:>15,.1f}"
        )
    print(
        f"{row_ranks * column_shards} shards of at most {here:,} rows and {widths[0]} columns, "
        f"for {rows:,} rows and {columns} columns in all"
    )
