"""Models sharded over two groups of ranks, as replicas."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, usual_plan
from sharded_training import Holder, collection_of, sharder_of, tables_of
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import torchrec_dyn as dyn

FUSED = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
PLANS = ("row_wise", "column_wise", "table_wise")


@cache
def sharding_groups() -> list[dist.ProcessGroup]:
    """Returns the groups of even and of odd ranks: TorchRec orders them so. Collective."""
    world = dist.get_world_size()
    return [dist.new_group([*range(first, world, 2)]) for first in range(2)]  # type: ignore[misc]


def case_of(configs: dict[str, dyn.DynamicTableConfig | None], rows: int = 40) -> Case:
    """Returns tables under row-wise, column-wise and table-wise plans over the ranks of one group."""
    places = dist.get_world_size() // 2
    tables = [
        Table(
            name,
            [f"f_{name}"],
            usual_plan(PLANS[number % 3], 8, places, places, number, rows),
            rows=rows,
            config=config,
        )
        for number, (name, config) in enumerate(configs.items())
    ]
    return Case(tables, fused_params=FUSED)


def sharded(collection: Any, plan: dict[str, Any], sharder: Any) -> Any:
    """Returns a model of this rank over its sharding group."""
    return DistributedModelParallel(
        Holder(collection),
        env=ShardingEnv.from_process_group(sharding_groups()[dist.get_rank() % 2]),
        device=torch.device("cpu"),
        plan=ShardingPlan({"collection": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )


def replica_of(case: Case) -> Any:
    """Returns the replica of this rank."""
    plan = {table.name: table.plan for table in case.tables}
    return sharded(collection_of(case), plan, sharder_of(case))


def batch_of(case: Case, seed: int, ids: int = 40, rank: int | None = None) -> KeyedJaggedTensor:
    """Returns four bags a feature of this rank, of up to three ids below a number."""
    rank = dist.get_rank() if rank is None else rank
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    lengths = torch.randint(0, 4, (4 * len(case.tables),), generator=draw)
    values = torch.randint(0, ids, (int(lengths.sum()),), generator=draw)
    keys = [table.features[0] for table in case.tables]
    return KeyedJaggedTensor(keys, values, lengths=lengths)


def shards_of(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the contents of this rank's shards, by table and first column."""
    return {
        f"{shard.name}.{shard.first_column}": shard.export_state()
        for shard in tables_of(model.module.collection)
    }
