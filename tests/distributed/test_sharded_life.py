"""Full tables: whatever the plan, every shard lives as the unsharded table does."""

import gc
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from life_cases import stream_stats
from policy_cases import ByTime, Dense, Often, SmallNorm
from sharded_cases import Case, Table, shard_by_hand
from sharded_life import Beside, Forward, drifting_batch
from sharded_training import collection_of, outputs_by_name
from sharded_training import tables_of as local_tables
from shards import deep_but

import torchrec_dyn as dyn

LRU, LFU = dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed()
FADING = dyn.LeastFrequentlyUsed(half_life_steps=4)
NORM: tuple[dict[str, Any], int, list[str]] = ({"eviction": SmallNorm()}, 135, ["evicted_full"])
NEGATIVES = (dyn.FeatureUse("b", inserts=False, counts=False),)

# Table -> policies, limit, and what must have happened to it at the end of a run. Ranks that share 150 rows
# have fewer each: 145 of two, 107 of three.
LIVES: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "recent": ({"eviction": LRU}, 150, ["evicted_full"]),
    "frequent": ({"eviction": (dyn.ExpireAfter(steps=18), LFU)}, 150,
                 ["evicted_full", "evicted_expired"]),
    "timed": ({"admission": dyn.AdmitAfter(2), "eviction": (dyn.ExpireAfter(time=12), LRU)}, 1000,
              ["evicted_expired", "counters_expired"]),
    "after": ({"admission": dyn.AdmitAfter(2), "eviction": LRU}, 135,
              ["refused", "waiting", "counters_dropped", "evicted_full"]),
    "after_few": ({"admission": dyn.AdmitAfter(14, counters=40), "unseen": "initial",
                   "eviction": dyn.ExpireAfter(steps=5)}, 1000,
                  ["refused", "waiting", "counters_dropped", "evicted_expired"]),
    "chance": ({"admission": dyn.AdmitWithProbability(0.6), "unseen": "initial", "eviction": FADING,
                "features": (dyn.FeatureUse("a", counts=False, trains=False),)},
                135, ["refused", "evicted_full"]),
    "scored": ({"admission": dyn.AdmitAfter(2), "eviction": dyn.LowestScore(half_life_time=5)}, 135,
               ["refused", "evicted_full"]),
    "own": ({"admission": Often(3, counters=24), "eviction": (dyn.ExpireAfter(time=25), ByTime())},
            110, ["refused", "waiting", "counters_dropped", "evicted_full"]),
    "own_alone": ({"eviction": Dense()}, 135, ["evicted_full"]),
    "negatives": ({"eviction": LRU, "features": NEGATIVES}, 90, ["evicted_full", "refused"]),
}  # fmt: skip
UNDER_EVERY_PLAN = [*LIVES]
LIVES |= {"norm": NORM, "norm_of_rows": NORM, "norm_of_one": NORM}  # reads whole rows

DIM = 6
Plan = tuple[str, list[tuple[list[int], int, int]]]
TABLE: Plan = ("table_wise", [([1], 0, DIM)])
TURNED: Plan = ("column_wise", [([0], 0, 2), ([1], 2, 2), ([0], 4, 2)])
UNEVEN: Plan = ("column_wise", [([1], 3, 3), ([0], 0, 1), ([1], 1, 2)])
NODE: Plan = ("table_column_wise", [([2], 4, 2), ([0], 2, 2), ([2], 0, 2)])
ROWS: Plan = ("row_wise", [([0, 1], 0, DIM)])
ROWS_OF_3: Plan = ("row_wise", [([0, 1, 2], 0, DIM)])
NODE_ROWS: Plan = ("table_row_wise", [([0, 1, 2], 0, DIM)])
GRID: Plan = ("grid_shard", [([0, 1, 2], 0, 4), ([0, 1, 2], 4, 2)])
GRID_OF_4: Plan = ("grid_shard", [([2, 3], 0, 4), ([0, 1], 4, 2)])

# Ranks, ranks of a node, whether pooled, and plans that the tables take in turn.
MIXED: dict[str, tuple[int, int, bool, list[Plan]]] = {
    "columns on 0, 1, 0": (2, 2, True, [TURNED]),
    "columns on 2, 0, 2, listed backwards": (3, 3, True, [NODE]),
    "rows": (2, 2, True, [ROWS]),
    "all kinds": (3, 3, True, [UNEVEN, NODE_ROWS, ROWS_OF_3, TABLE, GRID]),
    "sequences": (2, 2, False, [TURNED, ROWS, TABLE]),
}
EACH: dict[str, tuple[int, int, bool, list[Plan]]] = {
    "table-wise": (2, 2, True, [TABLE]),
    "uneven columns": (2, 2, True, [UNEVEN]),
    "table-row-wise": (3, 3, True, [NODE_ROWS]),
    "rows of three": (3, 3, True, [ROWS_OF_3]),
    "grid": (3, 3, True, [GRID]),
    "grid of two nodes": (4, 2, True, [GRID_OF_4]),
    "sequence columns": (3, 3, False, [TURNED]),
    "sequence rows": (3, 3, False, [ROWS_OF_3]),
}
ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.02}


def tables_of(plans: list[Plan], lives: list[str], pooling: str = "SUM") -> list[Table]:
    return [
        Table(
            name,
            ["a", "b"],
            shard_by_hand(*plans[number % len(plans)], rows=limit),
            DIM,
            pooling,
            rows=limit,
            config=dyn.DynamicTableConfig(initializer=dyn.Uniform(-0.1, 0.1), **options),
        )
        for number, (name, (options, limit, _)) in enumerate((name, LIVES[name]) for name in lives)
    ]


def live(case: Case, steps: int) -> dict[str, dict[str, float]]:
    """Trains, edits, ages; every shard must be as its unsharded part, and so must every output."""
    with pytest.MonkeyPatch.context() as patch:
        # So the default number of counters follows the rows of these small tables.
        patch.setattr("torchrec_dyn.knobs.LEAST_COUNTERS", 8)
        return live_with_few_counters(case, steps)


def live_with_few_counters(case: Case, steps: int) -> dict[str, dict[str, float]]:
    beside = Beside(case)
    for step in range(steps):
        if step % 3 == 0:
            beside.set_time(step + 1)
        if step % 11 == 10:
            beside.edit(torch.arange(15 * step, 15 * step + 60))
        if step % 15 == 14:  # some that had gone, and more than the limit holds
            ids = torch.arange(3 * step, 15 * step, 4)
            beside.edit(ids, torch.linspace(-1, 1, len(ids) * DIM).view(-1, DIM))
        beside.step(drifting_batch(case, step))
        if step % 3 == 1 or step == steps - 1:  # before the next clock: it lasts, as the counts do
            beside.check()
    return {table.name: stream_stats(table) for table in beside.shards}


def check_lives(
    plan: tuple[int, int, bool, list[Plan]],
    lives: list[str],
    steps: int,
    pooling: str = "SUM",
    **options: Any,
) -> None:
    world, local, pooled, plans = plan
    options["exact"] = world == local  # over nodes, ids of one row come in another order
    case = Case(tables_of(plans, lives, pooling), pooled=pooled, longest_bag=48 // world, **options)
    by_rank = workers.run(live, case, steps, world_size=world, local_size=local, timeout=900)
    for stats in by_rank:
        for name, counts in stats.items():
            assert counts["step"] == steps
            idle = [key for key in LIVES[name][2] if not counts[key]]
            assert not idle, f"{name}: {counts}"
    assert any(by_rank)


# Plan, lives, steps, whether the optimizer is Adam. "all kinds" has columns of three ranks, too.
EVERYDAY = [
    ("columns on 0, 1, 0", ["recent", "timed", "after", "scored", "own"], 20, False),
    ("all kinds", ["frequent", "after_few", "own", "scored", "own_alone"], 23, False),
    ("all kinds", ["chance", "negatives"], 23, False),
]
SHORT = [(plan, UNDER_EVERY_PLAN, 26, bool(turn % 2)) for turn, plan in enumerate(MIXED)]
LONG = [(plan, UNDER_EVERY_PLAN, 200, bool(turn % 2)) for turn, plan in enumerate([*MIXED, *EACH])]


@pytest.mark.parametrize(
    ("plan", "lives", "steps", "adam"), deep_but(EVERYDAY, [*EVERYDAY, *SHORT, *LONG])
)
def test_every_shard_lives_as_the_unsharded_table(
    plan: str, lives: list[str], steps: int, adam: bool
) -> None:
    check_lives({**MIXED, **EACH}[plan], lives, steps, **{"fused_params": ADAM} if adam else {})


def test_tables_of_a_maximum_live_as_the_unsharded_table() -> None:
    lives = ["recent", "scored", "negatives", "timed", "chance"]  # one under each plan
    check_lives(MIXED["all kinds"], lives, 26, "MAX")


# A score of whole rows needs plans that do not cut them.
WHOLE_ROWS: list[Plan] = [TABLE, ROWS, ("column_wise", TABLE[1])]


def test_scores_of_rows_are_the_same_wherever_rows_are_whole() -> None:
    check_lives((2, 2, False, WHOLE_ROWS), ["norm", "norm_of_rows", "norm_of_one"], 20)


def move(case: Case, plans: list[Plan]) -> None:
    """Trains and moves the tables to one plan after the other: they live on as the unsharded ones."""
    beside, steps = Beside(case), iter(range(8 * len(plans)))
    for plan in plans:
        for step in itertools.islice(steps, 8):
            beside.set_time(step)
            beside.step(drifting_batch(case, step))
            beside.check(stats=False)
        changed = {table.name: shard_by_hand(*plan, rows=table.rows) for table in case.tables}
        model: Any = beside.model
        model.sharders[0].reshard(beside.collection, changed, model._env, model.device)
        tables = [replace(table, plan=changed[table.name]) for table in case.tables]
        beside.case, beside.shards = replace(case, tables=tables), local_tables(beside.collection)
        beside.check(stats=False)


def test_tables_of_own_policies_move() -> None:
    case = Case(tables_of([TABLE], ["own", "own_alone"]), longest_bag=24)
    workers.run(move, case, [TURNED, TABLE, UNEVEN, TURNED], world_size=2)


# Evaluation changes nothing; rows trained before sharding keep their life

EVALUATED_LIVES: dict[str, dict[str, Any]] = {
    "timed": {"admission": dyn.AdmitAfter(3),
              "eviction": (dyn.ExpireAfter(time=8), dyn.LeastFrequentlyUsed())},
    "aged": {"admission": dyn.AdmitWithProbability(0.6), "unseen": "initial",
             "eviction": (dyn.ExpireAfter(steps=5), dyn.LeastRecentlyUsed())},
}  # fmt: skip
SIMPLE_PLANS: dict[str, tuple[str, list[tuple[list[int], int, int]]]] = {
    "table_wise": ("table_wise", [([1], 0, 6)]),
    "column_wise": ("column_wise", [([1], 4, 2), ([0], 2, 2), ([1], 0, 2)]),
    "row_wise": ("row_wise", [([0, 1], 0, 6)]),
}


def case_to_evaluate(plan: str, limit: int, pooled: bool = True) -> Case:
    tables = [
        Table(
            name,
            ["a", "b"],
            shard_by_hand(*SIMPLE_PLANS[plan], rows=limit),
            6,
            rows=limit,
            config=dyn.DynamicTableConfig(initializer=dyn.Uniform(-0.1, 0.1), **life),
        )
        for name, life in EVALUATED_LIVES.items()
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
    assert min(workers.run(evaluate, case_to_evaluate(plan, 150, pooled), world_size=2)) > 20


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
@pytest.mark.everyday(2)
@pytest.mark.parametrize("plan, limit, before", [
    ("table_wise", 150, 12), ("column_wise", 150, 12), ("row_wise", 400, 5),
])  # fmt: skip
def test_a_life_before_sharding_goes_on(plan: str, limit: int, before: int) -> None:
    carried = workers.run(train_then_shard, case_to_evaluate(plan, limit), before, world_size=2)
    assert min(min(one) for one in carried if one) > 40


# Who comes and goes depends on the stream alone, never on when Python frees a graph

EVICTIONS = {
    "recent": dyn.LeastRecentlyUsed(),
    "frequent": (dyn.ExpireAfter(steps=4), dyn.LeastFrequentlyUsed()),
}
COLUMNS = [([0], 0, 2), ([1], 2, 2), ([0], 4, 2)]


def case_of_graphs(kind: str = "column_wise", pieces: Any = COLUMNS, **options: Any) -> Case:
    tables = [
        Table(
            name,
            ["a", "b"],
            shard_by_hand(kind, pieces, rows=100),
            6,
            rows=100,
            config=dyn.DynamicTableConfig(
                initializer=dyn.Uniform(-0.1, 0.1), admission=dyn.AdmitAfter(2), eviction=eviction
            ),
        )
        for name, eviction in EVICTIONS.items()
    ]
    return Case(tables, longest_bag=20, **options)


def withheld(beside: Beside) -> list[float]:
    gc.collect()  # TorchRec's requests stand in a cycle with the graph of their forward
    return [one.stats()["withheld"] for one in beside.shards]


def keep_outputs(case: Case) -> tuple[list[float], dict[str, list[list[int]]]]:
    """Rank 0 keeps every output for the whole run; every third forward has no backward."""
    beside = Beside(case)
    kept: list[Forward] = []
    for step in range(20):
        forward = beside.forward(drifting_batch(case, step))
        if step % 3:
            beside.backward(forward)
        if dist.get_rank() == 0:
            kept.append(forward)
        del forward
        beside.check()
    ids: dict[str, list[list[int]]] = {name: [] for name in EVICTIONS}
    for one in beside.shards:
        ids[one.name].append(one.ids().tolist())
    return withheld(beside), ids


def test_one_rank_keeps_outputs_alive() -> None:
    (kept, ids), (dropped, other_ids) = workers.run(keep_outputs, case_of_graphs(), world_size=2)
    assert min(kept) > 100
    assert max(dropped) == 0
    for name in EVICTIONS:
        assert len(other_ids[name]) == 1 and ids[name] == other_ids[name] * 2


def never_backward(case: Case) -> list[float]:
    beside = Beside(case)
    kept = []
    for step in range(16):
        kept.append(beside.forward(drifting_batch(case, step)))
        beside.check()
    rows_then = withheld(beside)
    # The newest first: rows of ids that left learn as orphans, and nobody sees it.
    for forward in kept[::-2]:
        beside.backward(forward)
        beside.check()
    assert all(one.stats()["late_grads"] > 0 for one in beside.shards)
    del kept, forward
    assert withheld(beside) == [0] * len(beside.shards)
    for step in range(16, 18):
        beside.step(drifting_batch(case, step))
        beside.check()
    return rows_then


PLANS = [
    ("column_wise", COLUMNS),
    ("table_wise", [([1], 0, 6)]),
    ("row_wise", [([0, 1], 0, 6)]),
]


@pytest.mark.parametrize(
    "kind, pieces", [PLANS[0], *(pytest.param(*one, marks=pytest.mark.deep) for one in PLANS[1:])]
)
def test_backward_comes_at_the_end_or_never(kind: str, pieces: Any) -> None:
    rows = workers.run(never_backward, case_of_graphs(kind, pieces), world_size=2)
    assert all(min(one) > 30 for one in rows if one)
