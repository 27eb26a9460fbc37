"""`without_data_parallel`: dynamic tables of a plan for static ones are placed by TorchRec's partitioner."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from planned_cases import topology
from sharded_cases import Case, Table, shard_by_hand, usual_plan
from sharded_training import Holder, check_trains_as_unsharded, collection_of, shard, sharder_of
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ParameterSharding, ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import torchrec_dyn as dyn
from torchrec_dyn.planner import DynamicStorageEstimator, without_data_parallel

COPIED = ParameterSharding("data_parallel", "dense", [0, 1], None)


def case_of(plans: dict[str, ParameterSharding], **options: Any) -> Case:
    return Case([Table(name, [f"f_{name}"], plan) for name, plan in plans.items()], **options)


def turned(case: Case, ranks: int = 4, **options: Any) -> dict[str, ParameterSharding]:
    """The plan of the tables of a case, without copies."""
    plan = ShardingPlan({"collection": {table.name: table.plan for table in case.tables}})
    devices = topology(world_size=ranks, local_world_size=min(ranks, 2), **options.pop("room", {}))
    made = without_data_parallel(
        plan, Holder(collection_of(case)), [sharder_of(case)], devices, **options
    )
    return made.plan["collection"]  # type: ignore[return-value]


@pytest.mark.parametrize("pooled", [True, False])
def test_tables_are_spread_evenly(pooled: bool) -> None:
    plans = turned(case_of({f"t{i}": COPIED for i in range(8)}, pooled=pooled))
    assert {plan.sharding_type for plan in plans.values()} == {"table_wise"}
    assert Counter(plan.ranks[0] for plan in plans.values()) == dict.fromkeys(range(4), 2)
    for plan in plans.values():
        (piece,) = plan.sharding_spec.shards
        assert (piece.shard_offsets, piece.shard_sizes) == ([0, 0], [1000, 8])
        assert piece.placement.rank() == plan.ranks[0] and plan.compute_kernel == "fused"


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "table_row_wise", "grid_shard"])
def test_other_tables_stay_and_count(kind: str) -> None:
    """Ranks 0 and 1 have a table each, or halves of two tables: the others get what was copied."""
    fixed = {
        "table_wise": [([0], 0, 8)], "column_wise": [([0], 0, 4), ([1], 4, 4)],
        "table_row_wise": [([0, 1], 0, 8)], "grid_shard": [([0, 1], 0, 4), ([0, 1], 4, 4)],
    }[kind]  # fmt: skip
    stays = shard_by_hand(kind, fixed)
    plans = turned(case_of({"a": COPIED, "stays": stays, "b": COPIED, "c": stays}))
    assert {plans[name].ranks[0] for name in "ab"} <= (
        {1, 2, 3} if kind == "table_wise" else {2, 3}
    )
    assert plans["a"].ranks != plans["b"].ranks
    assert plans["stays"] == plans["c"] == stays


def test_a_rank_without_room_gets_nothing() -> None:
    """Rank 1 has less work, but a table so large that no other fits beside it."""
    small, on_one = shard_by_hand("table_wise", [([0], 0, 8)]), ([1], 0, 8)
    case = case_of({"a": COPIED, "b": small, "c": small})
    case.tables.append(
        Table("big", ["f_big"], shard_by_hand("table_wise", [on_one], 10**6), rows=10**6)
    )
    reserve = FixedPercentageStorageReservation(percentage=0.0)
    assert turned(case, 2, storage_reservation=reserve)["a"].ranks == [1]
    priced = EmbeddingEnumerator(topology(), 512, None, DynamicStorageEstimator(topology()))
    options = priced.enumerate(Holder(collection_of(case)), [sharder_of(case)])
    held = {o.name: o.total_storage.ddr for o in options if o.sharding_type == "table_wise"}
    tight = {"storage_reservation": reserve, "room": {"ddr_cap": held["big"] + held["a"] // 2}}
    assert turned(case, 2, **tight)["a"].ranks == [0]
    case.tables[1] = replace(case.tables[3], name="big too", features=["f_too"])
    case.tables[1].plan = shard_by_hand("table_wise", [([0], 0, 8)], 10**6)
    with pytest.raises(PlannerError, match="Couldn't find a rank"):
        turned(case, 2, **tight)


def mixed() -> tuple[nn.ModuleDict, ShardingPlan]:
    """A model of dynamic, processed and static tables, with a plan that copies them all."""

    def config(name: str) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name, embedding_dim=8, num_embeddings=99, feature_names=[name]
        )

    processed = FeatureProcessedEmbeddingBagCollection(
        dyn.DynamicEmbeddingBagCollection([config("user")], is_weighted=True),
        PositionWeightedModuleCollection({"user": 2}),
    )
    static = EmbeddingBagCollection([config("item")], device=torch.device("meta"))
    plain = dyn.DynamicEmbeddingBagCollection([config("shop")])
    model = nn.ModuleDict({"processed": processed, "static": static, "plain": plain})
    names = {"processed": "user", "static": "item", "plain": "shop"}
    return model, ShardingPlan({path: {name: COPIED} for path, name in names.items()})


def test_static_tables_stay_copied_and_the_plan_is_not_changed() -> None:
    model, plan = mixed()
    before = copy.deepcopy(plan)
    made = without_data_parallel(plan, model, dyn.default_sharders(), topology()).plan
    assert made["processed"]["user"].sharding_type == made["plain"]["shop"].sharding_type
    assert made["plain"]["shop"].sharding_type == "table_wise"
    assert made["processed"]["user"].ranks != made["plain"]["shop"].ranks
    assert made["static"]["item"] is COPIED
    assert plan == before


def test_constraints_and_expected_rows_count() -> None:
    """A table that is looked up a hundred times as often has a rank of its own."""
    case = case_of({f"t{i}": COPIED for i in range(5)})
    often = {"t3": ParameterConstraints(sharding_types=["data_parallel"], pooling_factors=[100.0])}
    plans = turned(case, constraints=often)
    assert [name for name in plans if plans[name].ranks == plans["t3"].ranks] == ["t3"]
    with pytest.raises(ValueError, match=r"expected_rows: expected names of tables"):
        turned(case, expected_rows={"t9": 3})


def wrong(what: str) -> Any:
    model, plan = mixed()
    given: list[Any] = [plan, model, dyn.default_sharders(), topology(world_size=2)]
    if what == "plan":
        given[0] = plan.plan
    elif what == "topology":
        given[3] = 4
    elif what == "table":
        plan.plan["plain"]["other"] = COPIED
    elif what == "path":
        plan.plan["elsewhere"] = {"shop": COPIED}
    elif what == "sharders":
        given[2] = [dyn.DynamicEmbeddingBagCollectionSharder()]
    elif what == "rank":
        plan.plan["plain"]["shop"] = shard_by_hand("table_wise", [([2], 0, 8)], 99)
    return given


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("plan", r"\.plan: expected a ShardingPlan, got \{"),
        ("topology", r"\.topology: expected a Topology, got 4"),
        ("table", r"\.plan: expected tables of module 'plain' .*\['shop'\], got \['other'\]"),
        ("path", r"\.plan: expected paths of modules of ModuleDict, got 'elsewhere'"),
        ("sharders", r"\.plan: expected tables of module '(processed|static)' .*\[\], got"),
        ("rank", r"\.topology: expected more than 2 ranks, since rank 2 has .*'shop', got 2"),
    ],
)
def test_errors(what: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^without_data_parallel{text}"):
        without_data_parallel(*wrong(what))


def train_a_plan_of_static_tables(pooled: bool) -> list[str]:
    """In the workers: TorchRec's plan of static tables is refused; made table-wise, it trains."""
    usual = usual_plan("row_wise", 8, 2, 2)
    case = case_of({"a": COPIED, "b": usual, "c": COPIED}, pooled=pooled)
    constraints = {
        table.name: ParameterConstraints(sharding_types=[table.plan.sharding_type])
        for table in case.tables
    }
    devices = topology(world_size=2)
    plan = ShardingPlan({"collection": {table.name: table.plan for table in case.tables}})
    if pooled:  # TorchRec plans no copies of sequence tables on CPUs
        static = Holder(collection_of(case, is_static=True, device=torch.device("meta")))
        constraints.pop("b")
        planner = EmbeddingShardingPlanner(topology=devices, constraints=constraints)
        plan = planner.collective_plan(static, None, dist.group.WORLD)
    model, sharders = Holder(collection_of(case)), [sharder_of(case)]
    with pytest.raises(ValueError, match=r"planner\.without_data_parallel makes a plan table-wise"):
        DistributedModelParallel(copy.deepcopy(model), plan=plan, sharders=sharders)
    made = without_data_parallel(plan, model, sharders, devices)
    for table in case.tables:
        table.plan = made.plan["collection"][table.name]  # type: ignore[index]
    case.exact = not pooled
    check_trains_as_unsharded(case)
    with pytest.raises(ValueError, match="without_data_parallel"):
        sharded = shard(case, collection_of(case))
        sharders[0].reshard(sharded.module.collection, {"a": COPIED}, sharded._env, sharded.device)
    return [f"{table.name} {table.plan.ranks}" for table in case.tables]


@pytest.mark.parametrize("pooled", [True, False])
def test_a_plan_of_static_tables_trains_dynamic_ones(pooled: bool) -> None:
    first, second = workers.run(train_a_plan_of_static_tables, pooled, world_size=2)
    assert first == second
