"""TorchRec's planner, with storage priced by the allocations of dynamic tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.types import ShardEstimator

from torchrec_dyn.planner.balance import EvenLoad
from torchrec_dyn.planner.measured import MeasuredConstraints
from torchrec_dyn.planner.storage import DynamicStorageEstimator


def make_planner(
    topology: Topology,
    batch_size: int = BATCH_SIZE,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    expected_rows: Mapping[str, int] | None = None,
    **options: Any,
) -> EmbeddingShardingPlanner:
    """Returns TorchRec's planner, with storage priced by DynamicStorageEstimator.

    Plans are rated by their slowest rank, as in TorchRec. With measured constraints (`constraints_from`)
    they are also rated by their fullest rank, see EvenLoad.

    Args:
        topology: the devices.
        batch_size: samples per rank.
        constraints: constraints by table name. GRID is offered only for tables whose constraints name it.
        expected_rows: expected rows by table name, see DynamicStorageEstimator.
        **options: other arguments of EmbeddingShardingPlanner, except `enumerator`.
    """
    by_table = None if constraints is None else dict(constraints)
    if any(isinstance(one, MeasuredConstraints) for one in (by_table or {}).values()):
        options.setdefault("performance_model", EvenLoad(topology))
    estimators: list[ShardEstimator] = [
        EmbeddingPerfEstimator(topology, by_table),
        DynamicStorageEstimator(topology, by_table, expected_rows=expected_rows),
    ]
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=EmbeddingEnumerator(topology, batch_size, by_table, estimators),
        constraints=by_table,
        **options,
    )
