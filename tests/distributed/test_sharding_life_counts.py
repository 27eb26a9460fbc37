"""Occurrences of all ranks count together, those of one batch twice over included."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import Case, Table, usual_plan
from sharded_life import Beside, make_batch
from sharded_training import collection_of, outputs_by_name, shard

import torchrec_dyn as dyn

KINDS = [
    *((True, kind) for kind in ("table_wise", "column_wise", "table_row_wise")),
    *((False, kind) for kind in ("column_wise", "row_wise")),
]


def case_of(pooled: bool, kind: str, world: int = 3, **options: Any) -> Case:
    config = dyn.DynamicTableConfig(initializer=dyn.Constant(1.0), **options)
    plan = usual_plan(kind, 4, world, world, turn=1)
    return Case([Table("t", ["a"], plan, 4, config=config)], pooled=pooled)


def shown(case: Case, model: Any, bags: list[list[list[int]]]) -> list[float]:
    """Trains on bags by rank; what this rank reads, one number a bag or id: all rows are ones."""
    out = outputs_by_name(case, model(make_batch(case, [[one] for one in bags]).mine))["a"]
    assert torch.equal(out, out[:, :1].expand_as(out))
    out.sum().backward()
    return out[:, 0].tolist()


def admit_over_ranks(case: Case) -> list[list[float]]:
    case.fused_params["learning_rate"] = 0.0
    beside = Beside(case)
    seen = [
        shown(case, beside.model, [[[5, -7]], [[5]], [[5]]]),  # 5: once on each; -7: once in all
        shown(case, beside.model, [[[]], [[-7]], [[-7, 8]]]),  # -7: its third on the last
        shown(case, beside.model, [[[8, 8]], [[]], [[9, 9]]]),  # 8: twice on one, once before
        shown(case, beside.model, [[[9, 9]], [[9]], [[]]]),  # 9: more than it takes
    ]
    expected = {5: 3, -7: 3, 8: 3, 9: 5}
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, [one.ids().tolist() for one in beside.shards])
    assert {i for shards in held for ids in shards for i in ids} == set(expected)
    for one in beside.shards:
        assert one.count(one.ids()).tolist() == [expected[i] for i in one.ids().tolist()]
        assert one.stats()["waiting"] == 0
    return seen


@pytest.mark.parametrize("pooled, kind", KINDS)
def test_ids_are_admitted_by_the_occurrences_of_all_ranks(pooled: bool, kind: str) -> None:
    case = case_of(pooled, kind, admission=dyn.AdmitAfter(3))
    first, second, third = workers.run(admit_over_ranks, case, world_size=3)
    if pooled:
        assert first == [[1.0], [0.0], [2.0], [2.0]]
        assert second == [[1.0], [1.0], [0.0], [1.0]]
        assert third == [[1.0], [1.0], [0.0], [0.0]]
    else:
        assert first == [[1.0, 0.0], [], [1.0, 1.0], [1.0, 1.0]]
        assert second == [[1.0], [1.0], [], [1.0]]
        assert third == [[1.0], [1.0, 0.0], [0.0, 0.0], []]


def count_over_ranks(case: Case) -> dict[int, int]:
    beside = Beside(case)
    batch = [[[[1, 2, 2]]], [[[2, 1, 1, 1]]], [[[3]]]]
    for _ in range(2):
        beside.step(make_batch(case, batch))
        beside.check()
    counts = {}
    for one in beside.shards:
        ids = one.ids()
        counts.update(zip(ids.tolist(), one.count(ids).tolist(), strict=True))
        assert one.last_seen(ids).tolist() == [2] * len(ids)
    return counts


@pytest.mark.parametrize("pooled, kind", KINDS)
def test_every_occurrence_of_every_rank_counts(pooled: bool, kind: str) -> None:
    case = case_of(pooled, kind, eviction=dyn.LeastFrequentlyUsed())
    counts: dict[int, int] = {}
    for of_rank in workers.run(count_over_ranks, case, world_size=3):
        counts.update(of_rank)
    assert counts == {1: 8, 2: 6, 3: 2}


def draw(case: Case) -> list[int]:
    """The ids on this rank after four steps of 40 ids that occur once."""
    model = shard(case, collection_of(case))
    world = dist.get_world_size()
    for step in range(4):
        ids = list(range(100 * step, 100 * step + 40))
        shown(case, model, [[ids[rank::world]] for rank in range(world)])
    return model.module.collection.table("t").ids().tolist()


def test_draws_are_those_of_any_plan() -> None:
    by_plan = []
    for world, kind in ((2, "column_wise"), (3, "row_wise"), (3, "table_wise")):
        case = case_of(True, kind, admission=dyn.AdmitWithProbability(0.5), world=world)
        by_rank = workers.run(draw, case, world_size=world)
        if kind == "column_wise":
            assert by_rank[0] == by_rank[1]
        by_plan.append(set().union(*by_rank))
    assert by_plan == [by_plan[0]] * 3
    assert 40 < len(by_plan[0]) < 120
