"""Which plans are preferred once tables are weighed by what was measured, and how loads are told."""

import pytest
from test_measured_constraints import (
    BATCH,
    RANKS,
    SHARDER,
    TABLES,
    collection,
    seen_of_all,
    stats_of,
)
from test_planner_storage import topology
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.perf_models import NoopPerfModel

import torchrec_dyn as dyn
from torchrec_dyn.planner import EvenLoad, constraints_from, load_by_rank, make_planner

ONE_NODE = Topology(world_size=RANKS, local_world_size=RANKS, compute_device="cpu")
SKEWED = [round(200 * 1000 ** (number / 7)) for number in range(8)]  # 200 to 200,000
BUSY = [3, 7, 0, 5, 2, 6, 1, 4]  # lookups grow in another order than rows


def load_of(planner, stats):
    return load_by_rank(planner.plan(collection(), [SHARDER]), stats, RANKS)


@pytest.mark.parametrize("lookups", ["skewed", "alike"])
def test_a_plan_by_what_was_measured_is_even(lookups):
    ids = [SKEWED[n] / 6400 for n in BUSY] if lookups == "skewed" else [1.0] * 8
    stats = seen_of_all(SKEWED, ids)
    before = load_of(make_planner(ONE_NODE, BATCH), stats)
    after = load_of(make_planner(ONE_NODE, BATCH, constraints_from(stats, BATCH)), stats)
    assert before.memory_imbalance > 2.4 and after.memory_imbalance < 1.1
    assert after.traffic_imbalance < 1.1
    if lookups == "skewed":
        assert before.traffic_imbalance > 3


def test_the_stock_planner_reads_the_lookups_alone():
    stats = seen_of_all(SKEWED, [SKEWED[n] / 6400 for n in BUSY])
    before, after = (
        load_of(
            EmbeddingShardingPlanner(topology=ONE_NODE, batch_size=BATCH, constraints=constraints),
            stats,
        )
        for constraints in (None, constraints_from(stats, BATCH))
    )
    assert after.traffic_imbalance < 1.1 < 3 < before.traffic_imbalance


def test_time_alone_leaves_the_memory_of_tables_asked_alike():
    """Why EvenLoad is there; with weight 0 it is TorchRec's model."""
    stats = seen_of_all(SKEWED, [1.0] * 8)
    constraints = constraints_from(stats, BATCH)
    by_time, by_weight = (
        load_of(make_planner(ONE_NODE, BATCH, constraints, performance_model=model), stats)
        for model in (NoopPerfModel(ONE_NODE), EvenLoad(ONE_NODE, memory_weight=0))
    )
    assert by_time == by_weight and by_time.memory_imbalance > 2.4


def test_ranks_without_shards_count_as_empty():
    (option,) = EmbeddingEnumerator(
        topology(), BATCH, {"user": ParameterConstraints(sharding_types=["table_wise"])}
    ).enumerate(
        dyn.DynamicEmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name="user", embedding_dim=8, num_embeddings=9, feature_names=["f"]
                )
            ]
        ),
        [SHARDER],
    )
    option.shards[0].rank = 2
    time = option.shards[0].perf.total
    assert NoopPerfModel(topology()).rate([option]) == time
    assert EvenLoad(topology(), 1.0).rate([option]) == pytest.approx(4 * time)
    assert EvenLoad(topology()).rate([option]) == pytest.approx(2 * time)


def test_a_weight_is_not_negative():
    with pytest.raises(ValueError, match=r"EvenLoad\.memory_weight: expected 0 or more, got -1"):
        EvenLoad(topology(), -1)


def test_shares_of_each_kind_of_shard():
    kinds = ["table_wise", "row_wise", "column_wise", "grid_shard", *["table_row_wise"] * 4]
    constraints = {
        name: ParameterConstraints(sharding_types=[kind], min_partition=4)
        for name, kind in zip(TABLES, kinds, strict=True)
    }
    plan = make_planner(topology(), BATCH, constraints).plan(collection(), [SHARDER])
    for name, shards in zip(TABLES[:5], (1, 4, 4, 8, 2), strict=True):
        sharding = plan.plan[""][name]
        assert len(sharding.sharding_spec.shards) == shards
        load = load_by_rank(plan, {name: stats_of(rows=50, ids_a_sample=2.0)}, RANKS)
        parts = [sharding.ranks.count(rank) / shards for rank in range(RANKS)]
        assert load.bytes == pytest.approx([5000 * part for part in parts])
        assert load.lookups == pytest.approx([2.0 * BATCH * RANKS * part for part in parts])
    with pytest.raises(ValueError, match=r"load_by_rank\.ranks: expected more than \d, .* got 1"):
        load_by_rank(plan, {"table_1": stats_of()}, 1)
    with pytest.raises(ValueError, match=r"load_by_rank\.stats\['table_1'\]"):
        load_by_rank(plan, {"table_1": {}}, RANKS)
    nothing = load_by_rank(plan, {}, RANKS)
    assert nothing.bytes == (0,) * RANKS and nothing.memory_imbalance == 1
