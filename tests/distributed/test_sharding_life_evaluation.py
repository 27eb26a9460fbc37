"""Evaluation of sharded tables with a life changes nothing; rows trained before sharding keep their life."""

from typing import Any

import pytest
import torch
import workers
from sharded_cases import Case, Table, shard_by_hand
from sharded_life import Beside, drifting_batch
from sharded_training import collection_of, outputs_by_name

import torchrec_dyn as dyn

LIVES: dict[str, dict[str, Any]] = {
    "timed": {"admission": dyn.AdmitAfter(3),
              "eviction": (dyn.ExpireAfter(time=8), dyn.LeastFrequentlyUsed())},
    "aged": {"admission": dyn.AdmitWithProbability(0.6), "unseen": "initial",
             "eviction": (dyn.ExpireAfter(steps=5), dyn.LeastRecentlyUsed())},
}  # fmt: skip
PLANS: dict[str, tuple[str, list[tuple[list[int], int, int]]]] = {
    "table_wise": ("table_wise", [([1], 0, 6)]),
    "column_wise": ("column_wise", [([1], 4, 2), ([0], 2, 2), ([1], 0, 2)]),
    "row_wise": ("row_wise", [([0, 1], 0, 6)]),
}


def case_of(plan: str, limit: int, pooled: bool = True) -> Case:
    tables = [
        Table(
            name,
            ["a", "b"],
            shard_by_hand(*PLANS[plan], rows=limit),
            6,
            rows=limit,
            config=dyn.DynamicTableConfig(initializer=dyn.Uniform(-0.1, 0.1), **life),
        )
        for name, life in LIVES.items()
    ]
    return Case(tables, pooled=pooled, longest_bag=20)


def states(beside: Beside) -> list[dict[str, bytes]]:
    return [
        {
            **{key: value.numpy().tobytes() for key, value in one.export_state().items()},
            "stats": repr(one.stats()).encode(),
            "clock": repr(one.time).encode(),
        }
        for one in beside.shards
    ]


def evaluate(case: Case) -> int:
    """Evaluates on known and unseen ids, with gradients and without, and trains on."""
    beside = Beside(case)
    for step in range(8):
        beside.set_time(step)
        beside.step(drifting_batch(case, step))
    before, unseen = states(beside), 0
    beside.model.eval()
    for parts in beside.parts.values():
        for collection in parts.collections:
            collection.eval()
    for step in range(6, 12):
        batch = drifting_batch(case, step)
        with torch.set_grad_enabled(step % 2 == 0):
            beside.forward(batch)  # the outputs are those of the unsharded tables
        assert states(beside) == before
        known = torch.cat([torch.zeros(0).long(), *(one.ids() for one in beside.shards)])
        unseen += int((~torch.isin(batch.together.values(), known)).sum())
    beside.model.train()
    for parts in beside.parts.values():
        for collection in parts.collections:
            collection.train()
    for step in range(8, 16):
        beside.step(drifting_batch(case, step))
        beside.check()
    return unseen


@pytest.mark.parametrize("plan, pooled", [("column_wise", True), ("row_wise", False)])
def test_evaluation_changes_nothing(plan: str, pooled: bool) -> None:
    assert min(workers.run(evaluate, case_of(plan, 150, pooled), world_size=2)) > 20


def train_then_shard(case: Case, before: int) -> list[int]:
    """Trains unsharded, shards, and trains on beside the parts, which have seen all of it."""
    unsharded = collection_of(case, fused_params=case.fused_params)
    beside = Beside(case, unsharded)
    for step in range(before):
        unsharded.set_time(step)
        beside.set_time_of_parts(step)
        batch = drifting_batch(case, step)
        forward = beside.feed_parts(batch)
        named = beside.named(outputs_by_name(case, unsharded(batch.together)))
        grads = beside.grads(forward)
        outputs = [output for *_, output in named]
        torch.autograd.backward(outputs, [grads[n, f] / beside.world for n, f, _ in named])
        beside.teach_parts(forward, grads)
    beside.shard(unsharded)
    beside.check(stats=False)
    carried = [one.num_rows + int(one.stats()["waiting"]) for one in beside.shards]
    for step in range(before, before + 12):
        if step % 4 == 0:
            beside.set_time(step)
        beside.step(drifting_batch(case, step))
        beside.check(stats=False)
    return carried


# Before they were sharded the rows had one limit, of which the parts know nothing: under row-wise it is never
# reached then.
@pytest.mark.parametrize("plan, limit, before", [
    ("table_wise", 150, 12), ("column_wise", 150, 12), ("row_wise", 400, 5),
])  # fmt: skip
def test_a_life_before_sharding_goes_on(plan: str, limit: int, before: int) -> None:
    carried = workers.run(train_then_shard, case_of(plan, limit), before, world_size=2)
    assert min(min(one) for one in carried if one) > 40
