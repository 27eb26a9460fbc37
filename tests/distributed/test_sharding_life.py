"""A long stream under full tables: whatever the plan, every shard lives as the unsharded table does."""

from typing import Any

import pytest
import torch
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, shard_by_hand
from sharded_life import Beside, drifting_batch, stream_stats

import torchrec_dyn as dyn

LRU, LFU = dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed()

# Table -> policies, limit, and what must have happened to it at the end of a run. Ranks that share 150 rows
# have fewer each: 145 of two, 107 of three.
LIVES: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "recent": ({"eviction": LRU}, 150, ["evicted_full"]),
    "frequent": ({"eviction": (dyn.ExpireAfter(steps=18), LFU)}, 150,
                 ["evicted_full", "evicted_expired"]),
    "timed": ({"eviction": (dyn.ExpireAfter(time=12), LRU)}, 1000, ["evicted_expired"]),
    "after": ({"admission": dyn.AdmitAfter(2), "eviction": LRU}, 135,
              ["refused", "waiting", "evicted_full"]),
    "after_few": ({"admission": dyn.AdmitAfter(14, counters=140), "unseen": "initial",
                   "eviction": dyn.ExpireAfter(steps=5)}, 1000,
                  ["refused", "waiting", "counters_dropped", "evicted_expired"]),
    "chance": ({"admission": dyn.AdmitWithProbability(0.6), "unseen": "initial",
                "eviction": LFU}, 135, ["refused", "evicted_full"]),
}  # fmt: skip

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


def tables_of(plans: list[Plan]) -> list[Table]:
    return [
        Table(
            name,
            ["a", "b"],
            shard_by_hand(*plans[number % len(plans)], rows=limit),
            DIM,
            rows=limit,
            config=dyn.DynamicTableConfig(initializer=dyn.Uniform(-0.1, 0.1), **options),
        )
        for number, (name, (options, limit, _)) in enumerate(LIVES.items())
    ]


def live(case: Case, steps: int) -> dict[str, dict[str, float]]:
    """Trains, edits, ages; after every step every shard must be as its unsharded part."""
    beside = Beside(case)
    for step in range(steps):
        if step % 3 == 0:
            beside.set_time(step + 1)
        if step % 23 == 22:
            beside.edit(torch.arange(15 * step, 15 * step + 60))
        if step % 19 == 18:  # some that had gone, and more than the limit holds
            ids = torch.arange(3 * step, 15 * step, 4)
            beside.edit(ids, torch.linspace(-1, 1, len(ids) * DIM).view(-1, DIM))
        beside.step(drifting_batch(case, step))
        beside.check()
    return {table.name: stream_stats(table) for table in beside.shards}


def check_lives(plan: tuple[int, int, bool, list[Plan]], steps: int, **options: Any) -> None:
    world, local, pooled, plans = plan
    options["exact"] = world == local  # over nodes, ids of one row come in another order
    case = Case(tables_of(plans), pooled=pooled, longest_bag=48 // world, **options)
    by_rank = workers.run(live, case, steps, world_size=world, local_size=local, timeout=900)
    for stats in by_rank:
        for name, counts in stats.items():
            assert counts["step"] == steps
            idle = [key for key in LIVES[name][2] if not counts[key]]
            assert not idle, f"{name}: {counts}"
    assert any(by_rank)


@pytest.mark.parametrize("plan", MIXED)
def test_every_shard_lives_as_the_unsharded_table(plan: str) -> None:
    check_lives(MIXED[plan], 26)


@pytest.mark.deep
@pytest.mark.parametrize("turn, plan", list(enumerate([*MIXED, *EACH])))
def test_every_shard_lives_on(turn: int, plan: str) -> None:
    options = {"fused_params": ADAM} if turn % 2 else {}
    check_lives({**MIXED, **EACH}[plan], 200, **options)
