"""Sharded collections on a device train with the bits of the CPU, under every plan."""

import pytest
import workers
from mock_device import MockDevice
from sharded_cases import POOLED, SEQUENCE, Case, Table, usual_plan
from sharded_twins import ShardedTwins
from shards import deep_but

import torchrec_dyn as dyn


def tables(plans, world=2, **options):
    """Returns a table of two features for each plan, on nodes of 2 ranks; all have one feature in common."""
    return [
        Table(plan, [plan, "shared"], usual_plan(plan, 8, world, 2, turn), **options)
        for turn, plan in enumerate(plans)
    ]


def averaged(gradient):
    return dyn.DynamicTableConfig(gradient=gradient)


# So few frames that rows leave them in each step.
HOST = dyn.DynamicTableConfig(storage=dyn.HostMemory(12), eviction=dyn.LeastRecentlyUsed())


CASES = {
    "pooled": Case(tables(POOLED)),
    "of mean": Case(tables(POOLED, pooling="MEAN"), batch_sizes=[3, 5]),
    "of max": Case(tables(POOLED, pooling="MAX"), batch_sizes=[3, 5], qcomm="FP16"),
    "of max, by senders": Case(
        tables(POOLED, pooling="MAX", config=averaged("mean_over_senders")), variable=True
    ),
    "weighted": Case(tables(POOLED), weighted=True, batch_sizes=[4, 0]),
    "of variable batches": Case(tables(POOLED, pooling="MEAN"), variable=True),
    "of sequences": Case(tables(SEQUENCE), pooled=False, batch_sizes=[4, 0]),
    "of variable sequences": Case(tables(SEQUENCE), pooled=False, variable=True),
    "of each id once": Case(tables(SEQUENCE), pooled=False, dedup=True),
    "by senders": Case(tables(POOLED, config=averaged("mean_over_senders"))),
    "by sums": Case(tables(["row_wise"], config=averaged("sum")), variable=True),
    "in half precision": Case(tables(POOLED), qcomm="FP16"),
    "in host memory": Case(tables(POOLED, config=HOST), steps=4, weighted=True, longest_bag=8),
    "of sequences in host memory": Case(tables(SEQUENCE, config=HOST), pooled=False, steps=4),
}


# Each plan, batch and way of sending is in one of these.
EVERYDAY = (
    "of max", "of max, by senders", "weighted", "of variable batches", "of variable sequences",
    "of each id once", "by senders", "in half precision", "in host memory", "of sequences in host memory",
)  # fmt: skip


def train_twins(case: Case) -> int:
    """Trains a case on both devices; returns the rows on this rank."""
    with MockDevice() as device:
        twins = ShardedTwins(device, case)
        for step in range(case.steps):
            twins.train(step)
        twins.check_notes()
        return twins.compare()


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", deep_but(EVERYDAY, CASES))
def test_a_collection_trains_on_a_device_with_the_bits_of_the_cpu(name):
    assert sum(workers.run(train_twins, CASES[name], world_size=2)) > 0


NODE_PLANS = ["table_row_wise", "grid_shard"]
ON_TWO_NODES = {
    "of max": Case(tables(NODE_PLANS, 4, pooling="MAX"), variable=True, batch_sizes=[4, 2, 5, 3]),
    "of nodes": Case(tables(NODE_PLANS, 4), weighted=True, variable=True, batch_sizes=[4, 2, 5, 3]),
    "of mean": Case(tables(POOLED, 4, pooling="MEAN"), batch_sizes=[3, 0, 5, 1]),
    "in half precision": Case(tables(POOLED, 4), qcomm="FP16"),
    "of sequences": Case(tables(SEQUENCE, 4), pooled=False, dedup=True),
}


@pytest.mark.parametrize("name", deep_but(["of nodes"], ON_TWO_NODES))
def test_a_collection_trains_on_devices_of_two_nodes(name):
    ranks = {"world_size": 4, "local_size": 2}
    assert min(workers.run(train_twins, ON_TWO_NODES[name], **ranks)) > 0
