"""Never: a vocabulary that does not grow, unsharded and under every plan."""

import copy
from typing import Any

import pytest
import torch
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from life_cases import living_table
from sharded_cases import Case, Table, usual_plan
from sharded_life import Beside, drifting_batch
from sharded_training import collection_of, shard
from table_cases import ids_of, make_group
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.lookup import Batch

ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
KNOWN = torch.tensor([5, -1, 2**63 - 1])


def make(pooled=True, limit=100, **dynamic):
    options = {"num_embeddings": limit, "embedding_dim": 4, "name": "t", "feature_names": ["f"]}
    chosen = {"t": dyn.DynamicTableConfig(admission=dyn.Never(), **dynamic)}
    if pooled:
        return dyn.DynamicEmbeddingBagCollection(
            [EmbeddingBagConfig(**options)], dynamic=chosen, fused_params=ADAM
        )
    return dyn.DynamicEmbeddingCollection(
        [EmbeddingConfig(**options)], dynamic=chosen, fused_params=ADAM
    )


def bags(*ids):
    return KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids)).long())


def read(collection, *ids):
    out = collection(bags(*ids))["f"]
    return out if isinstance(out, torch.Tensor) else out.values()


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("unseen", ["zeros", "initial"])
def test_known_ids_train_and_others_never_come(pooled, unseen):
    collection = make(pooled, unseen=unseen, initializer=dyn.Constant(0.25))
    table = collection.table("t")
    table.assign(KNOWN, torch.ones(3, 4))
    for _ in range(3):
        out = read(collection, 5, 7, 5, 8)
        missing = torch.full((4,), 0.25 if unseen == "initial" else 0.0)
        assert torch.equal(out[1], missing) and torch.equal(out[3], missing)
        out.sum().backward()
    assert sorted(table.ids().tolist()) == sorted(KNOWN.tolist())
    rows, _ = table.lookup(KNOWN)
    assert bool((rows[0] < 0.9).all()) and torch.equal(rows[1:], torch.ones(2, 4))
    stats = table.stats()
    assert (stats["step"], stats["ids_seen"], stats["hits"]) == (3, 12, 6)
    assert (stats["refused"], stats["inserted"], stats["waiting"]) == (6, 3, 0)
    # Scored as any table with a policy; nothing is kept of refused ids.
    assert table.count(torch.tensor([5, -1, 7])).tolist() == [6, 0, 0]
    assert table.last_seen(torch.tensor([5, -1, 7])).tolist() == [3, 0, -1]


def test_no_memory_for_what_is_refused():
    collection = make()
    read(collection, *range(10)).sum().backward()
    before = collection.table("t").stats()["bytes"]
    read(collection, *range(5000)).sum().backward()
    assert collection.table("t").stats()["bytes"] == before
    assert collection.local_tables()["t"].life.waiting is None


def test_an_id_that_left_does_not_come_back():
    collection = make(limit=4, eviction=(dyn.ExpireAfter(steps=2), dyn.LeastRecentlyUsed()))
    table = collection.table("t")
    table.assign(torch.arange(6), torch.ones(6, 4))  # beyond the limit, which `assign` allows
    read(collection, 0, 1, 9)
    assert table.num_rows == 4 and {0, 1} <= set(table.ids().tolist())
    for _ in range(3):
        read(collection, 0)
    assert table.ids().tolist() == [0]
    read(collection, 0, 1)
    assert table.ids().tolist() == [0] and table.erase(torch.tensor([0])) == 1
    read(collection, 0)
    assert table.num_rows == 0 and table.stats()["evicted_expired"] == 3


def test_prefetch_inserts_nothing():
    collection = make()
    read(collection, 1)
    (group,) = (one.tables for one in collection.unsharded_lookup._current_groups())
    group.prefetch(Batch(ids_of(1, 2), offsets=torch.tensor([0, 1, 2])))
    assert collection.table("t").num_rows == 0


@pytest.mark.parametrize("admission", [None, dyn.AdmitAfter(2), dyn.AdmitWithProbability(0.9)])
def test_rows_come_by_loading(admission):
    config = EmbeddingBagConfig(100, 4, "t", feature_names=["f"])
    trained = dyn.DynamicEmbeddingBagCollection(
        [config], dynamic=dyn.DynamicTableConfig(admission=admission), fused_params=ADAM
    )
    for _ in range(3):
        read(trained, 1, 2, 3, 4).sum().backward()
    read(trained, 9)  # waits if the table counts
    fixed = make()
    fixed.load_state_dict(trained.state_dict())
    fixed.fused_optimizer.load_state_dict(trained.fused_optimizer.state_dict())
    known = set(trained.table("t").ids().tolist())
    assert {1, 2, 3, 4} <= known
    for collection in (fixed, trained):
        read(collection, 1, 1, 2).sum().backward()
    assert torch.equal(fixed.table("t").lookup(ids_of(1, 2))[0],
                       trained.table("t").lookup(ids_of(1, 2))[0])  # fmt: skip
    read(fixed, *range(20, 60))
    assert set(fixed.table("t").ids().tolist()) == known
    if admission is not None:
        assert torch.equal(fixed.table("t").count(ids_of(1)), trained.table("t").count(ids_of(1)))
    # And back: the vocabulary grows again.
    trained.load_state_dict(fixed.state_dict())
    for _ in range(9):
        read(trained, 77).sum().backward()
    assert 77 in trained.table("t").ids().tolist()


def test_rows_come_from_a_static_table():
    static = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["f"])])
    fixed = dyn.from_static(
        static, fused_params=ADAM, dynamic=dyn.DynamicTableConfig(admission=dyn.Never())
    )
    assert torch.equal(read(fixed, 3, 10)[0], static.embedding_bags["t"].weight[3])
    assert fixed.table("t").num_rows == 10 and bool(read(fixed, 10).eq(0).all())


def test_copies_and_values():
    assert dyn.Never() == dyn.Never() and repr(dyn.Never()) == "Never()"
    collection = make()
    collection.table("t").assign(KNOWN, torch.ones(3, 4))
    twin = copy.deepcopy(collection)
    read(twin, 1, 5).sum().backward()
    assert twin.table("t").num_rows == 3 and twin.table("t").stats()["refused"] == 1


def test_a_batch_beyond_the_limit_needs_no_rows():
    table = living_table(admission=dyn.Never(), limit=2)
    out = make_group(table, pooling="none")(torch.arange(50), torch.tensor([0, 50]), training=True)
    assert bool(out.eq(0).all()) and table.num_rows == 0


# Shards equal their unsharded parts; rows of a trained table are kept

DIM = 4
EVICTIONS: list[dict[str, Any]] = [
    {},
    {"eviction": dyn.LeastRecentlyUsed()},
    {"eviction": (dyn.ExpireAfter(steps=4), dyn.LeastFrequentlyUsed()), "unseen": "initial"},
]
ALL = ("table_wise", "row_wise", "column_wise")
PLANS = {
    "pooled": (2, 2, True, ALL),
    "sequences": (2, 2, False, ALL),
    "nodes": (4, 2, True, ("table_row_wise", "table_column_wise", "grid_shard")),
}


def case_of(
    world: int, local: int, pooled: bool, kinds: tuple[str, ...], grows: bool = False
) -> Case:
    tables = [
        Table(
            f"t{turn}",
            ["ab"[turn % 2]],
            usual_plan(kinds[turn], DIM, world, local, turn, 200),
            DIM,
            rows=200,
            config=dyn.DynamicTableConfig(
                initializer=dyn.Uniform(-0.1, 0.1),
                admission=None if grows else dyn.Never(),
                **({} if grows else EVICTIONS[turn]),
            ),
        )
        for turn in range(3)
    ]
    fused = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.05}
    return Case(tables, pooled=pooled, fused_params=fused, exact=world == local)


def live(case: Case) -> list[dict[str, float]]:
    """Trains a vocabulary that grows only by `edit`; asserts that every shard equals its unsharded part."""
    beside = Beside(case)
    for step in range(9):
        if step % 4 == 1:  # ids around the newest id
            ids = torch.arange(15 * step - 30, 15 * step + 60, 2)
            beside.edit(ids, torch.linspace(-1, 1, len(ids) * DIM).view(-1, DIM))
        beside.step(drifting_batch(case, step))
        beside.check()
    return [shard.stats() for shard in beside.shards]


@pytest.mark.everyday(2)
@pytest.mark.parametrize("plan", PLANS)
def test_every_shard_lives_as_the_unsharded_table(plan: str) -> None:
    world, local = PLANS[plan][:2]
    case = case_of(*PLANS[plan])
    told = [
        one for rank in workers.run(live, case, world_size=world, local_size=local) for one in rank
    ]
    assert all(one["refused"] > 0 < one["hits"] and one["waiting"] == 0 for one in told)
    assert all(one["rows"] > 0 for one in told) and any(one["evicted_expired"] for one in told)


def shard_trained(kind: str) -> list[int]:
    """Trained rows are trained on under Never, and no row is added; returns the rows of each table."""
    case = case_of(2, 2, True, (kind,) * 3)
    open_case = case_of(2, 2, True, (kind,) * 3, grows=True)
    trained, fixed = (collection_of(c, fused_params=case.fused_params) for c in (open_case, case))
    batch = drifting_batch(case, 0)
    trained(batch.together).values().sum().backward()
    fixed.load_state_dict(trained.state_dict())
    model = shard(case, fixed)
    for step in range(3):
        model(drifting_batch(case, step).mine).values().sum().backward()
    table = model.module.collection.table("t0")
    assert (
        dyn.read_ids(model.module.collection, "t0").tolist() == trained.table("t0").ids().tolist()
    )
    assert dyn.read_stats(model.module.collection, "t0")["refused"] > 0
    rows, found = table.lookup(table.ids())
    before, _ = trained.table("t0").lookup(table.ids())
    if table.columns:
        assert bool(found.all())
        columns = torch.cat([torch.arange(first, first + n) for first, n in table.columns])
        assert not torch.equal(rows, before[:, columns])  # the rows are trained
    return [table.num_rows]


@pytest.mark.parametrize("kind", ALL)
def test_a_trained_table_is_sharded(kind: str) -> None:
    assert sum(rows for (rows,) in workers.run(shard_trained, kind, world_size=2)) > 0
