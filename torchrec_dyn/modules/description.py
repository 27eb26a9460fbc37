"""Description: which tables of a collection share a call on this rank, and what it holds of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import torch

from torchrec_dyn.lookup import TableGroup
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks import Table
from torchrec_dyn.table import TableShard

UNSHARDED = "unsharded"  # in place of a sharding type


@dataclass(frozen=True)
class TablePlan:
    """Where the rows of a table are; the same on every rank.

    Attributes:
        sharding_type: as in TorchRec's plan, e.g. "row_wise"; "unsharded".
        columns: the column shards of the table, in column order, as (first column, number of columns).
        ranks: for each of `columns` the ranks that share its rows, in the order of their ranges of mixed ids.
    """

    sharding_type: str
    columns: tuple[tuple[int, int], ...]
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        ranks = sorted({rank for sharing in self.ranks for rank in sharing})
        if self.sharding_type == UNSHARDED:
            return UNSHARDED
        return f"{self.sharding_type} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@dataclass(frozen=True)
class ShardDescription:
    """The part of a table, or of one column shard of it, on this rank.

    Attributes:
        table: name of the table.
        features: names of the features that read the table.
        columns: the columns, as (first column, number of columns).
        rows: rows in use on this rank.
        limit: the largest number of rows on this rank.
        bytes: bytes of memory, as "bytes" of the table's `stats()`: id map, rows in use with optimizer state
            and scores, counters, and recorded changes. Rows in mapped files are counted, too.
        is_frozen: True if training reads the table as evaluation does.
    """

    table: str
    features: tuple[str, ...]
    columns: tuple[int, int]
    rows: int
    limit: int
    bytes: int
    is_frozen: bool


@dataclass(frozen=True)
class GroupDescription:
    """A table group of this rank: tables that one call of an op looks up, and one updates.

    Tables share a call if they have the same pooling (max: and width), row dtype and optimizer with the same
    hyper-parameters, and in a sharded collection also the same sharding type and the same of TorchRec's
    options of tables.

    Attributes:
        shards: the column shards of the group, in the order of the call.
        pooling: "sum", "mean", "max", or "none" in a sequence collection. Where several ranks share the rows
            of tables with a mean or maximum it is "sum": the rest follows the exchange of outputs.
        dtype: dtype of the rows.
        output_dtype: dtype of the outputs.
        optimizer: update rule of the rows; its learning rate is the one chosen first, before any schedule.
        device: device of the rows.
    """

    shards: tuple[ShardDescription, ...]
    pooling: str
    dtype: torch.dtype
    output_dtype: torch.dtype
    optimizer: RowOptimizer
    device: torch.device

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables, each once."""
        return tuple(dict.fromkeys(shard.table for shard in self.shards))

    @property
    def rows(self) -> int:
        """Rows in use on this rank; the column shards of a table count once."""
        return _rows(self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True)
class Description:
    """The part of a collection on this rank; `str` of it is a table for people.

    Attributes:
        collection: class of the collection, with its path in a sharded model.
        rank: this rank in the process group of the collection; 0 if unsharded.
        world_size: number of ranks of that group; 1 if unsharded.
        groups: the table groups of this rank, in the order of their calls.
        plan: the plan of every table by name, also of those without a shard on this rank.
    """

    collection: str
    rank: int
    world_size: int
    groups: tuple[GroupDescription, ...]
    plan: Mapping[str, TablePlan]

    @property
    def rows(self) -> int:
        """Rows in use on this rank; the column shards of a table count once."""
        return _rows(chain.from_iterable(group.shards for group in self.groups))

    @property
    def bytes(self) -> int:
        """Bytes of all groups."""
        return sum(group.bytes for group in self.groups)

    def __str__(self) -> str:
        ranks = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        lines = [f"{self.collection}{ranks}: {self.rows:,} rows, {_size(self.bytes)}"]
        width = max((len(name) for name in self.plan), default=0)
        for number, group in enumerate(self.groups):
            lines.append(
                f"group {number}: rows of {_plain(group.dtype)} on {group.device}, pooling "
                f"{group.pooling}, {_rule(group.optimizer)}; {group.rows:,} rows, {_size(group.bytes)}"
            )
            lines.extend(self._line(shard, width) for shard in group.shards)
        here = {name for group in self.groups for name in group.tables}
        others = [f"{name} ({plan})" for name, plan in self.plan.items() if name not in here]
        if others:
            lines.append(f"no rows on this rank: {', '.join(others)}")
        return "\n".join(lines)

    def _line(self, shard: ShardDescription, width: int) -> str:
        first, count = shard.columns
        frozen = ", frozen" if shard.is_frozen else ""
        return (
            f"  {shard.table:<{width}} {shard.rows:>14,} of {shard.limit:>14,} rows {_size(shard.bytes):>12}"
            f"  columns {first} to {first + count - 1}, {self.plan[shard.table]}{frozen}"
        )


def describe_tables(
    collection: str,
    world_size: int,
    tables: Sequence[Table],
    groups: Sequence[TableGroup],
    sharding_types: Mapping[str, str],
) -> Description:
    """Returns the description of a collection on this rank, from all its tables and its table groups here."""
    by_name = {table.name: table for table in tables}
    return Description(
        collection,
        tables[0].rank,
        world_size,
        tuple(_group(group, by_name) for group in groups),
        {name: _plan(table, sharding_types[name]) for name, table in by_name.items()},
    )


def _plan(table: Table, sharding_type: str) -> TablePlan:
    pieces = table.layout.pieces
    columns = tuple((piece.first_column, piece.columns) for piece in pieces)
    return TablePlan(sharding_type, columns, tuple(piece.ranks for piece in pieces))


def _group(group: TableGroup, tables: Mapping[str, Table]) -> GroupDescription:
    first = group.tables[0]
    return GroupDescription(
        tuple(_shard(shard, tables[shard.name]) for shard in group.tables),
        group.pooling,
        first.dtype,
        group.output_dtype,
        first.optimizer,
        group.device,
    )


def _shard(shard: TableShard, table: Table) -> ShardDescription:
    stats = shard.stats()
    return ShardDescription(
        shard.name,
        table.features,
        (shard.first_column, shard.columns),
        int(stats["rows"]),
        int(stats["limit"]),
        int(stats["bytes"]),
        shard.is_frozen,
    )


def _rows(shards: Iterable[ShardDescription]) -> int:
    return sum({shard.table: shard.rows for shard in shards}.values())


def _size(held: int) -> str:
    return f"{held / 2**20:,.1f} MiB" if held >= 2**20 else f"{held / 2**10:,.1f} KiB"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rule(optimizer: RowOptimizer) -> str:
    """Returns the name of an update rule with the hyper-parameters that are not FBGEMM's defaults."""
    if optimizer.own is not None:
        return f"{optimizer.own!r} at {optimizer.learning_rate}"
    default = RowOptimizer(optimizer.kind)
    given = {field.name: getattr(optimizer, field.name) for field in fields(optimizer)}
    changed = [f"{key}={value}" for key, value in given.items() if value != getattr(default, key)]
    return f"{optimizer.kind.name}({', '.join(changed)})"
