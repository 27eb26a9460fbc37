"""What scores and counters add to the price of a shard, against real tables that are full of both."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from table_cases import make_group
from test_planner_storage import (
    DIM,
    POOLED,
    ROWS,
    options,
    pooled,
    topology,
    user_shard,
)
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.types import PlannerError

from torchrec_dyn import (
    AdmitAfter,
    AdmitWithProbability,
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingBagCollectionSharder,
    DynamicTableConfig,
    ExpireAfter,
    LeastRecentlyUsed,
)
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.planner import DynamicStorageEstimator, make_planner, table_bytes
from torchrec_dyn.ranks.routing import config_of_share, row_limit
from torchrec_dyn.storage.id_map import MAX_LOAD, SLOT_BYTES, most_slots
from torchrec_dyn.storage.row_store import block_shift
from torchrec_dyn.table.table import DynamicTable

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
    table = DynamicTable(
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
    table = DynamicTable(
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


def test_a_gpu_holds_whole_blocks_of_scores_and_counters():
    key = ("user", "table_wise")
    with_life, without = (
        options(DynamicStorageEstimator(topology("cuda")), collection(one), SHARDER, device="cuda")[
            key
        ]
        .shards[0]
        .storage
        for one in (POLICIES["counters"], None)
    )

    def in_blocks(rows, row_bytes):
        block = 1 << block_shift(rows, row_bytes)
        assert rows % block
        return -(-rows // block) * block

    scores = in_blocks(ROWS, DIM * 4) + in_blocks(COUNTERS, 8)
    assert with_life.hbm - without.hbm == 8 * scores + most_slots(COUNTERS) * SLOT_BYTES
    assert with_life.ddr == without.ddr == 0


def test_expected_rows_do_not_hide_counters():
    def price(limit, config, expected=None):
        expected_rows = None if expected is None else {"user": expected}
        module = collection(config, num_embeddings=limit)
        return user_shard(module, SHARDER, expected_rows=expected_rows).storage.ddr

    few, many = POLICIES["counters"], POLICIES["as_many_as_rows"]
    assert price(2**45, few, expected=ROWS) == price(ROWS, few)
    assert price(10 * ROWS, many, expected=ROWS) > price(ROWS, many) + 9 * ROWS * 8
    with pytest.raises(PlannerError):
        generous = collection(many, num_embeddings=2**45)
        make_planner(topology(), expected_rows={"user": ROWS}).plan(generous, [SHARDER])
