"""The price of a shard, against real tables that hold as many rows, scores and counters."""

import math

import numpy as np
import pytest
import torch
import workers
from another_process import call
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from hypothesis import example, given
from hypothesis import strategies as st
from planned_cases import POOLED, options, topology
from policy_cases import Often
from sharded_cases import FUSED_PARAMS, Case, Table, usual_plan
from sharded_training import collection_of
from sharded_training import shard as sharded
from table_cases import make_group
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad

from torchrec_dyn import (
    AdmitAfter,
    AdmitWithProbability,
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingBagCollectionSharder,
    DynamicTableConfig,
    ExpireAfter,
    LeastRecentlyUsed,
    MappedFiles,
    Never,
    read_stats,
)
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.planner import DynamicStorageEstimator, make_planner, table_bytes
from torchrec_dyn.planner.storage import TableSize
from torchrec_dyn.ranks.routing import config_of_share, row_limit
from torchrec_dyn.storage.id_map import MAX_LOAD, SLOT_BYTES, IdMap, most_slots
from torchrec_dyn.table.shard import TableShard

ROWS, DIM = 3000, 64
# The stated tolerance: never too little, and never more than the id map's room to grow. Maps of tables that
# reach their limit are cut to it: 1.6 slots of 16 bytes a row, half of the bound for a map that doubles.
MAP_SLACK_PER_ROW = 27


def pooled(**changes):
    config = {"name": "user", "embedding_dim": DIM, "num_embeddings": ROWS}
    return EmbeddingBagConfig(**(config | changes), feature_names=["user_id"])


def filled_table(rows, columns, optimizer, dtype, step=700):
    table = TableShard(
        name="user",
        num_embeddings=max(rows, ROWS),
        embedding_dim=columns,
        optimizer=optimizer,
        config=DynamicTableConfig(),
        dtype=dtype,
    )
    for first in range(0, rows, step):
        ids = torch.arange(first, min(first + step, rows))
        table.assign(ids, torch.ones(ids.numel(), columns))
    assert table.num_rows == rows
    return table


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.BF16])
@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_a_shard_costs_what_the_table_it_becomes_holds(kind, data_type):
    module = DynamicEmbeddingBagCollection([pooled(data_type=data_type)])
    sharder = DynamicEmbeddingBagCollectionSharder({"optimizer": kind.name})
    constraints = {"user": ParameterConstraints(sharding_types=POOLED, min_partition=16)}
    # Under this output dtype TorchRec counts the output of a step as ours does: as float32.
    constraints["user"].output_dtype = DataType.FP32
    ours = options(DynamicStorageEstimator(topology(), constraints), module, sharder, constraints)
    stock = options(
        EmbeddingStorageEstimator(topology(), constraints), module, sharder, constraints
    )
    assert {sharding_type for _, sharding_type in ours} == set(POOLED)
    dtype = torch.float32 if data_type == DataType.FP32 else torch.bfloat16
    measured = {}
    for key, option in ours.items():
        for shard, plain in zip(option.shards, stock[key].shards, strict=True):
            columns = shard.size[1]
            sharers = ROWS // shard.size[0]
            rows = row_limit(ROWS, sharers)
            if (rows, columns) not in measured:
                table = filled_table(rows, columns, RowOptimizer(kind=kind), dtype)
                measured[rows, columns] = table.stats()["bytes"]
            batch = plain.storage.ddr - math.prod(shard.size) * dtype.itemsize
            excess = shard.storage.ddr - batch - measured[rows, columns]
            assert batch > 0 and shard.storage.hbm == 0
            assert 0 <= excess <= MAP_SLACK_PER_ROW * rows, (key, columns)


def row_wise_price(limit, ranks, expected=None):
    """Bytes of each rank's shard of a row-wise table, with the memory of a batch."""
    place = topology(world_size=ranks, local_world_size=ranks)
    estimator = DynamicStorageEstimator(place, expected_rows=expected and {"user": expected})
    module = DynamicEmbeddingBagCollection([pooled(num_embeddings=limit)], device="meta")
    found = EmbeddingEnumerator(place, 128, None, estimator).enumerate(
        module, [DynamicEmbeddingBagCollectionSharder(FUSED_PARAMS)]
    )
    (option,) = (one for one in found if one.sharding_type == "row_wise")
    return [shard.storage.ddr for shard in option.shards]


def overfilled_table():
    """In the workers: rows and limit of a row-wise table that saw many ids; bytes of this rank."""
    plan = usual_plan("row_wise", DIM, 2, 2, rows=470)
    config = DynamicTableConfig(eviction=LeastRecentlyUsed())
    case = Case([Table("user", ["user_id"], plan, dim=DIM, rows=470, config=config)])
    model = sharded(case, collection_of(case))
    for ids in torch.arange(4000).split(100):
        batch = KeyedJaggedTensor(["user_id"], ids, lengths=torch.ones_like(ids))
        model(batch).values().sum().backward()
    stats = read_stats(model.module.collection, "user")
    return stats["rows"], stats["limit"], model.module.collection.table("user").stats()["bytes"]


def test_ranks_of_a_small_table_hold_more_rows_than_its_limit_as_priced():
    for (rows, limit, held), price in zip(
        workers.run(overfilled_table, world_size=2), row_wise_price(470, 2), strict=True
    ):
        assert 690 < rows <= limit == 716
        scores = 8 * limit // 2
        even_share = table_bytes(470 // 2, DIM, torch.float32, RowOptimizer())
        assert even_share + scores < held <= price + scores


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def counted_estimated_and_taken():
    """Bytes of a filled table: its own count, the estimate, and what this process grew by."""
    rows, optimizer = 300_000, RowOptimizer(kind=OptimizerKind.ADAM)
    filled_table(64, DIM, optimizer, torch.float32)  # what the first table of a process loads
    before = resident_bytes()
    table = filled_table(rows, DIM, optimizer, torch.float32, step=20_000)
    taken = resident_bytes() - before
    return table.stats()["bytes"], table_bytes(rows, DIM, torch.float32, optimizer), taken


def test_an_estimate_is_what_the_process_takes():
    """In a process of its own: here the memory of earlier tests would be used again."""
    counted, estimate, taken = call(counted_estimated_and_taken)
    assert 200e6 < counted <= estimate
    assert 0.9 * estimate < taken < 1.1 * estimate


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(10, 400))
def test_most_slots_bounds_the_map_however_it_grew(batches, large_capacity):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrec_dyn.knobs.LARGE_MAP_SLOTS", large_capacity)
        ids = IdMap()
        for batch in batches:
            ids.reserve(batch)
            ids.num_ids += batch
        assert ids.held <= most_slots(ids.num_ids)


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=30),
    st.integers(10, 400),
    st.integers(-300, 300),
)
@example([131, 400, 30], 10, -1)
def test_a_limit_bounds_the_map_and_a_full_one_does_not_grow(batches, large_capacity, above):
    """Whether the last ids reach the limit, stay below or pass it; those that come and go move nothing."""
    limit = max(1, sum(batches) + above)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrec_dyn.knobs.LARGE_MAP_SLOTS", large_capacity)
        ids = IdMap(limit)
        for batch in batches:
            ids.reserve(batch)
            ids.num_ids += batch
            assert ids.held <= most_slots(ids.num_ids)
            assert ids.num_ids <= ids.capacity * MAX_LOAD
        if ids.num_ids >= limit:
            return
        ids.reserve(limit - ids.num_ids)
        ids.num_ids = limit
        assert ids.outgoing is None
        slots = ids.slots
        for leaving in (1, limit // 64, limit // 2):
            ids.num_ids = limit - leaving
            ids.reserve(leaving)
            assert ids.slots is slots and ids.outgoing is None


def user_shard(module, sharder, **estimator):
    table = ("user", "table_wise")
    return options(DynamicStorageEstimator(topology(), **estimator), module, sharder)[table].shards[
        0
    ]


def test_the_optimizer_in_force_is_priced_once():
    rowwise = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    adam = {"optimizer": EmbOptimType.ADAM}

    def price(sharder=None, module=None, on_parameter=None):
        collection = DynamicEmbeddingBagCollection([pooled()], fused_params=module)
        if on_parameter:
            apply_optimizer_in_backward(on_parameter, collection.parameters(), {"lr": 0.1})
        return user_shard(collection, DynamicEmbeddingBagCollectionSharder(sharder)).storage.ddr

    sgd = price()
    assert price(rowwise) == sgd + 4 * ROWS
    assert price(adam) == sgd + 8 * DIM * ROWS
    assert price(None, adam) == price(adam)
    assert price(rowwise, adam) == price(rowwise)
    assert price(adam, None, RowWiseAdagrad) == price(rowwise)


def test_the_output_of_a_step_is_float32_unless_said_otherwise():
    module = DynamicEmbeddingBagCollection([pooled(data_type=DataType.FP16)])
    float32, float16 = (
        user_shard(module, DynamicEmbeddingBagCollectionSharder(fused_params)).storage.ddr
        for fused_params in (None, {"output_dtype": SparseType.FP16})
    )
    assert float32 - float16 == 128 * 4 * DIM * 2  # batch, ranks, columns, bytes less


def test_a_static_table_beside_it_costs_what_torchrec_says():
    model = torch.nn.ModuleDict(
        {
            "dynamic": DynamicEmbeddingBagCollection([pooled()]),
            "static": EmbeddingBagCollection([pooled(name="item")], device=torch.device("meta")),
        }
    )
    sharders = [DynamicEmbeddingBagCollectionSharder(), EmbeddingBagCollectionSharder()]
    by_estimator = []
    for estimator in (DynamicStorageEstimator, EmbeddingStorageEstimator):
        enumerator = EmbeddingEnumerator(topology(), 128, None, estimator(topology()))
        found = enumerator.enumerate(model, sharders)
        by_estimator.append({(o.name, o.sharding_type): o.total_storage.ddr for o in found})
    ours, stock = by_estimator
    assert {name for name, _ in ours} == {"user", "item"}
    for key in ours:
        assert ours[key] > stock[key] if key[0] == "user" else ours[key] == stock[key]


def test_estimating_again_changes_nothing():
    module = DynamicEmbeddingBagCollection([pooled()], fused_params={"optimizer": "ADAM"})
    enumerator = EmbeddingEnumerator(topology(), 128, None, DynamicStorageEstimator(topology()))
    found = enumerator.enumerate(module, [DynamicEmbeddingBagCollectionSharder()])
    once = [option.total_storage for option in found]
    enumerator.populate_estimates(found)
    assert [option.total_storage for option in found] == once


def test_expected_rows_price_a_generous_limit():
    sharder = DynamicEmbeddingBagCollectionSharder()
    generous = DynamicEmbeddingBagCollection([pooled(num_embeddings=2**45)])
    with pytest.raises(PlannerError):
        make_planner(topology()).plan(generous, [sharder])
    plan = make_planner(topology(), expected_rows={"user": ROWS}).plan(generous, [sharder])
    assert set(plan.plan[""]) == {"user"}
    exact = DynamicEmbeddingBagCollection([pooled()])
    assert (
        user_shard(generous, sharder, expected_rows={"user": ROWS}).storage
        == user_shard(exact, sharder).storage
    )


def test_expected_rows_are_checked():
    with pytest.raises(
        ValueError, match=r"expected_rows\['user'\]: expected an integer, 1 or more, got 0"
    ):
        DynamicStorageEstimator(topology(), expected_rows={"user": 0})
    for wrong, rule in (
        (10**6, ": expected a dict"),
        ({"user": None}, r"\['user'\]: expected an integer"),
    ):
        with pytest.raises(
            ValueError, match=rf"expected_rows{rule}.*, got {wrong if wrong == 10**6 else None}"
        ):
            make_planner(topology(), expected_rows=wrong)
    assert DynamicStorageEstimator(topology(), expected_rows={"user": np.int64(7)})
    module = DynamicEmbeddingBagCollection([pooled()])
    with pytest.raises(ValueError, match=f"at most num_embeddings={ROWS}, got {ROWS + 1}. Raise"):
        user_shard(module, DynamicEmbeddingBagCollectionSharder(), expected_rows={"user": ROWS + 1})


def test_a_table_whose_weights_alone_fit_is_refused():
    # Row-wise a rank of four holds 256 MB of weights, but 768 MB with Adam's state.
    module = DynamicEmbeddingBagCollection([pooled(num_embeddings=4_000_000)])
    sharder = DynamicEmbeddingBagCollectionSharder({"optimizer": EmbOptimType.ADAM})
    small = topology(ddr_cap=600 << 20)
    stock = EmbeddingShardingPlanner(topology=small)
    assert set(stock.plan(module, [sharder]).plan[""]) == {"user"}
    with pytest.raises(PlannerError, match="storage"):
        make_planner(small).plan(module, [sharder])


# Scores and counters of tables with policies

COUNTERS = 700
# Bytes an id: a map that has just doubled has the 2 / MAX_LOAD slots that are paid for, a full one half.
MAP_SLACK = SLOT_BYTES / MAX_LOAD + 1
POLICIES = {
    "scores": DynamicTableConfig(eviction=LeastRecentlyUsed()),
    "no_counters": DynamicTableConfig(admission=AdmitWithProbability(1.0)),
    "counters": DynamicTableConfig(
        admission=AdmitAfter(2, COUNTERS), eviction=ExpireAfter(steps=99)
    ),
    "as_many_as_rows": DynamicTableConfig(admission=AdmitAfter(2), eviction=LeastRecentlyUsed()),
}
KIND = OptimizerKind.EXACT_ROWWISE_ADAGRAD
SHARDER = DynamicEmbeddingBagCollectionSharder({"optimizer": EmbOptimType[KIND.name]})


def collection(config=None, **changes):
    return DynamicEmbeddingBagCollection([pooled(**changes)], dynamic=config)


def counters_of(config, rows, sharers):
    """Ids that may wait on one of the ranks that share a table."""
    if not isinstance(config.admission, AdmitAfter):
        return 0
    counters = config.admission.counters
    return rows if counters is None else row_limit(counters, sharers)


def full_table(config, rows, columns, sharers):
    """Trains a table until it has all the rows and counters that it may have."""
    table = TableShard(
        name="user",
        num_embeddings=ROWS,
        embedding_dim=columns,
        row_limit=rows,
        optimizer=RowOptimizer(kind=KIND),
        config=config_of_share(config, sharers),
    )
    group = make_group(table)

    def see(ids):
        group(ids, torch.arange(ids.numel() + 1), training=True)

    for ids in torch.arange(rows).split(500):
        see(ids.repeat(2))
    waiting = counters_of(config, rows, sharers)
    for ids in (10**6 + torch.arange(waiting)).split(50):
        see(ids)
    stats = table.stats()
    assert (stats["rows"], stats["waiting"], stats["counters_dropped"]) == (rows, waiting, 0)
    return stats["bytes"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_shard_costs_what_the_full_table_holds(policy):
    config = POLICIES[policy]
    constraints = {"user": ParameterConstraints(sharding_types=POOLED, min_partition=16)}
    with_life, without = (
        options(
            DynamicStorageEstimator(topology(), constraints), collection(one), SHARDER, constraints
        )
        for one in (config, None)
    )
    assert {sharding_type for _, sharding_type in with_life} == set(POOLED)
    held = {}
    for key, option in with_life.items():
        for shard, plain in zip(option.shards, without[key].shards, strict=True):
            columns, sharers = shard.size[1], ROWS // shard.size[0]
            rows = row_limit(ROWS, sharers)
            waiting = counters_of(config, rows, sharers)
            if (rows, columns) not in held:
                held[rows, columns] = full_table(config, rows, columns, sharers)
            added = shard.storage.ddr - plain.storage.ddr
            assert added == 8 * rows + (waiting and 8 * waiting + most_slots(waiting) * SLOT_BYTES)
            batch = plain.storage.ddr - table_bytes(
                rows, columns, torch.float32, RowOptimizer(kind=KIND)
            )
            excess = shard.storage.ddr - batch - held[rows, columns]
            assert 0 <= excess <= MAP_SLACK * (rows + waiting)
    assert len(held) > 3


def test_the_counters_of_a_batch_over_the_limit_are_all_that_is_left_out():
    table = TableShard(
        name="user",
        num_embeddings=ROWS,
        embedding_dim=DIM,
        optimizer=RowOptimizer(kind=KIND),
        config=POLICIES["counters"],
    )
    group, batch = make_group(table), 100
    for ids in torch.arange(50 * batch).split(batch):
        group(ids, torch.arange(batch + 1), training=True)
    assert table.stats()["counters_dropped"] >= 50 * batch - COUNTERS
    price = {
        counters: table_bytes(
            0, DIM, torch.float32, RowOptimizer(kind=KIND), has_life=True, counters=counters
        )
        for counters in (COUNTERS, COUNTERS + batch)
    }
    assert table.stats()["bytes"] <= price[COUNTERS + batch]
    assert price[COUNTERS + batch] - price[COUNTERS] < 64 * batch


@pytest.mark.parametrize(
    ("expected", "counters"), [(10, 65_536), (ROWS, 65_536), (30_000, 120_000)]
)
def test_default_counters_are_priced_by_the_rows(expected, counters):
    generous = {"num_embeddings": 2**45}

    def prices(config):
        estimator = DynamicStorageEstimator(topology(), expected_rows={"user": expected})
        found = options(estimator, collection(config, **generous), SHARDER)
        return {
            sharding_type: [shard.storage.ddr for shard in found["user", sharding_type].shards]
            for sharding_type in ("table_wise", "row_wise")
        }

    by_default = prices(DynamicTableConfig(admission=AdmitAfter(2)))
    assert by_default == prices(DynamicTableConfig(admission=Often(2)))
    without = prices(DynamicTableConfig(admission=Never()))
    (added,) = (a - b for a, b in zip(by_default["table_wise"], without["table_wise"], strict=True))
    assert added == 8 * counters + most_slots(counters) * SLOT_BYTES
    here = max(65_536, 4 * row_limit(expected, len(without["row_wise"])))
    for price, least in zip(by_default["row_wise"], without["row_wise"], strict=True):
        assert price - least == 8 * here + most_slots(here) * SLOT_BYTES
    plan = make_planner(topology(), expected_rows={"user": expected})
    config = DynamicTableConfig(admission=AdmitAfter(2))
    assert set(plan.plan(collection(config, **generous), [SHARDER]).plan[""]) == {"user"}


def test_rows_in_mapped_files_are_not_memory():
    sharder = DynamicEmbeddingBagCollectionSharder({"optimizer": "ADAM"})
    constraints = {"user": ParameterConstraints(sharding_types=POOLED, min_partition=16)}
    lives = {"eviction": LeastRecentlyUsed(), "admission": AdmitAfter(2)}
    found = []
    for storage in (None, MappedFiles("/dev/shm")):
        config = DynamicTableConfig(storage=storage, **lives)
        module = DynamicEmbeddingBagCollection([pooled()], dynamic=config)
        estimator = DynamicStorageEstimator(topology(), constraints)
        found.append(options(estimator, module, sharder, constraints))
    in_memory, in_files = found
    assert in_memory.keys() == in_files.keys() and len(in_files) == len(POOLED)
    for plan, of_memory in in_memory.items():
        shards = zip(of_memory.shards, in_files[plan].shards, strict=True)
        for one, other in shards:
            limit = row_limit(ROWS, sum(s.offset[1] == one.offset[1] for s in of_memory.shards))
            rows = limit * 3 * one.size[1] * 4  # weights, two states of Adam
            assert one.storage.ddr - other.storage.ddr == rows
            assert other.storage.hbm == one.storage.hbm == 0
            if hasattr(one.storage, "ssd"):
                assert (one.storage.ssd, other.storage.ssd) == (0, rows)


def test_the_total_has_all_parts() -> None:
    assert TableSize(1, 2, 4, 8, 16, marks=32).total == 63
