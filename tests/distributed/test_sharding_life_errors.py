"""A batch that needs more rows than a shard may hold: who says so, what is left, and who waits how long."""

import time
from typing import Any

import pytest
import torch
import workers
from sharded_cases import Case, Table, shard_by_hand
from sharded_life import Beside, drifting_batch, make_batch
from sharded_training import outputs_by_name

import torchrec_dyn as dyn
from torchrec_dyn.ranks.routing import owners

COLUMNS = [([0], 0, 2), ([1], 2, 2), ([0], 4, 2)]
RECENT = (dyn.ExpireAfter(steps=3), dyn.LeastRecentlyUsed())


def case_of(kind: str, pieces: Any) -> Case:
    # The table with room comes first in the group: it must not have gone ahead.
    tables = [
        Table(
            name,
            [feature],
            shard_by_hand(kind, pieces, rows=limit),
            6,
            rows=limit,
            config=dyn.DynamicTableConfig(initializer=dyn.Uniform(-0.1, 0.1), eviction=RECENT),
        )
        for name, feature, limit in (("roomy", "a", 1000), ("full", "b", 150))
    ]
    return Case(tables, longest_bag=20)


def states(beside: Beside) -> list[Any]:
    return [
        ({key: value.tolist() for key, value in one.export_state().items()}, one.stats())
        for one in beside.shards
    ]


def refuse_everywhere(case: Case) -> str:
    """All column shards see the same need: all refuse, and all train on."""
    beside = Beside(case)
    for step in range(8):
        beside.step(drifting_batch(case, step))
    beside.check()
    before = states(beside)
    # Rows that are too old would go, ids come and known ones be seen. Features are "b", "a".
    too_many = [[[list(range(100 * r, 100 * r + 76))], [[7, 8, 9]]] for r in range(2)]
    with pytest.raises(RuntimeError) as caught:
        beside.model(make_batch(case, too_many).mine)
    assert states(beside) == before
    for step in range(8, 20):
        beside.step(drifting_batch(case, step))
        beside.check()
    return str(caught.value)


def test_all_column_shards_refuse_and_train_on() -> None:
    by_rank = workers.run(refuse_everywhere, case_of("column_wise", COLUMNS), world_size=2)
    for rank, text in enumerate(by_rank):
        assert (
            f"DynamicTable('full') on rank {rank}: expected a batch that needs at most 150 rows"
            in text
        )
        assert "got 152 distinct ids" in text and "num_embeddings" in text


def refuse_on_one(case: Case) -> tuple[str, float, bool]:
    beside = Beside(case)
    for step in range(4):
        beside.step(drifting_batch(case, step))
    ids = torch.arange(10_000)
    theirs = ids[torch.eq(owners(ids, 2), 1)][:146].tolist()
    before, began = states(beside), time.monotonic()
    batch = make_batch(case, [[[theirs[rank::2]], [[]]] for rank in range(2)])
    try:
        outputs = outputs_by_name(case, beside.model(batch.mine))
        sum(one.sum() for one in outputs.values()).backward()
    except Exception as error:
        waited = time.monotonic() - began
        return f"{type(error).__name__}: {error}", waited, states(beside) == before
    return "no error", 0.0, False


def test_one_full_share_ends_every_rank() -> None:
    case = case_of("row_wise", [([0, 1], 0, 6)])
    (other, waited, _), (text, _, unharmed) = workers.run(
        refuse_on_one, case, world_size=2, group_timeout=5, timeout=60
    )
    assert (
        "DynamicTable('full') on rank 1: expected a batch that needs at most 145 rows here" in text
    )
    assert "(num_embeddings=150), got 146 distinct ids" in text
    assert unharmed
    assert other != "no error" and waited < 30
