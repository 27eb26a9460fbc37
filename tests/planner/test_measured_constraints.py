"""Constraints out of stats: what a planner reads in them, what it prices, and which plan it then prefers."""

import math

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from planned_cases import POOLED, options, topology
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn
from torchrec_dyn.planner import (
    DynamicStorageEstimator,
    EvenLoad,
    MeasuredConstraints,
    constraints_from,
    load_by_rank,
    make_planner,
    read_model_stats,
)

LEARNING = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
SHARDER = dyn.DynamicEmbeddingBagCollectionSharder()
BATCH, RANKS = 64, 4
TABLES = [f"table_{number}" for number in range(8)]
LIMIT = 1_000_000


def stats_of(rows=100, ids_a_sample=1.0, forwards=10, ranks=RANKS, features=1, **more):
    seen = round(ids_a_sample * BATCH * ranks * forwards)
    counted = {"rows": rows, "ids_seen": seen, "forwards": forwards, "waiting": 0}
    return counted | {"features": features, "ranks": ranks, "bytes": rows * 100} | more


def collection(**changes):
    common = {"embedding_dim": 16, "num_embeddings": LIMIT} | changes
    return dyn.DynamicEmbeddingBagCollection(
        [EmbeddingBagConfig(name=name, feature_names=[f"of_{name}"], **common) for name in TABLES]
    )


def seen_of_all(rows, ids_a_sample):
    every = zip(TABLES, rows, ids_a_sample, strict=True)
    return {name: stats_of(count, ids) for name, count, ids in every}


# What the planner reads


@pytest.mark.parametrize(
    ("given", "bags"),
    [
        (None, BATCH * 3),
        (ParameterConstraints(num_poolings=[1.0, 0.5, 2.0]), BATCH * 3.5),
        (ParameterConstraints(batch_sizes=[64, 32, 4]), 100),
        (ParameterConstraints(num_poolings=[1.0, 0.5, 2.0], batch_sizes=[64, 32, 4]), 88),
    ],
)
def test_the_planner_counts_the_ids_that_a_rank_brought(given, bags):
    stats = {"user": stats_of(ids_a_sample=4.5, features=3)}
    constraints = constraints_from(stats, BATCH, constraints={"user": given} if given else None)
    (user,) = constraints.values()
    assert user.pooling_factors == [pytest.approx(4.5 * BATCH / bags)] * 3
    config = EmbeddingBagConfig(1000, 8, "user", feature_names=["a", "b", "c"])
    enumerator = EmbeddingEnumerator(topology(), BATCH, constraints)
    for option in enumerator.enumerate(dyn.DynamicEmbeddingBagCollection([config]), [SHARDER]):
        poolings = user.num_poolings or [1.0] * 3
        sizes = user.batch_sizes or [option.batch_size] * 3
        counted = zip(option.input_lengths, poolings, sizes, strict=True)
        assert sum(length * n * size for length, n, size in counted) == pytest.approx(4.5 * BATCH)


def test_all_else_of_given_constraints_is_kept():
    given = {
        "user": ParameterConstraints(
            sharding_types=["row_wise"], min_partition=8, pooling_factors=[99.0]
        ),
        "static": ParameterConstraints(pooling_factors=[7.0]),
    }
    found = constraints_from({"user": stats_of(), "item": stats_of()}, BATCH, constraints=given)
    assert list(found) == ["user", "static", "item"]
    assert found["user"].sharding_types == ["row_wise"] and found["user"].min_partition == 8
    assert found["user"].pooling_factors == [1.0]
    assert found["static"] is given["static"] and given["user"].pooling_factors == [99.0]


def test_a_table_that_nobody_asked_for_is_planned():
    stats = seen_of_all([0] * 8, [0.0] * 8)
    found = constraints_from(stats, BATCH)
    assert found["table_0"].pooling_factors == [0.0] and found["table_0"].expected_rows == 1
    plan = make_planner(topology(), BATCH, found).plan(collection(), [SHARDER])
    assert set(plan.plan[""]) == set(TABLES)


def test_constraints_are_told_apart_by_what_is_expected():
    one, same, other, waits = (
        MeasuredConstraints(expected_rows=rows, expected_counters=counters)
        for rows, counters in [(5, 0), (5, 0), (6, 0), (5, 1)]
    )
    assert one == same and hash(one) == hash(same)
    assert len({hash(one), hash(other), hash(waits), hash(ParameterConstraints())}) == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 0}, r"\.batch_size: expected a finite number, 1 or more, got 0\. Pass"),
        ({"batch_size": "x"}, r"constraints_from\.batch_size: .* got 'x'"),
        ({"growth": 0.9}, r"\.growth: expected a finite number, 1 or more, got 0\.9\. Pass"),
        ({"growth": None}, r"constraints_from\.growth: .* got None"),
        ({"growth": math.inf}, r"constraints_from\.growth: .* got inf"),
        ({"stats": None}, r"constraints_from\.stats: expected the stats of .* got None\. Pass"),
        ({"stats": {"user": None}}, r"constraints_from\.stats\['user'\]: .* got None"),
        ({"stats": stats_of()}, r"constraints_from\.stats\['\w+'\]: expected the stats of"),
        (
            {"constraints": {"user": {"sharding_types": ["row_wise"]}}},
            r"constraints_from\.constraints\['user'\]: expected ParameterConstraints, got \{",
        ),
        ({"growth": math.nan}, r"growth: .* got nan"),
        (
            {"stats": {"user": stats_of(forwards=0)}},
            r"stats\['user'\]: .* got 0 forwards\. Train .*frozen",
        ),
        (
            {"stats": {"user": {"rows": 5}}},
            r"stats\['user'\]: .* none named \['waiting', 'ids_seen'",
        ),
        (
            {"constraints": {"user": ParameterConstraints(num_poolings=[1.0, 2.0])}},
            r"constraints\['user'\]: expected num_poolings and batch_sizes for each of 1 features, got 2",
        ),
        (
            {"constraints": {"user": ParameterConstraints(num_poolings=[0.0])}},
            r"constraints\['user'\]: expected .* product above 0, got \[0\.0\] and \[64\]",
        ),
    ],
)
def test_what_makes_no_sense(changes, said):
    with pytest.raises(ValueError, match=said):
        constraints_from(**({"stats": {"user": stats_of()}, "batch_size": BATCH} | changes))


# What is priced


def storage(constraints, config=None, name="table_0", **estimator):
    module = dyn.DynamicEmbeddingBagCollection(
        [EmbeddingBagConfig(LIMIT, 16, name, feature_names=["f"])],
        dynamic=config,
    )
    made = DynamicStorageEstimator(topology(), constraints, **estimator)
    found = options(made, module, SHARDER, constraints)
    return {key: [shard.storage for shard in option.shards] for key, option in found.items()}


def pinned(expected_rows=None, expected_counters=None):
    return {
        "table_0": MeasuredConstraints(
            sharding_types=POOLED,
            min_partition=8,
            expected_rows=expected_rows,
            expected_counters=expected_counters,
        )
    }


def test_a_table_is_priced_by_its_measured_rows_and_growth():
    found = constraints_from({"table_0": stats_of(rows=3001)}, BATCH, growth=1.5)
    assert found["table_0"].expected_rows == 4502
    plain = {"table_0": ParameterConstraints()}
    assert storage(found) == storage(plain, expected_rows={"table_0": 4502})
    assert storage(found)["table_0", "row_wise"] < storage(plain)["table_0", "row_wise"]


def test_expected_numbers_are_rounded_up():
    (found,) = constraints_from({"user": stats_of(rows=3, waiting=3)}, BATCH, growth=1.5).values()
    assert (found.expected_rows, found.expected_counters) == (5, 5)


def test_a_table_may_be_planned_for_its_present_rows():
    (found,) = constraints_from({"user": stats_of(rows=3001)}, BATCH, growth=1).values()
    assert found.expected_rows == 3001


def test_rows_grow_to_the_limit_and_no_further():
    full = storage(pinned())
    assert storage(pinned(expected_rows=LIMIT * 3)) == full
    assert storage(pinned(expected_rows=LIMIT - 1000)) != full
    # A number that the user gives is an error beyond the limit, and goes first below it.
    assert storage(pinned(expected_rows=5), expected_rows={"table_0": LIMIT}) == full
    with pytest.raises(ValueError, match=f"at most num_embeddings={LIMIT}"):
        storage(pinned(expected_rows=5), expected_rows={"table_0": LIMIT + 1})


def test_counters_are_priced_as_measured_and_at_most_as_allowed():
    def admitting(counters):
        return dyn.DynamicTableConfig(admission=dyn.AdmitAfter(2, counters))

    few = storage(pinned(5000), admitting(700))
    assert storage(pinned(5000, 700), admitting(None)) == few
    assert storage(pinned(5000, 10**9), admitting(700)) == few
    assert storage(pinned(5000, 0), admitting(None)) != few
    measured = constraints_from({"table_0": stats_of(waiting=401)}, BATCH, growth=2)
    assert measured["table_0"].expected_counters == 802
    assert storage(pinned(5000, 9), None) == storage(pinned(5000))  # nothing is counted there


def test_what_was_measured_fits_where_the_limits_do_not():
    small = topology(ddr_cap=40 << 20)
    stats = seen_of_all([20_000] * 8, [1.0] * 8)
    with pytest.raises(PlannerError):
        make_planner(small, BATCH).plan(collection(), [SHARDER])
    plan = make_planner(small, BATCH, constraints_from(stats, BATCH)).plan(collection(), [SHARDER])
    assert set(plan.plan[""]) == set(TABLES)


# What is measured


def forward(module, count):
    module(
        KeyedJaggedTensor(
            ["f", "g"], torch.arange(2 * count), lengths=torch.tensor([count, 0, 1, count - 1])
        )
    )


def test_an_unsharded_model_is_measured():
    bags = [
        EmbeddingBagConfig(name="a", embedding_dim=8, num_embeddings=99, feature_names=["f", "g"])
    ]
    words = [EmbeddingConfig(name="b", embedding_dim=8, num_embeddings=99, feature_names=["g"])]
    model = torch.nn.ModuleList(
        [
            dyn.DynamicEmbeddingBagCollection(bags, fused_params=LEARNING),
            dyn.DynamicEmbeddingCollection(words, fused_params=LEARNING),
        ]
    )
    for module in model:
        forward(module, 5)
        forward(module.eval(), 5)
        forward(module.train(), 3)
    found = read_model_stats(model)
    seen = {
        name: (one["ids_seen"], one["forwards"], one["features"]) for name, one in found.items()
    }
    assert seen == {"a": (16, 2, 2), "b": (8, 2, 1)}
    assert found["a"].items() >= dyn.read_stats(model[0], "a").items()
    assert found["a"]["ranks"] == 1
    constraints = constraints_from(found, batch_size=2)
    assert constraints["a"].pooling_factors == [2.0, 2.0]
    assert constraints["b"].pooling_factors == [2.0]


def test_what_was_trained_before_a_load_is_not_divided_by():
    config = [EmbeddingBagConfig(name="a", embedding_dim=8, num_embeddings=99, feature_names=["f"])]
    life = dyn.DynamicTableConfig(eviction=dyn.LeastRecentlyUsed())
    first, again = (
        dyn.DynamicEmbeddingBagCollection(config, dynamic=life, fused_params=LEARNING)
        for _ in range(2)
    )
    for _ in range(7):
        forward(first, 4)
    again.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="0 forwards"):
        constraints_from(read_model_stats(again), batch_size=2)
    forward(again, 4)
    stats = read_model_stats(again)
    assert (stats["a"]["step"], stats["a"]["forwards"]) == (8, 1)
    assert constraints_from(stats, batch_size=2)["a"].pooling_factors == [2.0]


def test_a_model_must_have_tables_and_each_its_name():
    with pytest.raises(ValueError, match="expected a model with a dynamic collection, got Linear"):
        read_model_stats(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="got two named 'table_0'"):
        read_model_stats(torch.nn.ModuleList([collection(), collection()]))


# Which plans are preferred, and how loads are told

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


def test_time_alone_leaves_the_memory_of_tables_asked_alike():
    """Why EvenLoad is there; with weight 0 it is TorchRec's model."""
    stats = seen_of_all(SKEWED, [1.0] * 8)
    constraints = constraints_from(stats, BATCH)
    by_time, by_weight = (
        load_of(make_planner(ONE_NODE, BATCH, constraints, performance_model=model), stats)
        for model in (NoopPerfModel(ONE_NODE), EvenLoad(ONE_NODE, memory_weight=0))
    )
    assert by_time == by_weight and by_time.memory_imbalance > 2.4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_without_shards_count_as_empty(device):
    place = topology(device)
    constraints = ParameterConstraints(["table_wise"], compute_kernels=["fused"])
    (option,) = EmbeddingEnumerator(place, BATCH, {"user": constraints}).enumerate(
        dyn.DynamicEmbeddingBagCollection([EmbeddingBagConfig(9, 8, "user", feature_names=["f"])]),
        [SHARDER],
    )
    option.shards[0].rank = 2
    time = option.shards[0].perf.total
    assert NoopPerfModel(place).rate([option]) == time
    assert EvenLoad(place, 1.0).rate([option]) == pytest.approx(4 * time)
    assert EvenLoad(place).rate([option]) == pytest.approx(2 * time)


def test_a_weight_is_not_negative():
    for weight in (-1, None, "x", math.nan):
        with pytest.raises(
            ValueError, match=r"EvenLoad\.memory_weight: expected a finite number, 0 or"
        ):
            EvenLoad(topology(), weight)
    EvenLoad(topology(), np.float32(0.5))


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"expected_rows": 0}, r"expected_rows: expected an integer, 1 or more, got 0\. Pass None"),
        ({"expected_rows": "x"}, r"expected_rows: .* got 'x'"),
        ({"expected_counters": -5}, r"expected_counters: expected an integer, 0 or more, got -5"),
        ({"expected_counters": 1.5}, r"expected_counters: .* got 1\.5"),
    ],
)
def test_measured_numbers_are_counts(numbers, said):
    with pytest.raises(ValueError, match=rf"^MeasuredConstraints\.{said}"):
        MeasuredConstraints(**numbers)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"plan": None}, r"plan: expected a ShardingPlan, got None\. Pass model\.plan"),
        ({"plan": {}}, r"plan: .* got \{\}"),
        ({"ranks": -1}, r"ranks: expected an integer, 1 or more, got -1\. Pass"),
        ({"ranks": 1.5}, r"ranks: .* got 1\.5"),
        ({"ranks": "x"}, r"ranks: .* got 'x'"),
        ({"stats": None}, r"stats: expected the stats of read_model_stats, got None\. Pass"),
        ({"stats": {"t": None}}, r"stats\['t'\]: .* got None"),
    ],
)
def test_what_has_no_load(changed, said):
    with pytest.raises(ValueError, match=rf"^load_by_rank\.{said}"):
        load_by_rank(**({"plan": ShardingPlan({}), "stats": {}, "ranks": 2} | changed))
    assert load_by_rank(ShardingPlan({}), {}, np.int64(2)).bytes == (0, 0)


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
