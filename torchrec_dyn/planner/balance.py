"""Memory and traffic of each rank under a plan, and a rating of plans that counts both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PerfModel, ShardingOption
from torchrec.distributed.types import ParameterSharding, ShardingPlan

from torchrec_dyn.planner.measured import check_stats, lookups_per_forward


@dataclass(frozen=True)
class PlanLoad:
    """The load of each rank under a plan.

    Attributes:
        bytes: held by its shards.
        lookups: rows looked up in its shards in a training forward; a column shard counts its part of a row.
    """

    bytes: tuple[float, ...]
    lookups: tuple[float, ...]

    @property
    def memory_imbalance(self) -> float:
        """The fullest rank's bytes over the mean; 1 is even."""
        return imbalance(self.bytes)

    @property
    def traffic_imbalance(self) -> float:
        """The busiest rank's lookups over the mean; 1 is even."""
        return imbalance(self.lookups)


def imbalance(loads: Sequence[float]) -> float:
    """Returns the largest over the mean, 1 where there is no load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def load_by_rank(
    plan: ShardingPlan, stats: Mapping[str, Mapping[str, int | float]], ranks: int
) -> PlanLoad:
    """Returns the load of each rank under a plan, from measured stats.

    Bytes are those that the tables hold now, spread as the plan cuts rows and columns. The id maps, of which
    each column shard has its own, are counted as many times as now.

    Args:
        plan: one to judge, or a model's own, `model.plan`. Tables that `stats` lacks are left out.
        stats: by table name, of `read_model_stats`.
        ranks: number of ranks of the plan.

    Raises:
        ValueError: if the plan names another rank, or a table's stats are incomplete.
    """
    held, lookups = [0.0] * ranks, [0.0] * ranks
    for of_module in plan.plan.values():
        for name, sharding in of_module.items() if isinstance(of_module, Mapping) else ():
            if name not in stats:
                continue
            check_stats("load_by_rank", name, stats[name])
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
    """Returns the rank of each shard of a table and the part of the whole table in it."""
    shards = sharding.sharding_spec.shards
    columns = [(shard.shard_offsets[1], shard.shard_sizes[1]) for shard in shards]
    whole = sum(width for _, width in set(columns))
    # Ids are spread by their hash over all ranks that share the rows, whatever rows the plan says.
    return [
        (shard.placement.rank(), piece[1] / whole / columns.count(piece))
        for shard, piece in zip(shards, columns, strict=True)
    ]


class EvenLoad(PerfModel):
    """Rates a plan by its slowest rank, and worse the fuller its fullest rank is against the mean.

    TorchRec's own model counts time alone: it rates all spreads of equally busy tables the same, however
    their sizes differ.

    Args:
        topology: the devices.
        memory_weight: the exponent of the fullest rank's share of the mean. 0 is TorchRec's model; with
            1 a plan twice as uneven in memory must be twice as fast.

    Raises:
        ValueError: if the weight is negative.
    """

    def __init__(self, topology: Topology, memory_weight: float = 0.5) -> None:
        if not memory_weight >= 0:
            raise ValueError(f"EvenLoad.memory_weight: expected 0 or more, got {memory_weight}.")
        self._ranks: int = topology.world_size
        self._memory_weight = memory_weight

    def rate(self, plan: list[ShardingOption]) -> float:
        """Returns milliseconds of the slowest rank, times the weighted imbalance of memory."""
        milliseconds, held = [0.0] * self._ranks, [0.0] * self._ranks
        for option in plan:
            for shard in option.shards:
                assert (
                    shard.rank is not None and shard.perf is not None and shard.storage is not None
                )
                milliseconds[shard.rank] += shard.perf.total
                held[shard.rank] += shard.storage.hbm + shard.storage.ddr
        return max(milliseconds) * imbalance(held) ** self._memory_weight
