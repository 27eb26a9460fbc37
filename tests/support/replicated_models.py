"""Models sharded over two groups of ranks, as replicas, and static twins that are averaged by position."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from sharded_cases import Case, Table, usual_plan
from sharded_training import Holder, collection_of, configs_of, sharder_of, tables_of
from table_cases import same_state
from torch.distributed.remote_device import _remote_device
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingPlan

import torchrec_dyn as dyn

FUSED = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
START = 0.25  # of every weight
PLANS = ("row_wise", "column_wise", "table_wise")


@cache
def sharding_groups() -> list[dist.ProcessGroup]:
    """Returns the groups of even and of odd ranks: TorchRec orders them so. Collective."""
    world = dist.get_world_size()
    return [dist.new_group([*range(first, world, 2)]) for first in range(2)]  # type: ignore[misc]


@cache
def replica_groups() -> list[dist.ProcessGroup]:
    """Returns the groups of the ranks that hold the same ids. Collective."""
    places = dist.get_world_size() // 2
    return [dist.new_group([2 * place, 2 * place + 1]) for place in range(places)]  # type: ignore[misc]


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


def _sharded(collection: Any, plan: dict[str, Any], sharder: Any) -> Any:
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
    return _sharded(collection_of(case), plan, sharder_of(case))


def static_twin_of(case: Case) -> Any:
    """Returns static tables of the same configs and plan, whose weights are START."""
    configs = configs_of(case)
    for config in configs:
        config.init_fn = partial(torch.nn.init.constant_, val=START)
    return _sharded(
        EmbeddingBagCollection(configs, device=torch.device("meta")),
        {one.name: _in_group(one.plan) for one in case.tables},
        EmbeddingBagCollectionSharder(fused_params=FUSED),
    )


def _in_group(plan: ParameterSharding) -> ParameterSharding:
    """Returns a plan whose placements are ranks of the job, as static tables want them."""
    ranks = dist.get_process_group_ranks(sharding_groups()[dist.get_rank() % 2])
    placed = copy.deepcopy(plan)
    assert placed.sharding_spec is not None and placed.ranks is not None
    for shard, rank in zip(placed.sharding_spec.shards, placed.ranks, strict=True):  # type: ignore[attr-defined]
        shard.placement = _remote_device(f"rank:{ranks[rank]}/cpu")
    return placed


def average_static(model: torch.nn.Module) -> int:
    """Averages weights and Adagrad's sums over the replicas, as DMPCollection does. Returns their bytes."""
    group, count = replica_groups()[dist.get_rank() // 2], 0
    lookups = [one for module in model.modules() for one in getattr(module, "_lookups", ())]
    for module in [module for lookup in lookups for module in lookup.modules()]:
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
            sums = [state["sum"] for state in module.get_optimizer_state()]
            for tensor in [*module.split_embedding_weights(), *sums]:
                dist.all_reduce(tensor.data, group=group)
                tensor.data.div_(2)
                count += tensor.nbytes
    assert count, "the kernels of the static tables were not found"
    return count


def batch_of(case: Case, seed: int, ids: int = 40, rank: int | None = None) -> KeyedJaggedTensor:
    """Returns four bags a feature of this rank, of up to three ids below a number."""
    rank = dist.get_rank() if rank is None else rank
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    lengths = torch.randint(0, 4, (4 * len(case.tables),), generator=draw)
    values = torch.randint(0, ids, (int(lengths.sum()),), generator=draw)
    keys = [table.features[0] for table in case.tables]
    return KeyedJaggedTensor(keys, values, lengths=lengths)


def train(model: torch.nn.Module, batch: KeyedJaggedTensor) -> torch.Tensor:
    """Runs one step; returns the output."""
    output = model(batch).values()
    (output * output.detach() + output).sum().backward()
    return output.detach()


def shards_of(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the contents of this rank's shards, by table and first column."""
    return {
        f"{shard.name}.{shard.first_column}": shard.export_state()
        for shard in tables_of(model.module.collection)
    }


def assert_replicas_are_equal(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Asserts that this rank has what the other replica has, bit for bit, and returns it. Collective."""
    mine, both = shards_of(model), [None, None]
    dist.all_gather_object(both, mine, group=replica_groups()[dist.get_rank() // 2])
    for theirs in both:
        assert theirs is not None and theirs.keys() == mine.keys()
        for name, state in mine.items():
            assert same_state(state, theirs[name]), name
    return mine


def with_constant(**options: Any) -> dyn.DynamicTableConfig:
    """Returns a config whose rows start with START."""
    return dyn.DynamicTableConfig(initializer=dyn.Constant(START), unseen="initial", **options)
