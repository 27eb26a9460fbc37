"""Functions by id across ranks, against the unsharded collection that holds the same rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from oracle import mix64, signed, unmixed
from sharded_cases import EXTREME_IDS, Case, Table, shard_by_hand, usual_plan
from sharded_training import batches, collection_of, outputs_by_name, shard

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import export_rows, import_rows
from torchrec_dyn.ranks.routing import row_limit

EXTREMES = [-(2**63), -1, 0, 2**63 - 1, int(unmixed(torch.tensor([-1]))[0])]
SEQUENCE = ["table_wise", "column_wise", "row_wise"]
POOLED = [*SEQUENCE, "table_row_wise", "table_column_wise", "grid_shard"]
BOTH = [(True, kind) for kind in POOLED] + [(False, kind) for kind in SEQUENCE]
# World size, ranks of a node, pooled, sharding type; two nodes for the types that stay within one.
PLANS = [(world, world, *plan) for world in (2, 3) for plan in BOTH]
PLANS += [(4, 2, True, "table_row_wise"), (4, 2, True, "grid_shard")]
# World size, sharding type, pieces of 8 columns as (ranks, first column, width).
BY_HAND = {
    "repeated rank": (2, "column_wise", [([0], 0, 2), ([1], 2, 4), ([0], 6, 2)]),
    "descending": (2, "column_wise", [([1], 6, 2), ([0], 3, 3), ([1], 0, 3)]),
    "rows of ranks 1, 0": (2, "row_wise", [([1, 0], 0, 8)]),
    "grid of one node": (2, "grid_shard", [([0, 1], 5, 3), ([0, 1], 0, 5)]),
    "out of order": (3, "table_column_wise", [([2], 5, 3), ([0], 1, 2), ([1], 0, 1), ([2], 3, 2)]),
    "an idle rank": (3, "column_wise", [([2], 4, 4), ([0], 0, 4)]),
    "rows of ranks 2, 0, 1": (3, "row_wise", [([2, 0, 1], 0, 8)]),
}


def usual_case(pooled: bool, kind: str, world: int, local: int, **options: Any) -> Case:
    plans = [usual_plan(kind, 8, world, local, turn) for turn in (1, 2)]
    tables = [Table("t0", ["a"], plans[0]), Table("t1", ["b"], plans[1], data_type="BF16")]
    return Case(tables, pooled=pooled, **options)


def ids_of_rank(rank: int, turn: int) -> torch.Tensor:
    """Ids as one rank asks: its own number of them, repeats, extremes; the last of 3 asks none."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    pool = torch.tensor([*EXTREMES, *range(-40, 200, 3)])
    return pool[torch.randint(len(pool), ([37, 90, 0, 5][(rank + turn) % 4],), generator=generator)]


def both(case: Case) -> tuple[Any, Any]:
    """The sharded and the unsharded collection with the same rows in table t0 and t1."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sharded, whole = shard(case, collection_of(case)).module.collection, collection_of(case)
    for turn, table in enumerate(case.tables):
        ids = [ids_of_rank(r, turn) for r in range(world)]
        rows = [torch.randn(len(i), 8, generator=torch.Generator().manual_seed(9)) for i in ids]
        rows = [part + number for number, part in enumerate(rows)]  # ranks differ on shared ids
        dyn.assign_rows(sharded, table.name, ids[rank], rows[rank])
        dyn.assign_rows(whole, table.name, torch.cat(ids), torch.cat(rows))
    return sharded, whole


def check_reads(sharded: Any, whole: Any, table: str) -> None:
    """Asserts that every read answers as it does unsharded, whatever each rank asks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for turn in range(2, 6):  # each rank asks nothing in one of them, all of them in the last
        asked = torch.cat([ids_of_rank(rank, turn), ids_of_rank(rank, 0)[: 7 * (turn % 2)]])
        asked = asked[: 0 if turn == 5 else None]
        rows, found = dyn.lookup_rows(sharded, table, asked)
        expected, expected_found = dyn.lookup_rows(whole, table, asked)
        assert rows.dtype == expected.dtype and torch.equal(rows, expected)
        assert torch.equal(found, expected_found)
    ids = dyn.read_ids(sharded, table)
    assert len(ids) > 20
    owners = dyn.owner_ranks(sharded, table, ids)
    assert torch.equal((owners == rank).any(1), sharded.table(table).lookup(ids)[1])
    assert torch.equal(ids, dyn.read_ids(whole, table))
    assert dyn.read_num_rows(sharded, table) == dyn.read_num_rows(whole, table) == len(ids)
    drawn = dyn.sample_ids(sharded, table, 300, seed=7)
    assert torch.equal(drawn, dyn.sample_ids(whole, table, 300, seed=7))
    assert torch.isin(drawn, ids).all() and len(drawn.unique()) > 0.9 * min(len(ids), 100)
    stats, expected_stats = dyn.read_stats(sharded, table), dyn.read_stats(whole, table)
    everyones: list[Any] = [None] * world
    dist.all_gather_object(everyones, stats)
    assert everyones == [stats] * world
    assert list(stats) == list(expected_stats)
    for name in ("rows", "inserted", "erased", "step", "ids_seen", "hits", "withheld"):
        assert stats[name] == expected_stats[name], name
    assert stats["load"] == stats["rows"] / stats["slots"]


def read_and_edit(case: Case) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    sharded, whole = both(case)
    for table in ("t0", "t1"):
        # Ranks erase the same ids and ids of nobody; what was there counts once.
        gone = [torch.cat([ids_of_rank(r, 0)[:9], torch.tensor([0, 10**17])]) for r in range(world)]
        gone[-1] = gone[-1][:0]
        erased = dyn.erase_rows(sharded, table, gone[rank])
        assert erased == dyn.erase_rows(whole, table, torch.cat(gone)) > 0
        check_reads(sharded, whole, table)
    # The handle's own edits are the same calls, and its reads are of this rank.
    sharded.table("t0").assign(torch.tensor([-1]), torch.ones(1, 8))
    whole.table("t0").assign(torch.tensor([-1]), torch.ones(1, 8))
    assert sharded.table("t1").erase(torch.tensor([-(2**63)])) == whole.table("t1").erase(
        torch.tensor([-(2**63)])
    )
    for table in ("t0", "t1"):
        check_reads(sharded, whole, table)


@pytest.mark.everyday(5)
@pytest.mark.parametrize("world, local, pooled, kind", PLANS)
def test_answers_do_not_depend_on_the_plan(world: int, local: int, pooled: bool, kind: str) -> None:
    case = usual_case(pooled, kind, world, local)
    workers.run(read_and_edit, case, world_size=world, local_size=local)


@pytest.mark.everyday(3)
@pytest.mark.parametrize("name", BY_HAND)
def test_shards_in_any_order_on_repeated_ranks(name: str) -> None:
    world, kind, pieces = BY_HAND[name]
    tables = [
        Table("t0", ["a"], shard_by_hand(kind, pieces)),
        Table("t1", ["b"], shard_by_hand(kind, pieces[::-1]), data_type="FP16"),
    ]
    workers.run(read_and_edit, Case(tables), world_size=world)


def edit_with_a_default_device(case: Case, path: str) -> None:
    ids, rows = torch.arange(9), torch.rand(9, 8)
    collection = shard(case, collection_of(case)).module.collection
    with torch.device("meta"):  # the default device of the user, as with torch.set_default_device
        for name in ("t0", "t1"):
            dyn.assign_rows(collection, name, ids, rows)
            export_rows(collection, name, path)
            assert dyn.erase_rows(collection, name, ids[3:]) == 6
            assert import_rows(collection, name, path) == 9
            assert torch.equal(
                dyn.lookup_rows(collection, name, ids)[0].float().sum(1) > 0, rows.sum(1) > 0
            )
            assert dyn.read_ids(collection, name).sort().values.tolist() == ids.tolist()
            assert dyn.owner_ranks(collection, name, ids).is_cpu
            assert set(dyn.sample_ids(collection, name, 200, seed=1).tolist()) == set(ids.tolist())


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_calls_do_not_follow_torchs_default_device(kind: str, tmp_path: Path) -> None:
    case = usual_case(True, kind, 2, 2)
    workers.run(edit_with_a_default_device, case, str(tmp_path / "rows"), world_size=2)


def read_trained_rows(case: Case) -> None:
    """What training left behind is read by id, and by the stats."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = collection_of(case, fused_params=case.fused_params)
    model = shard(case, collection_of(case, fused_params=case.fused_params))
    for step in range(3):
        per_rank, together = batches(case, step)
        for collection, batch, share in ((model, per_rank[rank], 1), (whole, together, world)):
            outputs = list(outputs_by_name(case, collection(batch)).values())
            torch.autograd.backward(outputs, [torch.ones_like(v) / share for v in outputs])
    check_reads(model.module.collection, whole, "t0")


@pytest.mark.everyday(2)
@pytest.mark.parametrize("pooled, kind", BOTH)
def test_trained_rows_are_read(pooled: bool, kind: str) -> None:
    case = usual_case(pooled, kind, 2, 2)
    # Row-wise sums differ in their rounding; the ones that go back here do not.
    workers.run(read_trained_rows, case, world_size=2)


def owners_of_columns(case: Case) -> list[list[int]]:
    sharded = shard(case, collection_of(case)).module.collection
    return dyn.owner_ranks(sharded, "t0", torch.tensor([7, -1])).tolist()


def test_owners_are_in_column_order() -> None:
    world, kind, pieces = BY_HAND["out of order"]
    case = Case([Table("t0", ["a"], shard_by_hand(kind, pieces))])
    answers = workers.run(owners_of_columns, case, world_size=world)
    assert answers == [[[1, 0, 2, 2]] * 2] * 3


def test_owners_without_sharding() -> None:
    whole = collection_of(usual_case(True, "row_wise", 2, 2))
    assert dyn.owner_ranks(whole, "t1", torch.arange(3)).tolist() == [[0]] * 3
    assert dyn.owner_ranks(whole, "t1", torch.arange(0)).shape == (0, 1)
    assert "['t0', 't1'], got 't9'" in fault_of(
        lambda: dyn.owner_ranks(whole, "t9", ids_of_rank(0, 0))
    )
    assert "owner_ranks: expected ids [M] of int64, got [1, 2]" in fault_of(
        lambda: dyn.owner_ranks(whole, "t0", torch.ones(1, 2, dtype=torch.int64))
    )
    assert "expected an int64 tensor, got torch.int32" in fault_of(
        lambda: dyn.mixed_ids(torch.arange(3, dtype=torch.int32))
    )


def test_mixed_ids() -> None:
    ids = torch.tensor([[0, 1, -1], EXTREMES[:3]])
    mixed = dyn.mixed_ids(ids)
    assert mixed.flatten().tolist() == [signed(mix64(id)) for id in ids.flatten().tolist()]
    assert mixed.shape == (2, 3)


def stats_by_shard(case: Case) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The stats of t0 over all ranks, and of each of this rank's shards."""
    sharded = shard(case, collection_of(case)).module.collection
    rank = dist.get_rank()
    dyn.assign_rows(sharded, "t0", torch.arange(150) + 150 * rank, torch.ones(150, 8))
    shards = sharded.table("t0").shards
    return dyn.read_stats(sharded, "t0"), [shard.stats() for shard in shards]


def test_stats_are_joined_as_each_of_them_means() -> None:
    pieces = [([0, 1], 0, 2), ([0, 1], 2, 6)]
    tables = [Table("t0", ["a"], shard_by_hand("grid_shard", pieces))]
    answers = workers.run(stats_by_shard, Case(tables), world_size=2)
    whole = answers[0][0]
    first = [shards[0] for _, shards in answers]
    assert whole["rows"] == 300 and first[0]["rows"] != first[1]["rows"]
    assert whole["limit"] == 2 * row_limit(1000, 2) == sum(one["limit"] for one in first)
    assert whole["slots"] == sum(one["slots"] for one in first)
    assert whole["load"] == 300 / whole["slots"]
    assert whole["bytes"] == sum(one["bytes"] for _, shards in answers for one in shards)
    assert first[0]["bytes"] != answers[0][1][1]["bytes"]
    probes = sum(one["probe_length_mean"] * one["rows"] for one in first)
    assert whole["probe_length_mean"] == pytest.approx(probes / 300)
    assert first[0]["probe_length_mean"] != first[1]["probe_length_mean"]
    assert whole["probe_length_max"] == max(one["probe_length_max"] for one in first)
    assert whole["step"] == 0


def stats_after_steps(case: Case) -> int | float:
    model = shard(case, collection_of(case))
    for step in range(3):
        model(batches(case, step)[0][dist.get_rank()])
    return dyn.read_stats(model.module.collection, "t0")["step"]


def test_steps_of_row_shards_are_not_summed() -> None:
    case = usual_case(True, "row_wise", 3, 3)
    assert workers.run(stats_after_steps, case, world_size=3) == [3, 3, 3]


def empty_table(case: Case) -> None:
    sharded = shard(case, collection_of(case)).module.collection
    rows, found = dyn.lookup_rows(sharded, "t0", torch.tensor(EXTREMES))
    assert not rows.any() and not found.any() and rows.shape == (5, 8)
    assert dyn.read_ids(sharded, "t0").shape == (0,)
    assert dyn.read_num_rows(sharded, "t0") == dyn.erase_rows(sharded, "t0", torch.arange(9)) == 0
    stats = dyn.read_stats(sharded, "t0")
    assert stats["load"] == stats["probe_length_mean"] == stats["rows"] == 0
    assert fault_of(lambda: dyn.sample_ids(sharded, "t0", 3, seed=0)).endswith(
        "table('t0').sample_ids: expected a table with rows, got none. "
        "Draw after the first training step or a load."
    )


@pytest.mark.parametrize("kind", ["column_wise", "row_wise"])
def test_a_table_without_rows(kind: str) -> None:
    workers.run(empty_table, usual_case(True, kind, 2, 2), world_size=2)


def fault_of(call: Callable[[], Any], error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def ask_badly(case: Case) -> list[str]:
    sharded, _ = both(case)
    bad = dist.get_rank() == 1
    nothing = torch.empty(0, dtype=torch.int64)
    before = dyn.read_ids(sharded, "t0")
    ids: Any = torch.arange(3, dtype=torch.int32 if bad else torch.int64)
    calls: list[Callable[[], Any]] = [
        lambda: dyn.lookup_rows(sharded, "t0", ids),
        lambda: dyn.erase_rows(sharded, "t0", nothing[None] if bad else nothing),
        lambda: dyn.lookup_rows(sharded, "t0", [1, 2] if bad else nothing),
        lambda: dyn.lookup_rows(sharded, "t0", nothing.to("meta") if bad else nothing),
        lambda: dyn.assign_rows(sharded, "t0", nothing, torch.zeros(0, 7 if bad else 8)),
        lambda: dyn.assign_rows(sharded, "t0", nothing, nothing[:, None] if bad else nothing),
        lambda: dyn.assign_rows(
            sharded, "t0", nothing, torch.zeros(0, 8, dtype=torch.long if bad else torch.float)
        ),
        lambda: dyn.read_stats(sharded, "t9" if bad else "t0"),
        lambda: dyn.read_ids(sharded, "t1" if bad else "t0"),
        lambda: dyn.lookup_rows(sharded, "t0", nothing) if bad else dyn.read_ids(sharded, "t0"),
        lambda: dyn.sample_ids(sharded, "t0", 5, seed=int(bad)),
        lambda: dyn.sample_ids(sharded, "t0", 0, seed=0),
    ]
    faults = [fault_of(call) for call in calls]
    for read in ("lookup", "count"):  # also on a rank without a shard
        text = fault_of(lambda read=read: getattr(sharded.table("t0"), read)([1, 2]))
        assert f".{read}: expected ids as a tensor, got list. Convert with" in text
    assert torch.equal(dyn.read_ids(sharded, "t0"), before)
    rows = torch.zeros(5000, 8)
    faults.append(
        fault_of(lambda: dyn.assign_rows(sharded, "t0", torch.arange(5000), rows), RuntimeError)
    )
    return faults


BAD = [
    "table('t0').lookup(rank=1): ids: expected ids [M] of int64, got [3] of torch.int32. Convert with",
    "table('t0').erase(rank=1): ids: expected ids [M] of int64, got [1, 0] of torch.int64.",
    "table('t0').lookup(rank=1): ids: expected ids as a tensor, got list.",
    "table('t0').lookup(rank=1): ids: expected ids with values, got ids on the meta device.",
    "table('t0').assign(rank=1): rows: expected floating point rows of shape [0, 8], got [0, 7] of",
    "table('t0').assign(rank=0): rows: expected floating point rows of shape [0, 8], got [0] of",
    "table('t0').assign(rank=1): rows: expected floating point rows of shape [0, 8], got [0, 8]",
    "read_stats(rank=1): DynamicEmbeddingBagCollection('collection').table: expected a name "
    "among ['t0', 't1'], got 't9'.",
    "table('t0').ids: expected the same call on every rank, got "
    "DynamicEmbeddingBagCollection('collection').table('t1').ids on rank 1.",
    "table('t0').ids: expected the same call on every rank, got "
    "DynamicEmbeddingBagCollection('collection').table('t0').lookup on rank 1.",
    "table('t0').sample_ids: expected the same n and seed on every rank, got "
    "[(5, 0), (5, 1), (5, 0)] by rank.",
    "table('t0').sample_ids: expected a number of ids from 1 on, got 0.",
    "expected at most",
]


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise"])
def test_a_fault_of_one_rank_is_raised_on_all(kind: str) -> None:
    case = usual_case(True, kind, 3, 3)
    by_rank = workers.run(ask_badly, case, world_size=3, timeout=30)
    assert by_rank == [by_rank[0]] * 3
    for fault, expected in zip(by_rank[0], BAD, strict=True):
        assert expected in fault


def test_unsharded_faults() -> None:
    whole = collection_of(usual_case(True, "table_wise", 1, 1))
    ids = torch.arange(3)
    for call in (dyn.read_ids, dyn.read_num_rows, dyn.read_stats):
        assert "expected a name among ['t0', 't1'], got 'x'" in fault_of(
            lambda c=call: c(whole, "x")
        )
    assert "of int64" in fault_of(lambda: dyn.lookup_rows(whole, "t0", ids.int()))
    dyn.assign_rows(whole, "t0", ids, torch.zeros(3, 8))
    assert "expected an int64 as seed, got 0.5." in fault_of(
        lambda: dyn.sample_ids(whole, "t0", 1, 0.5)
    )
    assert fault_of(lambda: dyn.read_ids(torch.nn.Linear(1, 1), "t0")) == (
        "read_ids: expected a collection of dynamic tables, got Linear. "
        "Pass the collection itself, not the model."
    )


# When and how often ids were seen

COUNTED = (
    *("rows", "step", "waiting", "ids_seen", "hits", "unseen", "refused", "inserted"),
    *("evicted_expired", "evicted_full", "erased", "counters_dropped", "counters_expired"),
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


def check_lives(sharded: Any, whole: Any) -> tuple[set[int], set[int]]:
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
    last_seen, counts = check_lives(sharded, whole)
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
    check_lives(sharded, whole)


@pytest.mark.everyday(4)
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
