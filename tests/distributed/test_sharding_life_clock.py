"""The clock of a sharded collection: set by all ranks at once, the same on all, refused by all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import Case, Table, usual_plan
from sharded_life import Beside, drifting_batch, make_batch

import torchrec_dyn as dyn

KINDS = [(True, "table_wise"), (True, "column_wise"), (False, "row_wise")]
TIMED = dyn.DynamicTableConfig(
    initializer=dyn.Uniform(-0.1, 0.1), eviction=dyn.ExpireAfter(time=100)
)


def case_of(pooled: bool, kind: str, world: int) -> Case:
    # One table only: under table-wise there are ranks without a shard.
    plan = usual_plan(kind, 4, world, world, turn=1)
    return Case([Table("t", ["a", "b"], plan, 4, config=TIMED)], pooled=pooled)


def latest_counts(case: Case) -> None:
    beside = Beside(case)
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = [list(range(one, 60, world)) for one in range(world)]
    beside.step(make_batch(case, [[[[]], [one]] for one in ids]))
    for time, left in ((50, 60), (150, 60), (151, 5), (151, 5), (252, 0)):
        # Another rank is the latest each time.
        beside.collection.set_time(time if rank == time % world else max(0, time - 1 - rank))
        beside.set_time_of_parts(time)
        batch = [[[[]], [[]]] for _ in range(world)]
        if time == 150:
            batch[0] = [[[]], [[0, 1, 2, 3, 4]]]
        beside.step(make_batch(case, batch))
        beside.check()
        assert sum(held_ids(beside)) == left, time


def held_ids(beside: Beside) -> list[int]:
    """How many ids each rank holds of those of the first columns."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, sum(s.num_rows for s in beside.shards if not s.first_column))
    return held


@pytest.mark.parametrize("pooled, kind", KINDS)
def test_the_latest_of_all_ranks_counts(pooled: bool, kind: str) -> None:
    workers.run(latest_counts, case_of(pooled, kind, 3), world_size=3)


def refuse_times(case: Case, liar: int) -> None:
    beside = Beside(case)
    rank = dist.get_rank()
    beside.set_time(1000)
    beside.step(drifting_batch(case, 0))
    before = [one.export_state() for one in beside.shards]
    bad: list[Any] = [-1, 1.5, True, None, 2**63, "now", torch.tensor(2000)]
    for time in bad:
        with pytest.raises(ValueError, match=rf"set_time\(rank={liar}\): expected an integer"):
            beside.collection.set_time(time if rank == liar else 2000)
    with pytest.raises(ValueError, match="not before 1000, got 999"):
        beside.collection.set_time(999 - rank)
    for one, state in zip(beside.shards, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in one.export_state().items())
    beside.set_time(1000)  # the clocks still show it
    beside.step(drifting_batch(case, 1))
    beside.check()


# Under table-wise rank 0 has no shard.
@pytest.mark.parametrize("kind, liar", [("table_wise", 0), ("table_wise", 1), ("row_wise", 2)])
def test_a_bad_time_of_one_rank_is_refused_by_all(kind: str, liar: int) -> None:
    workers.run(refuse_times, case_of(True, kind, 3), liar, world_size=3)
