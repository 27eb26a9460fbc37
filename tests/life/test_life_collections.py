"""The life of rows in unsharded collections."""

import copy
import io

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from life_cases import LFU, LRU
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType

import torchrec_dyn as dyn

ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}


def pooled(dynamic, limit=3, fused_params=ADAGRAD):
    config = EmbeddingBagConfig(limit, 4, "t", feature_names=["f", "g"])
    return dyn.DynamicEmbeddingBagCollection([config], dynamic=dynamic, fused_params=fused_params)


def sequence(dynamic, limit=3, fused_params=ADAGRAD):
    config = EmbeddingConfig(limit, 4, "t", feature_names=["f", "g"])
    return dyn.DynamicEmbeddingCollection([config], dynamic=dynamic, fused_params=fused_params)


both = pytest.mark.parametrize("make", [pooled, sequence])


def batch(f=(), g=(), keys=("f", "g")) -> KeyedJaggedTensor:
    """Returns a batch of one sample."""
    return KeyedJaggedTensor(
        list(keys),
        torch.tensor([*f, *g], dtype=torch.int64),
        lengths=torch.tensor([len(f), len(g)]),
    )


def values(output):
    """Returns the output of a collection of either kind, [ids, 4] or [1, 8]."""
    parts = [output[key] for key in ("f", "g")]
    return torch.cat([one if isinstance(one, torch.Tensor) else one.values() for one in parts])


def train(collection, *batches):
    for one in batches:
        values(collection(batch(*one))).sum().backward()
    return set(collection.table("t").ids().tolist())


def asked(collection, *ids):
    handle = collection.table("t")
    return handle.last_seen(torch.tensor(ids)).tolist(), handle.count(torch.tensor(ids)).tolist()


@both
def test_features_of_one_table_are_one_stream(make):
    collection = make(dyn.DynamicTableConfig(admission=dyn.AdmitAfter(3), eviction=LFU))
    assert train(collection, ([1], [1, 1])) == {1}
    assert train(collection, ([2, 1], [2])) == {1}
    assert asked(collection, 1, 2, 3) == ([2, -1, -1], [4, 2, 0])
    stats = collection.table("t").stats()
    assert (stats["refused"], stats["hits"], stats["waiting"], stats["step"]) == (2, 1, 1, 2)


@both
def test_the_oldest_leave_a_full_table(make):
    collection = make(dyn.DynamicTableConfig(eviction=LRU))
    assert train(collection, ([1], [2]), ([1], [3]), ([4], [])) == {1, 3, 4}
    assert asked(collection, 1, 2, 3, 4) == ([2, -1, 2, 3], [2, 0, 1, 1])
    with pytest.raises(RuntimeError, match=r"'t'.*at most 3 rows.*\b4\b"):
        train(collection, ([5, 6], [7, 8]))
    assert set(collection.table("t").ids().tolist()) == {1, 3, 4}


@both
def test_the_clock_of_a_collection(make):
    collection = make(dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(time=60)))
    collection.set_time(1000)
    assert train(collection, ([1], []), ([], [2])) == {1, 2}
    collection.set_time(1060)
    assert train(collection, ([2], [])) == {1, 2} and asked(collection, 1, 2)[0] == [1000, 1060]
    with pytest.raises(ValueError, match=r"not before 1060, got 1059\. The clock never goes back"):
        collection.set_time(1059)
    collection.set_time(1061)
    assert train(collection, ([], [])) == {2}


@both
def test_a_clock_set_before_the_first_use(make):
    """The tables are created at the first use; the time set before is kept."""
    collection = make(dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(time=60)))
    collection.set_time(500)
    assert collection.table("t").num_rows == 0
    train(collection, ([1], []))
    assert asked(collection, 1)[0] == [500]


@both
def test_a_clock_that_is_never_set_warns_once(make, recwarn):
    """Nothing expires then, and no number of `stats` shows it."""
    timed, set_in_time = (
        make(dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(time=60))) for _ in "ab"
    )
    for step in range(99):
        timed(batch([1], []))
        set_in_time(batch([1], []))
        if step == 98:
            set_in_time.set_time(5)
    timed.eval()(batch([1], []))
    timed.train()
    assert not recwarn.list
    text = (
        r"^DynamicTable\('t'\): expected set_time\(t\) before training, since its rows expire by time, "
        r"got no time in 100 training steps, so no row expires\. Call collection\.set_time\(t\) before "
        r"each batch\.$"
    )
    with pytest.warns(UserWarning, match=text):
        timed(batch([1], []))
    for _ in range(30):
        timed(batch([1], []))
        set_in_time(batch([1], []))
    assert not recwarn.list and timed.table("t").stats()["step"] == 130


@both
def test_evaluation_and_frozen_tables_change_nothing(make):
    collection = make(dyn.DynamicTableConfig(admission=dyn.AdmitAfter(2), eviction=LRU))
    train(collection, ([1, 1], [2]))
    state = collection.local_tables()["t"].export_state()
    stats = collection.table("t").stats()

    def unchanged():
        now = collection.local_tables()["t"].export_state()
        assert now.keys() == state.keys()
        assert all(torch.equal(now[name], state[name]) for name in state)
        assert collection.table("t").stats() == stats

    collection.eval()
    collection(batch([1, 2, 2, 5], [6]))
    unchanged()
    collection.train()
    weights = list(collection.parameters())
    for weight in weights:
        weight.requires_grad_(False)
    collection(batch([1, 2, 2, 5], [6]))
    unchanged()


@both
def test_copies_conversions_and_saved_modules_live_on(make):
    collection = make(dyn.DynamicTableConfig(admission=dyn.AdmitAfter(2), eviction=LRU))
    train(collection, ([1, 1], [2, 2]), ([2], [3]))
    expected = ([1, 2, -1], [2, 3, 1])
    file = io.BytesIO()
    torch.save(collection, file)
    file.seek(0)
    for one in (
        copy.deepcopy(collection),
        torch.load(file, weights_only=False),
        copy.deepcopy(collection).half().float(),
        collection,
    ):
        assert asked(one, 1, 2, 3) == expected
        assert train(one, ([4, 4], [3])) == {2, 3, 4}
        assert asked(one, 1, 2, 3, 4) == ([-1, 2, 3, 3], [0, 3, 2, 2])
    collection.reset_parameters()
    assert collection.table("t").num_rows == 0
    assert train(collection, ([3], [])) == set(), "counters were kept"


@both
def test_a_change_of_optimizer_changes_no_life(make):
    from torchrec.optim import Adam
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    collection = make(dyn.DynamicTableConfig(admission=dyn.AdmitAfter(2), eviction=LRU))
    train(collection, ([1, 1], [2, 2]), ([2], [3]))
    apply_optimizer_in_backward(Adam, collection.parameters(), {"lr": 0.1})
    assert train(collection, ([4, 4], [3])) == {2, 3, 4}
    assert asked(collection, 1, 2, 3, 4) == ([-1, 2, 3, 3], [0, 3, 2, 2])


@both
def test_a_state_dict_goes_on_where_it_was_saved(make):
    """With the optimizer's state dict, which has the state of the rows besides weights."""
    config = dyn.DynamicTableConfig(
        admission=dyn.AdmitAfter(2), eviction=(dyn.ExpireAfter(time=9), LRU)
    )
    saved, loaded = make(config), make(config)
    saved.set_time(5)
    train(saved, ([1, 1], [2, 2]), ([2], [3]))
    saved.set_time(8)
    train(saved, ([2], []))
    train(loaded, ([7, 7], []))
    loaded.load_state_dict(saved.state_dict())
    loaded.fused_optimizer.load_state_dict(saved.fused_optimizer.state_dict())
    one, other = (c.local_tables()["t"].export_state() for c in (saved, loaded))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@both
def test_loaded_weights_alone_are_seen_at_the_step_of_the_load(make):
    """Without saved scores rows count as seen at the step of the load, so none expires by the load."""
    config = dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(steps=2))
    saved, loaded = make(config), make(config)
    train(saved, ([1], [2]))
    train(loaded, *[([7], [])] * 6)
    rows = {
        key: one
        for key, one in saved.state_dict().items()
        if "last" not in key and "count" not in key
    }
    loaded.load_state_dict({key: one for key, one in rows.items() if "checksum" not in key})
    assert asked(loaded, 1, 2)[1] == [0, 0]
    assert train(loaded, ([1], [])) == {1, 2}


@pytest.mark.parametrize("change", [torch.nn.Module.half, copy.deepcopy])
def test_a_change_between_the_loads_of_rows_and_of_the_optimizer_scores_no_row(change):
    """The rows were saved without scores: they count as seen at the step that the optimizer brings."""
    adam = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
    config = dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(steps=2))
    saved, loaded = pooled(None, fused_params=adam), pooled(config, fused_params=adam)
    train(saved, *[([1], [2])] * 6)
    loaded.load_state_dict(saved.state_dict())
    loaded = change(loaded)
    loaded.fused_optimizer.load_state_dict(saved.fused_optimizer.state_dict())
    assert asked(loaded, 1, 2)[0] == [6, 6]
    assert train(loaded, ([1], [])) == {1, 2}


def test_a_table_without_room_is_as_it_was_though_another_op_call_ran():
    """Tables of two pooling types need two op calls; each call changes all its tables or none."""
    configs = [
        EmbeddingBagConfig(9, 4, "a", feature_names=["f"], pooling=PoolingType.SUM),
        EmbeddingBagConfig(2, 4, "b", feature_names=["g"], pooling=PoolingType.MEAN),
    ]
    collection = dyn.DynamicEmbeddingBagCollection(
        configs, dynamic=dyn.DynamicTableConfig(eviction=LRU), fused_params=ADAGRAD
    )
    collection(batch([1], [1])).values().sum().backward()
    before = collection.local_tables()["b"].export_state()
    with pytest.raises(RuntimeError, match=r"'b'.*at most 2 rows"):
        collection(batch([2], [1, 2, 3]))
    now = collection.local_tables()["b"].export_state()
    assert all(torch.equal(now[key], before[key]) for key in now)
    collection(batch([2], [2])).values().sum().backward()
    assert collection.table("b").num_rows == 2
