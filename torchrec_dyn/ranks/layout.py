"""The sharding types, and the pieces of a sharded table on each rank, read from its plan.

A plan is checked in full before anything is built: TorchRec would fail later, on some ranks only, or not
at all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torchrec.distributed.comm import get_topology_group_world_size
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_dyn.config import HostMemory
from torchrec_dyn.name_lists import listed

IN_DEVICE_MEMORY = EmbeddingComputeKernel.FUSED.value
IN_HOST_MEMORY = EmbeddingComputeKernel.FUSED_UVM.value
CACHED_ON_DEVICE = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
_KERNELS = (IN_DEVICE_MEMORY, IN_HOST_MEMORY, CACHED_ON_DEVICE)
_CHECKED_KERNELS = (*_KERNELS, EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value)
_DEFAULT_LOAD_FACTOR = 0.2  # FBGEMM's, and that of TorchRec's estimators
_MADE_BY = "Make the plan with the planner or construct_module_sharding_plan."
_SAME_NODES = (
    "The planner's Topology(local_world_size=...) and the environment's LOCAL_WORLD_SIZE must be the same; "
    "torchrun sets the latter, to the ranks of a machine."
)
_NO_COPIES = (
    " Every rank would have all rows: choose one of those, or a static table. "
    "torchrec_dyn.planner.without_data_parallel makes a plan table-wise."
)


@dataclass(frozen=True)
class ShardingTraits:
    """The cuts of a table under a sharding type.

    Attributes:
        cuts_columns: True if a table may be cut into several ranges of columns.
        rows_over: the ranks that share the rows of one range of columns: one "rank" has all rows, or the
            ranks of one "node" share them, or all ranks of the "world".
    """

    cuts_columns: bool
    rows_over: Literal["rank", "node", "world"]


SHARDING_TRAITS: Mapping[str, ShardingTraits] = {
    ShardingType.TABLE_WISE.value: ShardingTraits(False, "rank"),
    ShardingType.COLUMN_WISE.value: ShardingTraits(True, "rank"),
    ShardingType.TABLE_COLUMN_WISE.value: ShardingTraits(True, "rank"),
    ShardingType.ROW_WISE.value: ShardingTraits(False, "world"),
    ShardingType.TABLE_ROW_WISE.value: ShardingTraits(False, "node"),
    ShardingType.GRID_SHARD.value: ShardingTraits(True, "node"),
}
# The sharding types that route ids by range of the mixed id (routing.py).
SPREAD_SHARDINGS = [name for name, traits in SHARDING_TRAITS.items() if traits.rows_over != "rank"]


@dataclass(frozen=True)
class Piece:
    """A range of columns of a table, with the ranks that share its rows.

    Attributes:
        columns: number of columns.
        ranks: one or more ranks that share the rows, in the order of their ranges of mixed ids.
    """

    first_column: int
    columns: int
    ranks: tuple[int, ...]

    @property
    def span(self) -> slice:
        """The columns, in whole rows."""
        return slice(self.first_column, self.first_column + self.columns)


@dataclass(frozen=True)
class TableLayout:
    """The pieces of one table and their ranks.

    Attributes:
        pieces: the pieces in column order, without gap or overlap.
        rows_are_spread: True if ids are routed by range of the mixed id.
    """

    pieces: tuple[Piece, ...]
    rows_are_spread: bool

    @property
    def row_ranks(self) -> int:
        """Number of ranks that share the rows of a piece."""
        return len(self.pieces[0].ranks)


def checked_plan(plan: Mapping[str, ParameterSharding], where: str) -> dict[str, ParameterSharding]:
    """Returns a copy of the plan, checked, with the compute kernel that TorchRec reserves for plugins."""
    checked = {}
    for table, sharding in plan.items():
        if sharding.compute_kernel not in _CHECKED_KERNELS:
            raise ValueError(
                f"{where}(table='{table}'): expected compute kernel {', '.join(map(repr, _KERNELS))}, "
                f"got '{sharding.compute_kernel}'. "
                "In a plan written by hand, set it: row_wise(compute_kernel='fused')."
            )
        checked[table] = copy.copy(sharding)
        checked[table].compute_kernel = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
    return checked


def planned_storage(
    kernel: str, load_factor: object, num_embeddings: int, where: str
) -> HostMemory | None:
    """Returns the storage that a plan's compute kernel stands for on a GPU; None: the device's own memory.

    `load_factor` is that of the plan's `cache_params`, else of `fused_params`; None: FBGEMM's default.
    """
    if kernel == IN_HOST_MEMORY:
        return HostMemory(1)  # the smallest cache: FBGEMM has none
    if kernel != CACHED_ON_DEVICE:
        return None
    given = _DEFAULT_LOAD_FACTOR if load_factor is None else load_factor
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 <= given <= 1:
        raise ValueError(
            f"{where}: expected a load factor of its cache from 0 to 1, got {given!r}. Set "
            "CacheParams(load_factor=...) in the plan or the table's ParameterConstraints."
        )
    return HostMemory(max(1, math.ceil(given * num_embeddings)))


def table_layouts(
    configs: Sequence[BaseEmbeddingConfig],
    plan: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    sharding_types: Sequence[str],
    where: str,
) -> dict[str, TableLayout]:
    """Returns the layout of every table of a collection, by name, as its plan defines it."""
    names = [config.name for config in configs]
    if sorted(names) != sorted(plan):
        raise ValueError(
            f"{where}: expected a plan for the tables {listed(names)}, got one for {listed(sorted(plan))}. "
            f"{_MADE_BY}"
        )
    layouts = {}
    for config in configs:
        sharding = plan[config.name]
        table = f"{where}(table='{config.name}')"
        if sharding.sharding_type not in sharding_types:
            is_copied = sharding.sharding_type == ShardingType.DATA_PARALLEL.value
            raise ValueError(
                f"{table}: expected sharding type {', '.join(sharding_types)}, "
                f"got '{sharding.sharding_type}'.{_NO_COPIES if is_copied else ' Choose one of those.'}"
            )
        layouts[config.name] = _layout(config, sharding, env, table)
    return layouts


def _layout(
    config: BaseEmbeddingConfig, sharding: ParameterSharding, env: ShardingEnv, where: str
) -> TableLayout:
    kind = sharding.sharding_type
    traits = SHARDING_TRAITS[kind]
    by_columns: dict[tuple[int, int], list[tuple[int, ShardMetadata]]] = {}
    for rank, shard in _shards_by_rank(sharding, env, where):
        span = (shard.shard_offsets[1], shard.shard_sizes[1])
        by_columns.setdefault(span, []).append((rank, shard))
    _check_ranges(list(by_columns), config.embedding_dim, "columns", where)
    if not traits.cuts_columns and len(by_columns) > 1:
        raise ValueError(
            f"{where}: expected whole rows under {kind}, got columns cut at "
            f"{sorted(first for first, _ in by_columns)[1:]}. {_MADE_BY}"
        )
    pieces = []
    for (first_column, columns), shards in sorted(by_columns.items()):
        ranks = [rank for rank, _ in shards]
        _check_row_ranks(ranks, kind, env, where)
        rows = [(shard.shard_offsets[0], shard.shard_sizes[0]) for _, shard in shards]
        _check_ranges(rows, config.num_embeddings, "rows", where)
        pieces.append(Piece(first_column, columns, tuple(sorted(ranks))))
    return TableLayout(tuple(pieces), kind in SPREAD_SHARDINGS)


def _shards_by_rank(
    sharding: ParameterSharding, env: ShardingEnv, where: str
) -> list[tuple[int, ShardMetadata]]:
    """Returns the shards of a table, each with its rank."""
    shards = _shards(sharding.sharding_spec, where)
    ranks = list(sharding.ranks or [])
    placed = [shard.placement.rank() if shard.placement else None for shard in shards]
    fits = [place in (None, rank) for place, rank in zip(placed, ranks, strict=False)]
    if len(ranks) != len(shards) or not all(fits):
        raise ValueError(
            f"{where}: expected a rank for each of {len(shards)} shards, that of its placement, got ranks "
            f"{ranks} and placements on {placed}. {_MADE_BY}"
        )
    outside = [rank for rank in ranks if not 0 <= rank < env.world_size]
    if outside:
        raise ValueError(
            f"{where}: expected ranks from 0 to {env.world_size - 1}, got {outside}. "
            "Make the plan for the ranks of this run."
        )
    return list(zip(ranks, shards, strict=True))


def _shards(spec: object, where: str) -> list[ShardMetadata]:
    shards = list(spec.shards) if isinstance(spec, EnumerableShardingSpec) else []
    if not shards or any(len(shard.shard_sizes) != 2 for shard in shards):
        raise ValueError(
            f"{where}: expected a sharding spec that lists its shards of rows and columns, got {spec}. "
            f"{_MADE_BY}"
        )
    return shards


def _check_ranges(ranges: list[tuple[int, int]], total: int, what: str, where: str) -> None:
    """Raises ValueError if the (begin, size) ranges do not cover 0 to total exactly once."""
    # If there are fewer rows than ranks, TorchRec's planner assigns no rows to some ranks.
    covering = sorted((begin, size) for begin, size in ranges if size or what == "columns")
    ends = [0, *(begin + size for begin, size in covering)]
    if [*(begin for begin, _ in covering), total] != ends or any(size < 1 for _, size in covering):
        raise ValueError(
            f"{where}: expected shards that cover {what} 0 to {total} once, got shards of (begin, size) "
            f"{covering}. {_MADE_BY}"
        )


def _check_row_ranks(ranks: list[int], kind: str, env: ShardingEnv, where: str) -> None:
    """Raises ValueError if TorchRec would use other ranks for the row shards than the plan."""
    rows_over = SHARDING_TRAITS[kind].rows_over
    if rows_over == "rank" and len(ranks) > 1:
        raise ValueError(
            f"{where}: expected each range of columns on one rank under {kind}, got ranks {ranks}. {_MADE_BY}"
        )
    if rows_over == "world" and sorted(ranks) != list(range(env.world_size)):
        raise ValueError(
            f"{where}: expected one row shard on each of {env.world_size} ranks under {kind}, got ranks "
            f"{ranks}. {_MADE_BY}"
        )
    if rows_over == "node":
        world_size = (
            dist.get_world_size() if isinstance(env.process_group, dist.ProcessGroup) else 0
        )
        if world_size not in (0, env.world_size):
            raise ValueError(
                f"{where}: expected all {world_size} ranks of the job under {kind}, whose groups of nodes "
                f"TorchRec makes over all ranks, got a process group of {env.world_size} ranks. Choose a "
                "sharding type without nodes."
            )
        size = get_topology_group_world_size(env.world_size)
        first = ranks[0] // size * size
        if ranks != list(range(first, first + size)):
            raise ValueError(
                f"{where}: expected the row shards of {kind} on the {size} ranks of one node in order, got "
                f"ranks {ranks}. {_SAME_NODES}"
            )
