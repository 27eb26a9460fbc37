"""ADAMW under sharding, beside tables of other rules."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import Case, Table, usual_plan
from sharded_training import Holder, collection_of, sharder_of
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.planner import make_planner, table_bytes

ADAMW = {"optimizer": "ADAMW", "learning_rate": 0.02, "weight_decay": 0.4}
KINDS = ["table_wise", "column_wise", "row_wise"]
IDS = torch.tensor([5, -1])
PLANNERS = {"stock": EmbeddingShardingPlanner, "ours": make_planner}


def chosen_in_backward(planner: str) -> dict[str, Any]:
    """Of three tables one is marked with torch's class, one with its Adam, one left to the sharder."""
    tables = [
        Table(kind, [f"f{i}", "shared"], usual_plan(kind, 8, 2, 2, i))
        for i, kind in enumerate(KINDS)
    ]
    case = Case(tables, fused_params={"optimizer": "adamw", "learning_rate": 0.5})
    collection = collection_of(case)
    marks: list[tuple[str, Any, dict[str, Any]]] = [
        ("table_wise", torch.optim.AdamW, {"lr": 0.25, "betas": (0.5, 0.5), "weight_decay": 0.0}),
        ("column_wise", torch.optim.Adam, {"lr": 0.125}),
    ]
    for name, kind, options in marks:
        apply_optimizer_in_backward(kind, [collection.embedding_bags[name].weight], options)
    constraints = {
        kind: ParameterConstraints(sharding_types=[kind], min_partition=4) for kind in KINDS
    }
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    plan = PLANNERS[planner](topology=topology, constraints=constraints).collective_plan(
        Holder(collection), [sharder_of(case)], dist.group.WORLD
    )
    model: Any = DistributedModelParallel(
        Holder(collection), plan=plan, sharders=[sharder_of(case)]
    )
    features = KeyedJaggedTensor(
        ["f0", "f1", "f2", "shared"], IDS.repeat(4), lengths=torch.ones(8, dtype=torch.int64)
    )
    model(features).values().sum().backward()
    shards = model.module.collection._shards._tables
    rates = sorted(group["lr"] for group in model.fused_optimizer.param_groups)
    return {"rates": rates, **{name: shards[name][0].optimizer for name in KINDS if shards[name]}}


@pytest.mark.parametrize("planner", PLANNERS)
def test_tables_of_several_rules_are_grouped_apart(planner: str) -> None:
    adamw = RowOptimizer(
        OptimizerKind.ADAMW, 0.25, beta1=0.5, beta2=0.5
    )  # the decay is named: none
    expected = {
        "table_wise": adamw,
        "column_wise": RowOptimizer(OptimizerKind.ADAM, 0.125),
        "row_wise": RowOptimizer(OptimizerKind.ADAMW, 0.5, weight_decay=0.01),
    }
    answers = workers.run(chosen_in_backward, planner, world_size=2)
    found: dict[str, Any] = {}
    for answer in answers:
        assert set(answer.pop("rates")) <= {0.125, 0.25, 0.5}
        found |= answer
        assert all(answer[name] == expected[name] for name in answer)
    assert found.keys() == expected.keys()


def test_a_shard_is_priced_with_two_moments() -> None:
    rule = RowOptimizer.from_fused_params(ADAMW, "here")
    plain = table_bytes(1000, 8, torch.float32, RowOptimizer())
    assert table_bytes(1000, 8, torch.float32, rule) - plain == 1000 * 2 * 8 * 4
