"""When and how often ids were seen, read across ranks, against the unsharded collection."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import EXTREME_IDS, Case, Table, shard_by_hand, usual_plan
from sharded_training import batches, collection_of, outputs_by_name, shard

import torchrec_dyn as dyn

SEQUENCE = ["table_wise", "column_wise", "row_wise"]
POOLED = [*SEQUENCE, "table_row_wise", "table_column_wise", "grid_shard"]
BOTH = [(True, kind) for kind in POOLED] + [(False, kind) for kind in SEQUENCE]
COUNTED = (
    *("rows", "step", "waiting", "ids_seen", "hits", "unseen", "refused", "inserted"),
    *("evicted_expired", "evicted_full", "erased", "counters_dropped"),
)
BY_STEPS = dyn.DynamicTableConfig(
    admission=dyn.AdmitAfter(count=3), eviction=dyn.ExpireAfter(steps=1)
)
BY_TIME = dyn.DynamicTableConfig(eviction=(dyn.ExpireAfter(time=25), dyn.LeastFrequentlyUsed()))


def case_of(pooled: bool, kind: str, world: int = 2) -> Case:
    tables = [Table(f"t{i}", ["ab"[i]], usual_plan(kind, 8, world, world, i)) for i in (0, 1)]
    return Case(tables, pooled=pooled, longest_bag=20)


def train(case: Case, dynamic: Any) -> tuple[Any, Any]:
    """The sharded and the unsharded collection after four steps, their clocks at 13, 23, 33, 43."""
    rank = dist.get_rank()
    whole = collection_of(case, dynamic=dynamic, fused_params=case.fused_params)
    model = shard(case, collection_of(case, dynamic=dynamic, fused_params=case.fused_params))
    for step in range(4):
        per_rank, together = batches(case, step)
        whole.set_time(13 + 10 * step)
        model.module.collection.set_time(13 + 10 * step - rank)  # the latest of all ranks counts
        for collection, batch in ((model, per_rank[rank]), (whole, together)):
            outputs = list(outputs_by_name(case, collection(batch)).values())
            torch.autograd.backward(outputs, [torch.zeros_like(v) for v in outputs])
    return model.module.collection, whole


def check_reads(sharded: Any, whole: Any) -> tuple[set[int], set[int]]:
    """Asserts that both tell the same of every id; returns the answers that came up."""
    rank = dist.get_rank()
    pool = torch.tensor([*EXTREME_IDS, *range(100, 140), *range(10_000, 10_040), 10**17, 5])
    pool = torch.cat([pool, torch.arange(40_000, 40_040)])
    generator = torch.Generator().manual_seed(rank)
    asked = pool[torch.randint(len(pool), (400 * (rank + 1),), generator=generator)]
    came: list[set[int]] = []
    for table in ("t0", "t1"):
        assert torch.equal(dyn.read_ids(sharded, table), dyn.read_ids(whole, table))
        for read in (dyn.read_last_seen, dyn.read_counts):
            for ids in (asked, asked[: 0 if rank else None]):
                answer = read(sharded, table, ids)
                assert answer.dtype == torch.int64
                assert torch.equal(answer, read(whole, table, ids)), read
            came.append(set(read(whole, table, asked).tolist()))
        mine = sharded.table(table)
        here = torch.isin(asked, mine.ids())
        last_seen = whole.table(table).last_seen(asked)
        assert torch.equal(mine.last_seen(asked), torch.where(here, last_seen, -1))
        counts = whole.table(table).count(asked)
        assert torch.equal(mine.count(asked)[here], counts[here])
        stats, expected = dyn.read_stats(sharded, table), dyn.read_stats(whole, table)
        assert {name: stats[name] for name in COUNTED} == {name: expected[name] for name in COUNTED}
    return came[0], came[1]


def read_lives(case: Case, dynamic: Any) -> None:
    sharded, whole = train(case, dynamic)
    last_seen, counts = check_reads(sharded, whole)
    if dynamic == BY_STEPS:
        assert last_seen == {-1, 3, 4} and {0, 1, 2, 3} <= counts  # rows, waiting ids and neither
        assert dyn.read_stats(whole, "t0")["evicted_expired"] > 0
    else:
        assert {-1, 23, 33, 43} <= last_seen and {0, 1, 2} <= counts
    rank = dist.get_rank()
    new = torch.tensor([5, 10**17, 100, -1])
    dyn.assign_rows(sharded, "t0", new[rank::2], torch.ones(2, 8))
    dyn.assign_rows(whole, "t0", new, torch.ones(4, 8))
    assert dyn.erase_rows(sharded, "t1", new[2 + rank : 3 + rank]) == dyn.erase_rows(
        whole, "t1", new[2:]
    )
    check_reads(sharded, whole)


@pytest.mark.parametrize("dynamic", [BY_STEPS, BY_TIME], ids=["steps", "time"])
@pytest.mark.parametrize("pooled, kind", BOTH)
def test_lives_do_not_depend_on_the_plan(pooled: bool, kind: str, dynamic: Any) -> None:
    workers.run(read_lives, case_of(pooled, kind), dynamic, world_size=2)


def test_lives_come_from_the_first_columns() -> None:
    pieces = [([1], 6, 2), ([0], 2, 4), ([1], 0, 2)]
    tables = [
        Table("t0", ["a"], shard_by_hand("column_wise", pieces)),
        Table("t1", ["b"], shard_by_hand("row_wise", [([1, 0], 0, 8)])),
    ]
    workers.run(read_lives, Case(tables, longest_bag=20), BY_STEPS, world_size=2)


def ask_a_table_without_life(case: Case) -> list[str]:
    dynamic = {"t0": dyn.DynamicTableConfig(), "t1": BY_STEPS}
    sharded = shard(
        case, collection_of(case, dynamic=dynamic, fused_params=case.fused_params)
    ).module.collection
    faults = []
    for read in (dyn.read_last_seen, dyn.read_counts):
        with pytest.raises(ValueError, match="keeps neither last_seen nor count") as caught:
            read(sharded, "t0", torch.arange(5 if dist.get_rank() == 2 else 0))
        faults.append(str(caught.value))
    assert dyn.read_last_seen(sharded, "t1", torch.arange(5)).tolist() == [-1] * 5
    return faults


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_a_table_without_life_is_refused_on_every_rank(kind: str) -> None:
    case = case_of(True, kind, 3)
    by_rank = workers.run(ask_a_table_without_life, case, world_size=3, timeout=30)
    assert by_rank == [by_rank[0]] * 3
