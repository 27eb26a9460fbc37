"""Several processes: every plan measures alike, and a plan by what was measured is even in real tables."""

import example_criteo_files  # noqa: F401  # puts the examples on the path
import pytest
import torch.distributed as dist
import workers
from planned_cases import POOLED, SEQUENCE
from sharded_cases import Case, Table, usual_plan
from sharded_training import batches, collection_of, shard
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

from torchrec_dyn.planner import constraints_from, load_by_rank, make_planner, read_model_stats

import replan  # isort: skip

NAMES = ("rows", "ids_seen", "forwards", "waiting", "features", "ranks")


def measure(kind, pooled):
    """In the workers: what is measured under a plan, and what one unsharded collection saw."""
    world = dist.get_world_size()
    tables = [
        Table(
            f"table_{turn}",
            [f"feature_{turn}_{n}" for n in range(turn + 1)],
            usual_plan(kind, 8, world, get_local_size(world), turn),
        )
        for turn in range(2)
    ]
    case = Case(tables, pooled=pooled, batch_sizes=[5 + rank for rank in range(world)])
    alone = collection_of(case, fused_params=case.fused_params)
    model = shard(case, collection_of(case))
    for step in range(3):
        of_ranks, together = batches(case, step)
        model(of_ranks[dist.get_rank()])
        alone(together)
    return read_model_stats(model), read_model_stats(alone)


@pytest.mark.parametrize(
    ("kind", "pooled"), [(kind, True) for kind in POOLED] + [(kind, False) for kind in SEQUENCE]
)
def test_every_plan_measures_what_one_process_would(kind, pooled):
    of_ranks = workers.run(measure, kind, pooled, world_size=4, local_size=2)
    sharded, alone = of_ranks[0]
    assert all(found == sharded for found, _ in of_ranks)
    assert list(sharded) == ["table_0", "table_1"]
    for number, (name, stats) in enumerate(sharded.items()):
        expected = alone[name] | {"ranks": 4}
        assert {one: stats[one] for one in NAMES} == {one: expected[one] for one in NAMES}
        assert (stats["forwards"], stats["features"]) == (3, number + 1)
        assert stats["ids_seen"] > 0


def real_loads(model):
    """In the workers: bytes and whole rows asked for in a step, of each rank's own tables."""
    held = lookups = 0
    for name in replan.TABLES:
        for shard_here in model.module.sparse._shards._tables[name]:
            stats = shard_here.stats()
            held += stats["bytes"]
            lookups += stats["ids_seen"] / stats["forwards"] * shard_here.columns / replan.DIM
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (held, lookups))
    return [list(numbers) for numbers in zip(*of_ranks, strict=True)]


def plan_and_plan_anew(steps):
    """In the workers: loads of a model planned blindly and of one planned by what that one saw."""
    replan.STEPS, world = steps, dist.get_world_size()
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    group = dist.group.WORLD
    stock = EmbeddingShardingPlanner(topology=topology, batch_size=replan.BATCH)
    model = replan.train(stock.collective_plan(replan.Model(), replan.SHARDERS, group))
    stats = read_model_stats(model)
    found = [real_loads(model), load_by_rank(model.plan, stats, world)]
    planner = make_planner(topology, replan.BATCH, constraints_from(stats, replan.BATCH))
    plan = planner.collective_plan(replan.Model(), replan.SHARDERS, group)
    again = replan.train(plan)
    return [*found, real_loads(again), load_by_rank(plan, stats, world)]


def most_over_mean(numbers):
    return max(numbers) * len(numbers) / sum(numbers)


# On two ranks the blind plan happens to be even; the other must not spoil it.
@pytest.mark.parametrize(("world", "memory", "traffic"), [(2, 1.0, 1.0), (4, 2.5, 2.5)])
def test_a_replan_evens_the_real_tables(world, memory, traffic):
    told = workers.run(plan_and_plan_anew, 15, world_size=world, timeout=120)
    assert all(one == told[0] for one in told)
    before, before_told, after, foreseen = told[0]
    for (held, lookups), load in ((before, before_told), (after, foreseen)):
        # Of skewed shares of ids no two ranks' are equal, and maps grow in steps.
        assert list(load.bytes) == pytest.approx(held, rel=0.15)
        assert list(load.lookups) == pytest.approx(lookups, rel=0.15)
    assert most_over_mean(before[0]) > memory and most_over_mean(before[1]) > traffic
    assert most_over_mean(after[0]) < 1.15 and most_over_mean(after[1]) < 1.15
