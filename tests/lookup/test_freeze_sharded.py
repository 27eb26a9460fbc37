"""Frozen tables of sharded collections: every shard equals its unsharded part, which is frozen too."""

import random
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from pipeline_model import Run, batches, sharded_model
from pipeline_runs import (
    check_same_states,
    make_pipeline,
    no_fallback,
    results_of,
    shims_for,
)
from sharded_cases import Case, Table, shard_by_hand, usual_plan
from sharded_life import Beside, Forward, drifting_batch
from sharded_training import collection_of, shard
from shards import deep_but
from torchrec.distributed.types import ParameterSharding

import torchrec_dyn as dyn

LRU = dyn.LeastRecentlyUsed()
DIM = 4
PLAIN = dyn.DynamicTableConfig(initializer=dyn.Uniform(-0.1, 0.1))  # for any limit of a part
POLICIES: list[dict[str, Any]] = [
    {},
    {"eviction": (dyn.ExpireAfter(steps=2), LRU), "admission": dyn.AdmitAfter(2)},
    {"eviction": dyn.ExpireAfter(time=3), "unseen": "initial"},
    {},
]
ALL = ("table_wise", "row_wise", "column_wise")
# Ranks, ranks per node, True if pooled, sharding types, the optimizer, True if tables have policies.
PLANS: dict[str, tuple[int, int, bool, tuple[str, ...], str, bool]] = {
    "table": (2, 2, True, ("table_wise",), "ADAM", True),
    "rows": (2, 2, True, ("row_wise",), "EXACT_ROWWISE_ADAGRAD", True),
    "columns": (2, 2, True, ("column_wise", "two on a rank"), "EXACT_ADAGRAD", True),
    "rows, no policies": (2, 2, True, ("row_wise",), "ADAM", False),
    "mixed sequences": (2, 2, False, ALL, "ADAM", True),
    "sequences, no policies": (2, 2, False, ("row_wise", "table_wise"), "PARTIAL_ROWWISE_ADAM", False),
    "mixed of four": (4, 4, True, ALL, "ADAM", True),
    "nodes": (4, 2, True, ("table_row_wise", "table_column_wise", "grid_shard"), "ADAM", True),
    "sequences of four": (4, 4, False, ALL, "EXACT_SGD", True),
}  # fmt: skip


class FreezingBeside(Beside):
    """Freezes tables on both sides."""

    def freeze(self, name: str, is_frozen: bool) -> None:
        """Freezes or unfreezes a table."""
        handles = [one.table(name) for one in self.parts[name].collections]
        for handle in (self.collection.table(name), *handles):
            handle.freeze() if is_frozen else handle.unfreeze()
            assert handle.is_frozen == self.collection.table(name).is_frozen == is_frozen

    def teach_parts(self, forward: Forward, grads: dict[tuple[str, str], torch.Tensor]) -> None:
        """Runs the backward of the unsharded side, except for tables that were frozen."""
        for name, parts in self.parts.items():
            for outputs, places in forward.taken[name]:
                for feature in parts.features:
                    if outputs[feature].requires_grad:
                        grad = grads[name, feature] / self.world
                        grad = grad if self.case.pooled else grad[places[feature]]
                        outputs[feature].backward(grad, retain_graph=True)


def plan_of(kind: str, world: int, local: int, turn: int, rows: int) -> ParameterSharding:
    if kind == "two on a rank":
        return shard_by_hand("column_wise", [([0], 0, 2), ([1], 2, 1), ([0], 3, 1)], rows)
    return usual_plan(kind, DIM, world, local, turn, rows)


def case_of(world: int, local: int, pooled: bool, kinds: tuple[str, ...], optimizer: str,
            has_policies: bool) -> Case:  # fmt: skip
    rows = 160 if has_policies else 1000
    tables = [
        Table(
            f"t{turn}",
            [("a", "b", "c")[turn % 3]],
            plan_of(kinds[turn % len(kinds)], world, local, turn, rows),
            DIM,
            rows=rows,
            config=dyn.DynamicTableConfig(
                initializer=dyn.Uniform(-0.1, 0.1),
                **(POLICIES[turn % len(POLICIES)] if has_policies else {}),
            ),
        )
        for turn in range(5)
    ]
    fused = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.05}
    # With several nodes the ids of one row arrive in another order.
    return Case(tables, pooled=pooled, fused_params=fused, longest_bag=3, exact=world == local)


def freeze_at_times(case: Case, steps: int) -> dict[str, int]:
    """Trains and evaluates while tables are frozen and unfrozen; returns the trained steps of each table."""
    beside, dice = FreezingBeside(case), random.Random(7)
    frozen: dict[str, int] = dict.fromkeys((table.name for table in case.tables), 0)
    for step in range(steps):
        for number, name in enumerate(frozen):
            is_frozen = beside.collection.table(name).is_frozen
            whole = step % 7 == 3  # freeze all tables of a rank, or all tables
            if dice.random() < 0.3 or (whole and (number % 2 or step % 2)):
                beside.freeze(name, whole or not is_frozen)
        beside.set_time(step + 1)
        training = step % 6 != 5
        beside.model.train(training)
        for parts in beside.parts.values():
            for collection in parts.collections:
                collection.train(training)
        forward = beside.forward(drifting_batch(case, step))
        if training:
            beside.backward(forward)
            for name in frozen:
                frozen[name] += not beside.collection.table(name).is_frozen
        beside.check()
    return frozen


# The others repeat these on more ranks, or with fewer types.
EVERYDAY = ["rows", "columns", "rows, no policies", "mixed sequences", "nodes"]


@pytest.mark.everyday(2)
@pytest.mark.parametrize("plan", deep_but(EVERYDAY, PLANS))
def test_every_shard_freezes_as_the_unsharded_table(plan: str) -> None:
    world, local = PLANS[plan][:2]
    by_rank = workers.run(
        freeze_at_times, case_of(*PLANS[plan]), 11, world_size=world, local_size=local, timeout=300
    )
    assert all(1 < steps < 9 for told in by_rank for steps in told.values()), by_rank
    assert all(told == by_rank[0] for told in by_rank)


def one_rank_trains(pooled: bool) -> list[int]:
    """Rank 1 holds only frozen tables and still takes part in the collectives of backward; returns steps."""
    tables = [
        Table("t", ["a"], shard_by_hand("table_wise", [([0], 0, DIM)]), DIM, config=PLAIN),
        Table("u", ["b"], shard_by_hand("table_wise", [([1], 0, DIM)]), DIM, config=PLAIN),
    ]
    case = Case(tables, pooled=pooled)
    unsharded = collection_of(case)
    unsharded.table("u").freeze()
    beside = FreezingBeside(case, unsharded)
    beside.shard(unsharded)
    handle = beside.collection.table("u")
    assert handle.is_frozen and not beside.collection.table("t").is_frozen
    for part in beside.parts["u"].collections:
        part.table("u").freeze()
    steps = []
    for step in range(6):
        if step == 4:
            beside.freeze("u", False)
            beside.freeze("t", True)
        forward = beside.forward(drifting_batch(case, step))
        beside.backward(forward)
        steps.append(sum(shard.step for shard in beside.shards))
        if beside.shards[0].is_frozen and step < 4:
            assert beside.shards[0].num_rows == 0
    beside.check()
    return steps


@pytest.mark.parametrize("pooled", [True, False])
def test_a_rank_with_frozen_tables_only(pooled: bool) -> None:
    steps = workers.run(one_rank_trains, pooled, world_size=2)
    assert steps == [[1, 2, 3, 4, 4, 4], [0, 0, 0, 0, 1, 2]]


def check_outputs_may_be_written() -> None:
    """One rank, all tables frozen: nothing is sent, and the output is the output of the lookup."""
    case = Case([Table("t", ["a"], usual_plan("table_wise", DIM, 1, 1), DIM)])
    model = shard(case, collection_of(case))
    model.module.collection.table("t").freeze()
    output = model(drifting_batch(case, 0).mine).values()
    assert output.requires_grad
    output.add_(1.0).sum().backward()  # as TorchRec does after trained processors
    assert torch.equal(output, torch.ones_like(output))


def test_outputs_of_frozen_tables_may_be_written_into() -> None:
    workers.run(check_outputs_may_be_written, world_size=1)


def disagree(kind: str) -> list[str]:
    """Calls that differ by rank raise an error on each rank and freeze nothing; returns the messages."""
    case = Case([Table("t", ["a"], usual_plan(kind, DIM, 2, 2), DIM, config=PLAIN)])
    beside = FreezingBeside(case)
    beside.backward(beside.forward(drifting_batch(case, 0)))
    handle, said = beside.collection.table("t"), []
    with pytest.raises(ValueError) as caught:
        handle.unfreeze() if beside.rank else handle.freeze()
    said.append(str(caught.value))
    if kind != "table_wise":  # more than one rank has a shard
        for shard in beside.shards:
            shard.step += beside.rank
        with pytest.raises(ValueError) as caught:
            handle.freeze()
        said.append(str(caught.value))
        for shard in beside.shards:
            shard.step -= beside.rank
    assert not handle.is_frozen and not any(shard.is_frozen for shard in beside.shards)
    handle.freeze()
    handle.freeze()
    assert beside.collection.table("t").is_frozen
    assert all(shard.is_frozen for shard in beside.shards)
    dist.barrier()
    return said


@pytest.mark.parametrize("kind", ALL)
def test_ranks_that_disagree(kind: str) -> None:
    where = "DynamicEmbeddingBagCollection('collection').table('t')"
    for said in workers.run(disagree, kind, world_size=2):
        assert said[0] == (
            f"{where}.freeze: expected the same call on every rank, got {where}.unfreeze on rank 1."
        )
        if kind != "table_wise":
            assert said[1] == (
                f"{where}.freeze: expected every shard at the same training step, got [[1], [2]] "
                "by rank. Call it on all ranks between the same two batches; if an interrupt came into a "
                "batch, load a checkpoint first."
            )


def lonely_call() -> str:
    """Only rank 0 calls freeze, which fails after the group's time-out; returns the type of the error."""
    case = Case([Table("t", ["a"], usual_plan("row_wise", DIM, 2, 2), DIM, config=PLAIN)])
    beside = FreezingBeside(case)
    if beside.rank:
        return ""
    handle = beside.collection.table("t")
    with pytest.raises(RuntimeError) as caught:
        handle.freeze()
    assert not handle.is_frozen and not beside.shards[0].is_frozen
    return type(caught.value).__name__


def test_a_rank_that_does_not_call() -> None:
    assert workers.run(lonely_call, world_size=2, group_timeout=2.0)[0]


# Tables that are frozen and unfrozen between two batches of a pipeline, as in a plain loop

LIVES = [
    {"eviction": dyn.LeastRecentlyUsed()},
    {"admission": dyn.AdmitAfter(2), "eviction": (dyn.ExpireAfter(steps=2), dyn.LeastFrequentlyUsed())},
]  # fmt: skip
RUN = Run(
    ("table_wise", "row_wise", "column_wise"), ("row_wise", "table_wise", "column_wise"),
    rows=110, lives=LIVES, drift=40, steps=8,
)  # fmt: skip
# Batch -> the tables that are frozen (True) or unfrozen (False) before it.
SCHEDULE: dict[int, list[tuple[str, str, bool]]] = {
    0: [("sequences", "sequences_0", True)],
    2: [("pooled", "pooled_0", True), ("pooled", "pooled_1", True)],
    4: [("sequences", "sequences_0", False), ("pooled", "pooled_2", True)],
    6: [("pooled", "pooled_0", False), ("pooled", "pooled_2", False)],
}
TRAINED_STEPS = {"pooled_0": 4, "pooled_1": 2, "pooled_2": 6, "sequences_0": 4, "sequences_1": 8}


def train(name: str) -> dict[str, Any]:
    """Trains through a pipeline, or in a plain loop with "base"."""
    with shims_for(name), no_fallback():
        model = sharded_model(RUN)
        pipeline = make_pipeline(RUN, name, model)
        left, outputs = iter(batches(RUN)), []
        for step in range(RUN.steps):
            for collection, table, is_frozen in SCHEDULE.get(step, []):
                handle = getattr(model.module, collection).table(table)
                handle.freeze() if is_frozen else handle.unfreeze()
            outputs.append(pipeline.progress(left))
    return results_of(RUN, model, outputs)


@cache
def trained(name: str) -> Any:
    return workers.run(train, name, world_size=2)


@pytest.mark.parametrize("name", ["sparse_dist", "prefetch"])
def test_a_pipeline_freezes_as_the_plain_loop(name: str) -> None:
    for got, expected in zip(trained(name), trained("base"), strict=True):
        assert got["losses"] == expected["losses"]
        check_same_states(got["states"], expected["states"])
        for key, counts in got["stats"].items():
            assert counts["step"] == TRAINED_STEPS.get(key.split("/")[0], RUN.steps)
            assert counts["refused"] == expected["stats"][key]["refused"]
            assert counts["ids_seen"] == expected["stats"][key]["ids_seen"] > 0
