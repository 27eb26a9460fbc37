"""Never: a vocabulary that does not grow, unsharded."""

import copy

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from life_cases import living_table
from table_cases import ids_of, make_group
from test_planner_life import SHARDER, user_shard
from test_planner_life import collection as priced
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

import torchrec_dyn as dyn

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
    # Scored as any table with a policy; of refused ids nothing is kept.
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
    table.assign(torch.arange(6), torch.ones(6, 4))  # past the limit, as `assign` may
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
    (group,) = (one.tables for one in collection._lookup._current_groups())
    group.prefetch(ids_of(1, 2), torch.tensor([0, 1, 2]))
    assert collection.table("t").num_rows == 0


@pytest.mark.parametrize("admission", [None, dyn.AdmitAfter(2), dyn.AdmitWithProbability(0.9)])
def test_rows_come_by_loading(admission):
    config = EmbeddingBagConfig(100, 4, "t", feature_names=["f"])
    trained = dyn.DynamicEmbeddingBagCollection(
        [config], dynamic=dyn.DynamicTableConfig(admission=admission), fused_params=ADAM
    )
    for _ in range(3):
        read(trained, 1, 2, 3, 4).sum().backward()
    read(trained, 9)  # waits, perhaps
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
    # And back: the vocabulary grows on.
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


def test_a_plan_pays_for_scores_and_no_counters():
    def price(admission):
        config = dyn.DynamicTableConfig(admission=admission)
        return user_shard(priced(config), SHARDER).storage.ddr

    assert price(dyn.Never()) == price(dyn.AdmitWithProbability(0.5)) < price(dyn.AdmitAfter(2))
    assert price(dyn.Never()) > price(None)
