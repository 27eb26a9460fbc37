"""TorchRec's planner on dynamic collections: what it offers, what it pins, and plans that train."""

import pytest
import torch
import torch.distributed as dist
import workers
from planned_cases import POOLED, SEQUENCE, topology
from sharded_cases import SPREAD_ROWS, Case, Table
from sharded_training import Holder, batches, check_trains_as_unsharded, collection_of, sharder_of
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import DeviceHardware, PlannerError
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_dyn import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingBagCollectionSharder,
    default_sharders,
)
from torchrec_dyn.planner import DynamicStorageEstimator, make_planner

PLANNERS = {"stock": EmbeddingShardingPlanner, "ours": make_planner}


def case_of(pooled=True, tables=1, dim=8, **changes):
    """A case whose tables wait for a plan."""
    named = [Table(f"table_{n}", [f"feature_{n}"], None, dim=dim) for n in range(tables)]
    return Case(named, pooled=pooled, **changes)


def constrained(case, **constraint):
    return {table.name: ParameterConstraints(**constraint) for table in case.tables}


def plan_of(case, planner):
    """The plan of a case's tables, made in this process alone."""
    return planner.plan(Holder(collection_of(case)), [sharder_of(case)]).plan["collection"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("pooled", [True, False])
def test_every_type_is_offered_and_priced(device, pooled):
    case = case_of(pooled)
    every_type = POOLED if pooled else SEQUENCE

    def offered(constraints=None):
        enumerator = EmbeddingEnumerator(topology(device), 64, constraints)
        return enumerator.enumerate(Holder(collection_of(case)), [sharder_of(case)])

    unasked = offered()
    assert {option.sharding_type for option in unasked} == set(every_type) - {"grid_shard"}
    named = offered(constrained(case, sharding_types=every_type))
    assert {option.sharding_type for option in named} == set(every_type)
    for option in unasked + named:
        assert option.total_perf > 0
        memory = option.total_storage
        assert (memory.hbm if device == "cuda" else memory.ddr) > 0
        assert option.is_pooled == pooled


@pytest.mark.parametrize("kind", POOLED)
def test_rows_that_travel_have_their_price(kind):
    """Ten ids a bag: under plans that spread rows, a maximum sends ten rows for each sum."""

    def price_of(pooling):
        case = Case([Table("t", ["f"], None, dim=64, pooling=pooling)])
        constraints = constrained(case, sharding_types=[kind], pooling_factors=[10.0])
        planner = make_planner(topology("cpu"), 64, constraints)
        (option,) = planner.enumerated(Holder(collection_of(case)), [sharder_of(case)])
        return option.total_perf, option.total_storage.ddr

    time, memory = price_of("SUM")
    time_of_max, memory_of_max = price_of("MAX")
    if kind in SPREAD_ROWS:
        assert time_of_max > 1.2 * time and memory_of_max > memory
    else:
        assert (time_of_max, memory_of_max) == (time, memory)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("pooled", "kind"), [(True, kind) for kind in POOLED] + [(False, kind) for kind in SEQUENCE]
)
def test_constraints_pin_the_type(planner, device, pooled, kind):
    case = case_of(pooled, tables=3)
    make = PLANNERS[planner]
    constraints = constrained(case, sharding_types=[kind])
    plan = plan_of(case, make(topology=topology(device), constraints=constraints))
    assert {name: sharding.sharding_type for name, sharding in plan.items()} == dict.fromkeys(
        constraints, kind
    )


@pytest.mark.parametrize("kind", ["column_wise", "table_column_wise", "grid_shard"])
def test_min_partition_gives_the_width_of_column_shards(kind):
    case = case_of(dim=24)
    constraints = constrained(case, sharding_types=[kind], min_partition=8)
    plan = plan_of(case, make_planner(topology(), constraints=constraints))
    shards = plan["table_0"].sharding_spec.shards
    assert sorted({(s.shard_offsets[1], s.shard_sizes[1]) for s in shards}) == [
        (0, 8),
        (8, 8),
        (16, 8),
    ]


def plan_together(planner, constraint, case):
    """In the workers: the plan of a case, the same on every rank."""
    world = dist.get_world_size()
    made = PLANNERS[planner](
        topology=topology(world_size=world, local_world_size=get_local_size(world)),
        constraints=constrained(case, **constraint) if constraint else None,
    )
    model = Holder(collection_of(case))
    plan = made.collective_plan(model, [sharder_of(case)], dist.GroupMember.WORLD)
    of_ranks = [None] * world
    dist.all_gather_object(of_ranks, repr(plan))
    assert len(set(of_ranks)) == 1
    return plan.plan["collection"]


def plan_and_train(planner, constraint, case):
    """In the workers: plans together and trains beside the unsharded collection."""
    for name, sharding in plan_together(planner, constraint, case).items():
        next(table for table in case.tables if table.name == name).plan = sharding
    rows = check_trains_as_unsharded(case)
    return [table.plan.sharding_type for table in case.tables], rows


@pytest.mark.parametrize("kind", POOLED)
def test_a_collective_plan_of_each_pooled_type_trains(kind):
    case = case_of(tables=2, dim=16, exact=False)
    constraint = {"sharding_types": [kind], "min_partition": 8}
    for kinds, _ in workers.run(
        plan_and_train, "ours", constraint, case, world_size=4, local_size=2
    ):
        assert kinds == [kind, kind]


@pytest.mark.parametrize("kind", SEQUENCE)
def test_a_collective_plan_of_each_sequence_type_trains(kind):
    case = case_of(pooled=False, tables=2, dim=16)
    constraint = {"sharding_types": [kind], "min_partition": 8}
    for kinds, _ in workers.run(plan_and_train, "ours", constraint, case, world_size=2):
        assert kinds == [kind, kind]


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_planner_alone_decides_for_26_tables(planner):
    case = case_of(tables=26, dim=16, exact=False, steps=2)
    trained = workers.run(plan_and_train, planner, None, case, world_size=2)
    assert trained[0][0] == trained[1][0]
    assert all(rows > 0 for _, rows in trained), "a rank is left without work"


def train_without_a_plan(case):
    """In the workers: DistributedModelParallel asks the stock planner itself."""
    features = batches(case, 0)[0][dist.get_rank()]
    collection = collection_of(case)
    model = DistributedModelParallel(Holder(collection), sharders=[sharder_of(case)])
    model(features).values().sum().backward()
    return sum(model.module.collection.table(table.name).num_rows for table in case.tables)


def test_distributed_model_parallel_plans_by_itself():
    rows = workers.run(train_without_a_plan, case_of(tables=4), world_size=2)
    assert sum(rows) > 0


def test_ranks_without_rows_of_a_tiny_table_are_priced():
    # TorchRec gives ranks beyond num_embeddings an empty shard; ours get ids all the same.
    module = DynamicEmbeddingBagCollection(
        [EmbeddingBagConfig(name="tiny", embedding_dim=8, num_embeddings=2, feature_names=["f"])]
    )
    constraints = {"tiny": ParameterConstraints(sharding_types=["row_wise"])}
    sharders = [DynamicEmbeddingBagCollectionSharder()]
    estimator = DynamicStorageEstimator(topology(), constraints)
    enumerator = EmbeddingEnumerator(topology(), 64, constraints, estimator)
    (option,) = enumerator.enumerate(module, sharders)
    assert [shard.size[0] for shard in option.shards] == [1, 1, 0, 0]
    assert len({shard.storage.ddr for shard in option.shards}) == 1
    plan = make_planner(topology(), constraints=constraints).plan(module, sharders)
    assert plan.plan[""]["tiny"].ranks == [0, 1, 2, 3]


def test_a_planner_for_deltas_prices_the_marks_of_rows():
    module, sharders = collection_of(case_of()), [DynamicEmbeddingBagCollectionSharder()]
    without, with_deltas = (
        make_planner(topology(), deltas=deltas)._enumerator.enumerate(module, sharders)
        for deltas in (False, True)
    )
    for option, priced in zip(without, with_deltas, strict=True):
        assert priced.total_storage.ddr > option.total_storage.ddr


def plan_with(partitioner, kinds):
    """The plan of 12 tables on 4 nodes of 4 ranks, and its score."""
    case = case_of(tables=12, dim=16)
    made = make_planner(
        topology(world_size=16, local_world_size=4),
        constraints=constrained(case, sharding_types=kinds) if kinds else None,
        partitioner=partitioner,
    )
    return repr(plan_of(case, made))


@pytest.mark.parametrize("kinds", [None, ["table_row_wise"], ["table_column_wise"]])
def test_plans_are_those_of_the_stock_partitioner_with_few_copies_of_devices(kinds, monkeypatch):
    copies = []

    def copied(device, memo):
        copies.append(device.rank)
        return DeviceHardware(device.rank, device.storage, device.perf)

    monkeypatch.setattr(DeviceHardware, "__deepcopy__", copied, raising=False)
    stock = plan_with(GreedyPerfPartitioner(), kinds)
    of_stock = len(copies)
    assert plan_with(None, kinds) == stock
    # TorchRec copies its topology twice, and the devices of a host for each table that it tries there.
    assert len(copies) - of_stock <= 2 * 16 < of_stock


# Constraints and names that no table of the model can have

IMPOSSIBLE = [
    (
        True,
        {"sharding_types": ["data_parallel"]},
        "sharding_types with one of table_.*Under data_par",
    ),
    (
        False,
        {"sharding_types": ["grid_shard"]},
        "sharding_types with one of table_wise, row_wise, col",
    ),
    (
        True,
        {"compute_kernels": ["fused_uvm_caching"]},
        "compute_kernels with 'fused', got .'fused_uvm",
    ),
]


@pytest.mark.parametrize(("pooled", "constraint", "rule"), IMPOSSIBLE)
def test_constraints_that_leave_nothing_say_what_is_there(pooled, constraint, rule):
    case = case_of(pooled)
    planner = make_planner(topology(), constraints=constrained(case, **constraint))
    with pytest.raises(
        ValueError, match=rf"make_planner.constraints\['table_0'\]: expected {rule}"
    ):
        plan_of(case, planner)


def test_constraints_of_processed_and_static_tables():
    """A feature-processed collection has the types of its own sharder; a static table those of TorchRec."""
    processed = FeatureProcessedEmbeddingBagCollection(
        DynamicEmbeddingBagCollection([table("user")], is_weighted=True),
        PositionWeightedModuleCollection({"user": 2}),
    )
    static = EmbeddingBagCollection([table("item")], device=torch.device("meta"))
    model = torch.nn.ModuleDict({"processed": processed, "static": static})
    by_table = {
        "user": ParameterConstraints(sharding_types=["data_parallel"]),
        "item": ParameterConstraints(sharding_types=["data_parallel"]),
    }
    with pytest.raises(
        ValueError, match=r"constraints\['user'\]: expected sharding_types with one"
    ):
        make_planner(topology(), constraints=by_table).plan(model, default_sharders())
    by_table["user"] = ParameterConstraints(sharding_types=["row_wise", "data_parallel"])
    plan = make_planner(topology(), constraints=by_table).plan(model, default_sharders())
    kinds = {name: one.sharding_type for of in plan.plan.values() for name, one in of.items()}
    assert kinds == {"user": "row_wise", "item": "data_parallel"}


def table(name):
    return EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=99, feature_names=[name])


def errors_of_plans():
    """In the workers: returns the errors of plans with wrong rows, with too many, and without room."""
    told = []
    for options, of_topology in (
        ({"expected_rows": {"table_0": 9, "table_9": 9}}, {}),
        ({"expected_rows": {"table_0": 10**9}}, {}),
        ({}, {"ddr_cap": 1}),
    ):
        case = case_of(tables=2)
        planner = make_planner(topology(world_size=2, **of_topology), **options)
        with pytest.raises((ValueError, PlannerError)) as caught:
            planner.collective_plan(
                Holder(collection_of(case)), [sharder_of(case)], dist.group.WORLD
            )
        told.append((caught.type, str(caught.value)))
    return told


def test_an_error_of_a_collective_plan_is_raised_on_every_rank():
    first, second = workers.run(errors_of_plans, world_size=2)
    assert first == second
    (of_name, name), (of_rows, rows), (of_room, room) = first
    assert (of_name, of_rows, of_room) == (ValueError, ValueError, PlannerError)
    assert "make_planner.expected_rows: expected names of tables that the sharders shard, [" in name
    assert "'table_1'], got ['table_9']. Correct" in name
    assert (
        "expected" in rows
        and "1000000000" in rows
        and "make_planner: expected tables that fit" in room
    )


def test_arguments_in_a_wrong_order_are_refused():
    with pytest.raises(
        ValueError, match=r"make_planner\.topology: expected a Topology, got 512\. Write"
    ):
        make_planner(512, topology())
    with pytest.raises(
        ValueError, match=r"make_planner\.batch_size: expected an integer, 1 or more"
    ):
        make_planner(topology(), topology())


@pytest.mark.parametrize("make", [make_planner, DynamicStorageEstimator])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("x", r": expected a dict of ParameterConstraints by table name, got 'x'\. Write"),
        ([ParameterConstraints()], r": expected a dict of ParameterConstraints .* got \["),
        (
            {"t": {"sharding_types": ["row_wise"]}},
            r"\['t'\]: expected ParameterConstraints, got \{.*\}\. Write",
        ),
        (
            {"t": ParameterConstraints(sharding_types="row_wise")},
            r"\['t'\]\.sharding_types: expected a list, got 'row_wise'\. Write \['row_wise'\]",
        ),
        (
            {"t": ParameterConstraints(compute_kernels="fused")},
            r"\['t'\]\.compute_kernels: expected a list, got 'fused'\. Write \['fused'\]",
        ),
    ],
)
def test_what_constrains_nothing(make, given, said):
    with pytest.raises(ValueError, match=rf"^{make.__name__}\.constraints{said}"):
        make(topology(), constraints=given)


def test_the_enumerator_is_not_chosen():
    with pytest.raises(
        ValueError, match=r"make_planner\.enumerator: expected none, got .* Leave it"
    ):
        make_planner(topology(), enumerator=EmbeddingEnumerator(topology(), 64))
