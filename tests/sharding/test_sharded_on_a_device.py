"""Sharded collections on a device train with the bits of the CPU, under every plan."""

import pytest
import workers
from sharded_cases import Case, Table, usual_plan
from sharded_twins import train_twins

import torchrec_dyn as dyn

SEQUENCE_PLANS = ["table_wise", "row_wise", "column_wise"]
PLANS = [*SEQUENCE_PLANS, "table_row_wise", "table_column_wise", "grid_shard"]


def tables(plans, world=2, **options):
    """Returns a table of two features for each plan, on nodes of 2 ranks; all have one feature in common."""
    return [
        Table(plan, [plan, "shared"], usual_plan(plan, 8, world, 2, turn), **options)
        for turn, plan in enumerate(plans)
    ]


def averaged(gradient):
    return dyn.DynamicTableConfig(gradient=gradient)


CASES = {
    "pooled": Case(tables(PLANS)),
    "of mean": Case(tables(PLANS, pooling="MEAN"), batch_sizes=[3, 5]),
    "weighted": Case(tables(PLANS), weighted=True, batch_sizes=[4, 0]),
    "of variable batches": Case(tables(PLANS, pooling="MEAN"), variable=True),
    "of sequences": Case(tables(SEQUENCE_PLANS), pooled=False, batch_sizes=[4, 0]),
    "of variable sequences": Case(tables(SEQUENCE_PLANS), pooled=False, variable=True),
    "of each id once": Case(tables(SEQUENCE_PLANS), pooled=False, dedup=True),
    "by senders": Case(tables(PLANS, config=averaged("mean_over_senders"))),
    "by sums": Case(tables(["row_wise"], config=averaged("sum")), variable=True),
    "in half precision": Case(tables(PLANS), qcomm="FP16"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_collection_trains_on_a_device_with_the_bits_of_the_cpu(name):
    assert sum(workers.run(train_twins, CASES[name], world_size=2)) > 0


NODE_PLANS = ["table_row_wise", "grid_shard"]
ON_TWO_NODES = {
    "of nodes": Case(tables(NODE_PLANS, 4), weighted=True, variable=True, batch_sizes=[4, 2, 5, 3]),
    "of mean": Case(tables(PLANS, 4, pooling="MEAN"), batch_sizes=[3, 0, 5, 1]),
    "in half precision": Case(tables(PLANS, 4), qcomm="FP16"),
    "of sequences": Case(tables(SEQUENCE_PLANS, 4), pooled=False, dedup=True),
}
EVERYDAY = "of nodes"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == EVERYDAY else pytest.mark.deep)
        for name in ON_TWO_NODES
    ],
)
def test_a_collection_trains_on_devices_of_two_nodes(name):
    ranks = {"world_size": 4, "local_size": 2}
    assert min(workers.run(train_twins, ON_TWO_NODES[name], **ranks)) > 0
