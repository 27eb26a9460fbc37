"""Sharding plans: the options, a call of TorchRec's planner, and a plan as text."""

from __future__ import annotations

import textwrap
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

TYPES = [
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.GRID_SHARD.value,
]
CHOICES = [*TYPES, "mixed", "auto"]
CPU = torch.device("cpu")
SCREEN = 100  # columns of the text output


def make_plan(
    choice: str,
    model: nn.Module,
    sharders: list[ModuleSharder],
    tables: list[str],
    dim: int,
    batch_size: int,
    device: torch.device = CPU,
) -> ShardingPlan:
    """Returns a plan of TorchRec's planner. Collective.

    Args:
        choice: a sharding type for all tables; "mixed" for table-, row- and column-wise in turn;
            "auto" if the planner also chooses the types.
        model: the model with the tables.
        sharders: sharders of the modules in `model`.
        tables: names of the tables.
        dim: embedding dimension of the tables; column-wise types cut it into halves.
        batch_size: clicks per rank.
        device: device of this rank.
    """
    types = TYPES[:3] if choice == "mixed" else [choice]
    constraints = {
        table: ParameterConstraints(
            sharding_types=[types[position % len(types)]], min_partition=max(dim // 2, 1)
        )
        for position, table in enumerate(tables)
    }
    world_size = dist.get_world_size()
    # The planner takes a GPU for one with 32 GB, so it is told.
    memory = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size,
            local_world_size=get_local_size(world_size),
            compute_device=device.type,
            hbm_cap=memory,
        ),
        batch_size=batch_size,
        constraints=None if choice == "auto" else constraints,
    )
    return planner.collective_plan(model, sharders, dist.group.WORLD)


def tables_of(plan: ShardingPlan) -> dict[str, ParameterSharding]:
    """Returns the sharding of each table of the plan, by the table's name."""
    return {
        table: sharding
        for module_plan in plan.plan.values()
        if isinstance(module_plan, EmbeddingModuleShardingPlan)
        for table, sharding in module_plan.items()
    }


def ranks_of_all_rows(sharding: ParameterSharding) -> set[int]:
    """Returns the ranks that hold the table's first column. Their rows together are the table's rows.

    The other column shards hold the same ids again.
    """
    return {
        shard.placement.rank()
        for shard in sharding.sharding_spec.shards
        if shard.shard_offsets[1] == 0
    }


def plan_as_text(plan: ShardingPlan) -> str:
    """Returns the plan as text. Tables with the same sharding share a line."""
    alike = defaultdict(list)
    for table, sharding in tables_of(plan).items():
        shards = sharding.sharding_spec.shards
        ranks = " ".join(str(shard.placement.rank()) for shard in shards)
        columns = " ".join(str(shard.shard_sizes[1]) for shard in shards)
        alike[sharding.sharding_type, ranks, columns].append(table)
    lines = [("sharding", "ranks", "columns", "tables")]
    lines += [(*how, " ".join(tables)) for how, tables in sorted(alike.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    indent = sum(widths) + 2 * len(widths)
    return "\n".join(
        "".join(f"{cell:<{width + 2}}" for cell, width in zip(line, widths, strict=False))
        + f"\n{'':{indent}}".join(textwrap.wrap(line[3], SCREEN - indent))
        for line in lines
    )
