"""Who comes and goes depends on the stream alone, never on when Python frees a graph."""

import gc
from typing import Any

import pytest
import torch.distributed as dist
import workers
from sharded_cases import Case, Table, shard_by_hand
from sharded_life import Beside, Forward, drifting_batch

import torchrec_dyn as dyn

EVICTIONS = {
    "recent": dyn.LeastRecentlyUsed(),
    "frequent": (dyn.ExpireAfter(steps=4), dyn.LeastFrequentlyUsed()),
}
COLUMNS = [([0], 0, 2), ([1], 2, 2), ([0], 4, 2)]


def case_of(kind: str = "column_wise", pieces: Any = COLUMNS, **options: Any) -> Case:
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
    for step in range(30):
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
    (kept, ids), (dropped, other_ids) = workers.run(keep_outputs, case_of(), world_size=2)
    assert min(kept) > 100
    assert max(dropped) == 0
    for name in EVICTIONS:
        assert len(other_ids[name]) == 1 and ids[name] == other_ids[name] * 2


def never_backward(case: Case) -> list[float]:
    beside = Beside(case)
    kept = []
    for step in range(25):
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
    for step in range(25, 28):
        beside.step(drifting_batch(case, step))
        beside.check()
    return rows_then


PLANS = [
    ("column_wise", COLUMNS),
    ("table_wise", [([1], 0, 6)]),
    ("row_wise", [([0, 1], 0, 6)]),
]


@pytest.mark.parametrize("kind, pieces", PLANS)
def test_backward_comes_at_the_end_or_never(kind: str, pieces: Any) -> None:
    rows = workers.run(never_backward, case_of(kind, pieces), world_size=2)
    assert all(min(one) > 30 for one in rows if one)
