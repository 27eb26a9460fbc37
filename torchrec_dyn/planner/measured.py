"""Constraints for TorchRec's planner from the stats of a running model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.types import hash_sha256_to_int

from torchrec_dyn.distributed import Stats
from torchrec_dyn.modules import UnshardedCollection
from torchrec_dyn.whole_model import Collection, collections_of, read_stats, table_names

_NEEDED = ("rows", "waiting", "ids_seen", "forwards", "features", "ranks")


@dataclass
class MeasuredConstraints(ParameterConstraints):
    """TorchRec's constraints on a table, and its expected size.

    The stock planner ignores the expected size; DynamicStorageEstimator prices it.

    Attributes:
        expected_rows: ids that will have a row, over all ranks; None: as many as the limit.
        expected_counters: ids that will wait for admission, over all ranks; None: as many as may.
    """

    expected_rows: int | None = None
    expected_counters: int | None = None

    def __hash__(self) -> int:
        return hash_sha256_to_int([super().__hash__(), self.expected_rows, self.expected_counters])


def read_model_stats(model: nn.Module) -> dict[str, Stats]:
    """Returns the stats of every dynamic table of a model, the same on every rank. Collective if sharded.

    Args:
        model: a model with dynamic collections, or a collection; DistributedModelParallel or not.

    Returns:
        By table name the stats of `torchrec_dyn.read_stats`, and `features`, the number of features that
        read the table, and `ranks`, the number of ranks with batches.

    Raises:
        ValueError: if the model has no dynamic collection, or two tables with one name.
    """
    found: dict[str, Stats] = {}
    for _, module in collections_of(model, "read_model_stats"):
        features, ranks = _features_and_ranks(module)
        for name, count in features.items():
            if name in found:
                raise ValueError(
                    f"read_model_stats: expected tables of different names, got two named '{name}'. "
                    "Ask for the collections one by one."
                )
            found[name] = read_stats(module, name) | {"features": count, "ranks": ranks}
    return found


def constraints_from(
    stats: Mapping[str, Mapping[str, int | float]],
    batch_size: int,
    growth: float = 1.5,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> dict[str, ParameterConstraints]:
    """Makes constraints from measured stats, so that a plan weighs tables by their true load.

    A table's ids per sample become its `pooling_factors`; they are counted per table, so all its features
    get the same. Its rows, and its ids that wait for admission, times `growth` become the numbers that
    `make_planner` prices, up to the table's limit.

    Args:
        stats: by table name, of `read_model_stats`.
        batch_size: samples per rank and forward while they were counted.
        growth: rows to plan for, as a multiple of the present rows.
        constraints: yours, by table name. All their other fields are kept; their `num_poolings` and
            `batch_sizes` enter the pooling factors. Constraints on tables that `stats` lacks do not change.

    Raises:
        ValueError: if an argument is out of its range, stats are missing, or a table has not trained
            since it was made.
    """
    if not batch_size >= 1:
        raise ValueError(f"constraints_from.batch_size: expected 1 or more, got {batch_size}.")
    if not 1 <= growth < math.inf:
        raise ValueError(f"constraints_from.growth: expected a number from 1 on, got {growth}.")
    given = dict(constraints or {})
    for name, seen in stats.items():
        given[name] = _measured(name, seen, batch_size, growth, given.get(name))
    return given


def lookups_per_forward(stats: Mapping[str, int | float]) -> float:
    """Returns the ids that all ranks look up in a table in one training forward."""
    return stats["ids_seen"] / stats["forwards"]


def check_stats(where: str, name: str, stats: Mapping[str, int | float]) -> None:
    """Raises ValueError unless a table's stats are complete and count at least one training forward.

    Args:
        where: the call, for messages.
        name: of the table.
        stats: of the table.
    """
    if missing := [one for one in _NEEDED if one not in stats]:
        raise ValueError(
            f"{where}.stats['{name}']: expected the stats of read_model_stats, got none named {missing}. "
            "Pass stats=read_model_stats(model)."
        )
    if stats["forwards"] < 1:
        raise ValueError(
            f"{where}.stats['{name}']: expected a table that has trained since it was made, got "
            "0 forwards. Train some batches first; leave out a table that is frozen or unused."
        )


def _measured(
    name: str,
    stats: Mapping[str, int | float],
    batch_size: int,
    growth: float,
    given: ParameterConstraints | None,
) -> MeasuredConstraints:
    check_stats("constraints_from", name, stats)
    features = int(stats["features"])
    kept = (
        {one.name: getattr(given, one.name) for one in fields(ParameterConstraints)}
        if given
        else {}
    )
    poolings = kept.get("num_poolings") or [1.0] * features
    batch_sizes = kept.get("batch_sizes") or [batch_size] * features
    if not len(poolings) == len(batch_sizes) == features:
        raise ValueError(
            f"constraints_from.constraints['{name}']: expected num_poolings and batch_sizes for each of "
            f"{features} features, got {len(poolings)} and {len(batch_sizes)}."
        )
    # The planner sums the products of these three: that must be the ids of one rank in a forward.
    bags = sum(count * size for count, size in zip(poolings, batch_sizes, strict=True))
    if not bags > 0:
        raise ValueError(
            f"constraints_from.constraints['{name}']: expected num_poolings and batch_sizes of some bags, "
            f"got {poolings} and {batch_sizes}."
        )
    ids_a_bag = lookups_per_forward(stats) / stats["ranks"] / bags
    return MeasuredConstraints(
        **(kept | {"pooling_factors": [ids_a_bag] * features}),
        expected_rows=max(1, math.ceil(stats["rows"] * growth)),
        expected_counters=math.ceil(stats["waiting"] * growth),
    )


def _features_and_ranks(collection: Collection) -> tuple[dict[str, int], int]:
    """Returns the number of features of each table, and the number of ranks with batches."""
    if isinstance(collection, UnshardedCollection):
        configs = [table.config for table in collection.unsharded_lookup.tables]
        return {config.name: len(config.feature_names) for config in configs}, 1
    features = {name: len(collection.table(name).features) for name in table_names(collection)}
    # Under 2D parallelism the ranks of one copy: only their batches reach it.
    return features, collection._env.world_size
