"""Ranks that share a table agree on its life: one clock, one count, one refusal."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from sharded_cases import Case, Table, shard_by_hand, usual_plan
from sharded_life import Beside, drifting_batch, make_batch
from sharded_training import outputs_by_name
from table_cases import without_probes

import torchrec_dyn as dyn
from torchrec_dyn.ranks.routing import owners

# The clock: set by all ranks at once, the same on all, refused by all

TIMED_KINDS = [(True, "table_wise"), (True, "column_wise"), (False, "row_wise")]
TIMED = dyn.DynamicTableConfig(
    initializer=dyn.Uniform(-0.1, 0.1), eviction=dyn.ExpireAfter(time=100)
)


def timed_case(pooled: bool, kind: str, world: int) -> Case:
    # One table only: under table-wise there are ranks without a shard.
    plan = usual_plan(kind, 4, world, world, turn=1)
    return Case([Table("t", ["a", "b"], plan, 4, config=TIMED)], pooled=pooled)


def check_latest_counts(case: Case) -> None:
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


@pytest.mark.parametrize("pooled, kind", TIMED_KINDS)
def test_the_latest_of_all_ranks_counts(pooled: bool, kind: str) -> None:
    workers.run(check_latest_counts, timed_case(pooled, kind, 3), world_size=3)


def check_refuse_times(case: Case, liar: int) -> None:
    beside = Beside(case)
    rank = dist.get_rank()
    beside.set_time(1000)
    beside.step(drifting_batch(case, 0))
    before = [one.export_state() for one in beside.shards]
    bad: list[Any] = [-1, 1.5, True, None, 2**63, "now", torch.tensor(2000), lambda: 2000]
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
    workers.run(check_refuse_times, timed_case(True, kind, 3), liar, world_size=3)


# Occurrences of all ranks count together, those of one batch twice over included

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


# A batch that needs more rows than a shard may hold: who says so, what is left, who waits how long

COLUMNS = [([0], 0, 2), ([1], 2, 2), ([0], 4, 2)]
RECENT = (dyn.ExpireAfter(steps=3), dyn.LeastRecentlyUsed())


def full_case(kind: str, pieces: Any) -> Case:
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
        (
            {key: value.tolist() for key, value in one.export_state().items()},
            without_probes(one.stats()),
        )
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
    by_rank = workers.run(refuse_everywhere, full_case("column_wise", COLUMNS), world_size=2)
    for rank, text in enumerate(by_rank):
        assert (
            f"DynamicTable('full') on rank {rank}: expected a batch that needs at most 150 rows"
            in text
        )
        assert "got 152 distinct ids" in text and "num_embeddings" in text


def refuse_on_one(case: Case) -> tuple[str, bool]:
    beside = Beside(case)
    for step in range(4):
        beside.step(drifting_batch(case, step))
    ids = torch.arange(10_000)
    theirs = ids[torch.eq(owners(ids, 2), 1)][:146].tolist()
    before = states(beside)
    batch = make_batch(case, [[[theirs[rank::2]], [[]]] for rank in range(2)])
    try:
        outputs = outputs_by_name(case, beside.model(batch.mine))
        sum(one.sum() for one in outputs.values()).backward()
    except Exception as error:
        dist.destroy_process_group()  # as the end of the process does; else others wait for the time-out
        return f"{type(error).__name__}: {error}", states(beside) == before
    return "no error", False


def test_one_full_share_ends_every_rank() -> None:
    case = full_case("row_wise", [([0, 1], 0, 6)])
    (other, _), (text, unharmed) = workers.run(refuse_on_one, case, world_size=2, group_timeout=60)
    assert (
        "DynamicTable('full') on rank 1: expected a batch that needs at most 145 rows here" in text
    )
    assert "(num_embeddings=150), got 146 distinct ids" in text
    assert unharmed
    assert other != "no error"
