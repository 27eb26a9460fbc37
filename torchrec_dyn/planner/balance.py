"""Memory and traffic of each rank under a plan, and a rating of plans that counts both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PerfModel, ShardingOption
from torchrec.distributed.types import ParameterSharding, ShardingPlan

from torchrec_dyn.planner.measured import (
    check_number,
    check_stats,
    check_stats_of_table,
    checked_count,
    lookups_per_forward,
)


@dataclass(frozen=True)
class PlanLoad:
    """The load of each rank under a plan.

    Attributes:
        bytes: bytes held by the shards of each rank.
        lookups: rows looked up in the shards of each rank in one training forward; a lookup in a column
            shard counts as the shard's part of a row.
    """

    bytes: tuple[float, ...]
    lookups: tuple[float, ...]

    @property
    def memory_imbalance(self) -> float:
        """The bytes of the fullest rank divided by the mean; 1 is even."""
        return imbalance(self.bytes)

    @property
    def traffic_imbalance(self) -> float:
        """The lookups of the busiest rank divided by the mean; 1 is even."""
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
    Each column shard has its own id map; the number of id maps is taken as at present, not as in the plan.

    Args:
        plan: any plan, or the present plan of a model, `model.plan`. Tables without stats are ignored.
        stats: stats by table name, from `read_model_stats`.
        ranks: number of ranks of the plan.

    Raises:
        ValueError: if the plan uses a rank outside of [0, ranks), a table's stats are incomplete, or an
            argument is something else.
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
            check_stats_of_table("load_by_rank", name, stats[name])
            for rank, share in _shares(sharding):
                if not 0 <= rank < ranks:
                    raise ValueError(
                        f"load_by_rank.ranks: expected more than {rank}, which holds a shard of '{name}', "
                        f"got {ranks}."
                    )
                held[rank] += share * stats[name]["bytes"]
                lookups[rank] += share * lookups_per_forward(stats[name])
    return PlanLoad(tuple(held), tuple(lookups))


def _shares(sharding: ParameterSharding) -> list[tuple[int, float]]:
    """Returns the rank of each shard of a table, and the shard's part of the whole table."""
    shards = sharding.sharding_spec.shards
    columns = [(shard.shard_offsets[1], shard.shard_sizes[1]) for shard in shards]
    row_shards = Counter(columns)
    whole = sum(width for _, width in row_shards)
    # Ids are distributed by their mixed id over all ranks that share the rows; row ranges of the plan have no
    # effect.
    return [
        (shard.placement.rank(), piece[1] / whole / row_shards[piece])
        for shard, piece in zip(shards, columns, strict=True)
    ]


class EvenLoad(PerfModel):
    """A rating of plans by the time of the slowest rank and by the imbalance of memory.

    TorchRec's own model uses time only: it rates all placements of equally busy tables the same, even if
    the tables have different sizes.

    Args:
        topology: the devices.
        memory_weight: exponent of the memory imbalance, the fullest rank divided by the mean. 0 is TorchRec's
            model. With 1, a plan with twice the imbalance has the same rating if it is twice as fast.

    Raises:
        ValueError: if the weight is negative, or no finite number.
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
                assert (
                    shard.rank is not None and shard.perf is not None and shard.storage is not None
                )
                milliseconds[shard.rank] += shard.perf.total
                held[shard.rank] += shard.storage.hbm + shard.storage.ddr
        return max(milliseconds) * imbalance(held) ** self._memory_weight
