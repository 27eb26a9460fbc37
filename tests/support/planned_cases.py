"""Topologies, and the sharding options that TorchRec's planner enumerates for a module."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption

SEQUENCE = ["table_wise", "row_wise", "column_wise"]
POOLED = [*SEQUENCE, "table_row_wise", "table_column_wise", "grid_shard"]


def topology(device: str = "cpu", **changes: Any) -> Topology:
    """Returns a topology; by default two nodes of two ranks."""
    given = {"world_size": 4, "local_world_size": 2, "compute_device": device}
    return Topology(**{**given, **changes})


def options(
    estimator: Any, module: nn.Module, sharder: Any, constraints: Any = None, device: str = "cpu"
) -> dict[tuple[str, str], ShardingOption]:
    """Returns the options of a module in its device's memory by table and type, priced by `estimator`."""
    enumerator = EmbeddingEnumerator(topology(device), 128, constraints, estimator)
    found = enumerator.enumerate(module, [sharder])
    return {
        (option.name, option.sharding_type): option
        for option in found
        if option.compute_kernel == "fused"
    }
