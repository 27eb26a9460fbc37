"""What the stats of a running model are for the planner: constraints, and the load of each rank.

A rating of plans counts both memory and time. The checks of the planner's arguments are here, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.types import PerfModel, ShardingOption, hash_sha256_to_int
from torchrec.distributed.types import (
    CacheParams,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_dyn.config import HostMemory
from torchrec_dyn.modules import UnshardedCollection
from torchrec_dyn.name_lists import listed
from torchrec_dyn.planner.hit_rates import measured_hit_rates
from torchrec_dyn.ranks import Stats
from torchrec_dyn.whole_model import collections_of, table_names

_PASS_STATS = "Pass stats=read_model_stats(model)."
_NEEDED = ("rows", "waiting", "ids_seen", "forwards", "features", "ranks")


@dataclass
class MeasuredConstraints(ParameterConstraints):
    """TorchRec's constraints on a table, with its expected size.

    The stock planner ignores the expected size; DynamicStorageEstimator uses it.

    Attributes:
        expected_rows: expected number of rows, over all ranks; None: the table's limit.
        expected_counters: expected number of waiting ids, over all ranks; None: the maximum.

    Raises:
        ValueError: if a number is not an integer, or rows are below 1 or counters below 0.
    """

    expected_rows: int | None = None
    expected_counters: int | None = None

    def __post_init__(self) -> None:
        for field, least in (("expected_rows", 1), ("expected_counters", 0)):
            given = getattr(self, field)
            if given is not None:
                where, remedy = f"MeasuredConstraints.{field}", "Pass None if it is not known."
                setattr(self, field, checked_count(given, where, least, remedy))

    def __hash__(self) -> int:
        return hash_sha256_to_int([super().__hash__(), self.expected_rows, self.expected_counters])


def read_model_stats(model: nn.Module) -> dict[str, Stats]:
    """Returns the stats of every dynamic table of a model, the same on every rank. Collective if sharded.

    Args:
        model: a model with dynamic collections, or a collection, with or without DistributedModelParallel.

    Returns:
        The stats of `torchrec_dyn.read_stats` by table name, with more entries: `features`, the number of
        features that read the table, `ranks`, the number of ranks with batches, and with HostMemory its
        `gpu_rows`.

    Raises:
        ValueError: if the model has no dynamic collection, or two tables have the same name.
    """
    stats_by_table: dict[str, Stats] = {}
    for _, module in collections_of(model, "read_model_stats"):
        for name in table_names(module):
            if name in stats_by_table:
                raise ValueError(
                    f"read_model_stats: expected tables of different names, got two named '{name}'. "
                    "Pass each collection separately."
                )
            table = module.table(name)
            ranks = 1 if table.group is None else dist.get_world_size(table.group)
            more = {"features": len(table.features), "ranks": ranks}
            if isinstance(storage := table.options.storage, HostMemory):
                more["gpu_rows"] = storage.gpu_rows
            stats_by_table[name] = table.read_stats() | more
    return stats_by_table


def constraints_from(
    stats: Mapping[str, Mapping[str, int | float]],
    batch_size: int,
    growth: float = 1.5,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> dict[str, ParameterConstraints]:
    """Returns constraints from measured stats, so that plans use the real load of each table.

    The number of ids per sample of a table becomes its `pooling_factors`. Ids are counted per table, so all
    features of a table get the same factor. The rows and the waiting ids of a table, multiplied by `growth`,
    become the expected numbers that `make_planner` uses, up to the table's limit. Rows that a table with
    HostMemory has loaded become the hit rates of its cache, `cache_params.stats`.

    Args:
        stats: stats by table name, from `read_model_stats`.
        batch_size: samples per rank and forward while the stats were counted.
        growth: rows to plan for, as a multiple of the present rows.
        constraints: the user's constraints by table name. Their other fields are kept; `num_poolings` and
            `batch_sizes` are used for the pooling factors. Constraints on tables without stats do not change.

    Raises:
        ValueError: if an argument is out of its range, stats are missing, or a table has not been trained
            since it was created.
    """
    check_stats("constraints_from", stats)
    remedy = "Pass the samples per rank and forward while the stats were counted."
    check_number(batch_size, "constraints_from.batch_size", 1, remedy)
    check_number(growth, "constraints_from.growth", 1, "Pass 1 to plan for the present rows.")
    given = checked_constraints(constraints, "constraints_from.constraints")
    for name, seen in stats.items():
        given[name] = _measured(name, seen, batch_size, growth, given.get(name))
    return given


def lookups_per_forward(stats: Mapping[str, int | float]) -> float:
    """Returns the ids that all ranks look up in a table in one training forward."""
    return stats["ids_seen"] / stats["forwards"]


def check_stats(where: str, by_table: Mapping[str, Mapping[str, int | float]]) -> None:
    """Raises ValueError unless the stats of each table are complete and count a training forward."""
    if not isinstance(by_table, Mapping):
        raise ValueError(
            f"{where}.stats: expected the stats of read_model_stats, got {by_table!r}. {_PASS_STATS}"
        )
    for name, stats in by_table.items():
        place = f"{where}.stats['{name}']"
        if not isinstance(stats, Mapping):
            raise ValueError(
                f"{place}: expected the stats of read_model_stats, got {stats!r}. {_PASS_STATS}"
            )
        if missing := [needed for needed in _NEEDED if needed not in stats]:
            raise ValueError(
                f"{place}: expected the stats of read_model_stats, got none named {missing}. {_PASS_STATS}"
            )
        if stats["forwards"] < 1:
            raise ValueError(
                f"{place}: expected a table that was trained since its creation, got 0 forwards. Train some "
                "batches first; leave out a table that is frozen or unused."
            )


def _measured(
    name: str,
    stats: Mapping[str, int | float],
    batch_size: int,
    growth: float,
    given: ParameterConstraints | None,
) -> MeasuredConstraints:
    features = int(stats["features"])
    given = given or ParameterConstraints()
    kept = {field.name: getattr(given, field.name) for field in fields(ParameterConstraints)}
    poolings = given.num_poolings or [1.0] * features
    batch_sizes = given.batch_sizes or [batch_size] * features
    if not len(poolings) == len(batch_sizes) == features:
        raise ValueError(
            f"constraints_from.constraints['{name}']: expected num_poolings and batch_sizes for each of "
            f"{features} features, got {len(poolings)} and {len(batch_sizes)}."
        )
    # The planner sums the products of these three factors. The sum must be the ids of one rank in a forward.
    bags = sum(count * size for count, size in zip(poolings, batch_sizes, strict=True))
    if not bags > 0:
        raise ValueError(
            f"constraints_from.constraints['{name}']: expected num_poolings and batch_sizes with at least "
            f"one product above 0, got {poolings} and {batch_sizes}."
        )
    ids_a_bag = lookups_per_forward(stats) / stats["ranks"] / bags
    expected_rows = max(1, math.ceil(stats["rows"] * growth))
    rates, cache = measured_hit_rates(stats, expected_rows), given.cache_params
    if rates is not None and (cache is None or cache.stats is None):
        kept["cache_params"] = replace(cache or CacheParams(), stats=rates)
    return MeasuredConstraints(
        **(kept | {"pooling_factors": [ids_a_bag] * features}),
        expected_rows=expected_rows,
        expected_counters=math.ceil(stats["waiting"] * growth),
    )


def checked_count(value: object, where: str, least: int, remedy: str) -> int:
    """Returns a number of rows, ids, ranks or samples as an integer of Python."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}: expected an integer, {least} or more, got {value!r}. {remedy}")
    return int(value)


def check_number(value: object, where: str, least: float, remedy: str) -> None:
    """Checks a number that need not be whole."""
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not least <= number < math.inf:
        raise ValueError(
            f"{where}: expected a finite number, {least} or more, got {value!r}. {remedy}"
        )


def checked_constraints(
    given: Mapping[str, ParameterConstraints] | None, where: str
) -> dict[str, ParameterConstraints]:
    """Returns a copy of the constraints by table name; without constraints an empty dict."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{where}: expected a dict of ParameterConstraints by table name, got {given!r}. Write "
            "{name: ParameterConstraints(...)}."
        )
    for name, constraints in given.items():
        if constraints is None:  # no constraints, as in TorchRec
            continue
        if not isinstance(constraints, ParameterConstraints):
            raise ValueError(
                f"{where}['{name}']: expected ParameterConstraints, got {constraints!r}. Write "
                "ParameterConstraints(sharding_types=[...])."
            )
        for field in ("sharding_types", "compute_kernels"):
            choices = getattr(constraints, field)
            if isinstance(choices, str):
                raise ValueError(
                    f"{where}['{name}'].{field}: expected a list, got {choices!r}. Write [{choices!r}]."
                )
    return dict(given)


class ExpectedRows:
    """The rows and the waiting ids that tables are expected to have, over all ranks."""

    def __init__(
        self, constraints: Mapping[str, ParameterConstraints], rows: Mapping[str, int]
    ) -> None:
        self._constraints, self._rows = constraints, rows

    def rows(self, name: str, limit: int) -> int:
        """Returns the expected rows of a table; ValueError if the user expects more than its limit."""
        measured = self._constraints.get(name)
        rows = measured.expected_rows if isinstance(measured, MeasuredConstraints) else None
        # Measured rows times growth may exceed the limit; the rows of the table cannot.
        expected = self._rows.get(name, limit if rows is None else min(rows, limit))
        if expected > limit:
            raise ValueError(
                f"DynamicStorageEstimator.expected_rows['{name}']: expected at most "
                f"num_embeddings={limit}, got {expected}. Raise num_embeddings."
            )
        return expected

    def waiting(self, name: str) -> int | None:
        """Returns the expected waiting ids of a table; None: unknown."""
        measured = self._constraints.get(name)
        return measured.expected_counters if isinstance(measured, MeasuredConstraints) else None


def checked_rows(expected_rows: object) -> dict[str, int]:
    """Returns the rows by table name that a user expects."""
    where = "DynamicStorageEstimator.expected_rows"
    if expected_rows is not None and not isinstance(expected_rows, Mapping):
        raise ValueError(
            f"{where}: expected a dict of numbers by table name, got {expected_rows!r}. Write {{name: rows}}."
        )
    remedy = "Leave the table out to price it full."
    return {
        name: checked_count(rows, f"{where}['{name}']", 1, remedy)
        for name, rows in (expected_rows or {}).items()
    }


def check_tables(
    model: nn.Module,
    sharders: Iterable[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints],
    expected_rows: Iterable[str],
    device_type: str,
) -> None:
    """Checks what a planner was given against the tables of an unsharded model that it will plan."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    names: set[str] = set()
    for module in model.modules():
        sharder = by_type.get(type(module))
        if sharder is None:
            continue
        tables = list(sharder.shardable_parameters(module))
        names.update(tables)
        if isinstance(without_processors(module), UnshardedCollection):
            kinds = sharder.sharding_types(device_type)
            kernels = sharder.compute_kernels(kinds[0], device_type)
            for name in tables:
                _check_choice(constraints.get(name), name, kinds, kernels)
    unknown = sorted(set(expected_rows) - names)
    if unknown:
        raise ValueError(
            f"make_planner.expected_rows: expected names of tables that the sharders shard, "
            f"{listed(sorted(names))}, got {listed(unknown)}. Correct the names, or leave them out."
        )


def _check_choice(given: Any, name: str, kinds: Sequence[str], kernels: Sequence[str]) -> None:
    where = f"make_planner.constraints['{name}']"
    if given is None:
        return
    if given.sharding_types and not set(given.sharding_types) & set(kinds):
        copies = ShardingType.DATA_PARALLEL.value in given.sharding_types
        reason = " Under data_parallel every rank would have all rows." if copies else ""
        raise ValueError(
            f"{where}: expected sharding_types with one of {', '.join(kinds)}, got "
            f"{given.sharding_types}.{reason} Choose one of those, or a static table."
        )
    if given.compute_kernels and not set(given.compute_kernels) & set(kernels):
        raise ValueError(
            f"{where}: expected compute_kernels with {', '.join(map(repr, kernels))}, got "
            f"{given.compute_kernels}. Leave compute_kernels out, or choose a static table."
        )


def without_processors(module: nn.Module) -> nn.Module:
    """Returns the collection in a feature-processed module; another module as it is."""
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        return module._embedding_bag_collection
    return module


@dataclass(frozen=True)
class PlanLoad:
    """The load of each rank under a plan.

    Attributes:
        bytes: bytes held by the shards of each rank.
        lookups: rows looked up in the shards of each rank in one training forward; a lookup in a column shard
            counts as the shard's fraction of a row.
    """

    bytes: tuple[float, ...]
    lookups: tuple[float, ...]

    @property
    def memory_imbalance(self) -> float:
        """The bytes of the fullest rank divided by the mean; 1 if even."""
        return imbalance(self.bytes)

    @property
    def traffic_imbalance(self) -> float:
        """The lookups of the busiest rank divided by the mean; 1 if even."""
        return imbalance(self.lookups)


def imbalance(loads: Sequence[float]) -> float:
    """Returns the largest load divided by the mean; 1 if there is no load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def load_by_rank(
    plan: ShardingPlan, stats: Mapping[str, Mapping[str, int | float]], ranks: int
) -> PlanLoad:
    """Returns the load of each rank under a plan, from measured stats.

    The present bytes of each table are divided among its shards in proportion to their rows and columns.
    Each column shard has its own id map; the number of id maps is the present number, not that of the plan.

    Args:
        plan: any plan, e.g. the present plan of a model, `model.plan`. Tables without stats are ignored.
        stats: stats by table name, from `read_model_stats`.
        ranks: number of ranks of the plan.

    Raises:
        ValueError: if the plan uses a rank outside [0, ranks), the stats of a table are incomplete, or an
            argument is of another type.
    """
    if not isinstance(plan, ShardingPlan):
        raise ValueError(
            f"load_by_rank.plan: expected a ShardingPlan, got {plan!r}. Pass model.plan, or what a planner's "
            "plan or collective_plan returns."
        )
    check_stats("load_by_rank", stats)
    ranks = checked_count(ranks, "load_by_rank.ranks", 1, "Pass the number of ranks of the plan.")
    held, lookups = [0.0] * ranks, [0.0] * ranks
    for module_plan in plan.plan.values():
        for name, sharding in module_plan.items() if isinstance(module_plan, Mapping) else ():
            if name not in stats:
                continue
            for rank, share in shares_of_ranks(sharding):
                if not 0 <= rank < ranks:
                    raise ValueError(
                        f"load_by_rank.ranks: expected more than {rank}, which holds a shard of '{name}', "
                        f"got {ranks}."
                    )
                held[rank] += share * stats[name]["bytes"]
                lookups[rank] += share * lookups_per_forward(stats[name])
    return PlanLoad(tuple(held), tuple(lookups))


def shares_of_ranks(sharding: ParameterSharding) -> list[tuple[int, float]]:
    """Returns the rank of each shard of a table, and the shard's part of the whole table."""
    shards = sharding.sharding_spec.shards
    columns = [(shard.shard_offsets[1], shard.shard_sizes[1]) for shard in shards]
    row_shards = Counter(columns)
    whole = sum(width for _, width in row_shards)
    # Ids are distributed by their mixed id over all ranks that share the rows; row ranges of the plan have no
    # effect.
    placed = [shard.placement for shard in shards]
    # A plan by hand may lack placements.
    ranks = [place.rank() for place in placed] if all(placed) else list(sharding.ranks or [])
    return [
        (rank, piece[1] / whole / row_shards[piece])
        for rank, piece in zip(ranks, columns, strict=True)
    ]


class EvenLoad(PerfModel):
    """Rates plans by the time of the slowest rank and by the imbalance of memory.

    TorchRec's own performance model uses time only: all placements of equally busy tables have the same
    rating, even if the tables have different sizes.

    Args:
        topology: the devices.
        memory_weight: exponent of the memory imbalance, the bytes of the fullest rank divided by the mean. 0:
            as in TorchRec's model. 1: a plan with twice the imbalance has the same rating if it is twice as
            fast.

    Raises:
        ValueError: if `memory_weight` is negative or not a finite number.
    """

    def __init__(self, topology: Topology, memory_weight: float = 0.5) -> None:
        check_number(memory_weight, "EvenLoad.memory_weight", 0, "Pass 0 to rate by time alone.")
        self._ranks: int = topology.world_size
        self._memory_weight = memory_weight

    def rate(self, plan: list[ShardingOption]) -> float:
        """Returns the milliseconds of the slowest rank, multiplied by the weighted imbalance of memory."""
        milliseconds, held = [0.0] * self._ranks, [0.0] * self._ranks
        for option in plan:
            for shard in option.shards:
                milliseconds[shard.rank] += shard.perf.total
                held[shard.rank] += shard.storage.hbm + shard.storage.ddr
        return max(milliseconds) * imbalance(held) ** self._memory_weight
