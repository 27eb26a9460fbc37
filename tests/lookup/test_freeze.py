"""Frozen tables are read as in evaluation; the other tables are trained as if alone."""

import copy
import pickle
import random

import pytest
import torch
from collection_oracle import POOL
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

import torchrec_dyn as dyn
from torchrec_dyn.lookup import Batch
from torchrec_dyn.storage import TABLES

ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
OPTIMIZERS = [EmbOptimType[name] for name in (
    "EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "ADAM", "PARTIAL_ROWWISE_ADAM"
)]  # fmt: skip
LRU, LFU = dyn.LeastRecentlyUsed(), dyn.LeastFrequentlyUsed()
FEATURES = {"t": ["a", "b"], "u": ["b"], "v": ["c"]}
# Policies of the tables; the key says which tables have any.
LIVES = {
    "none": {},
    "one": {"u": {"eviction": (dyn.ExpireAfter(steps=2), LRU), "admission": dyn.AdmitAfter(2)}},
    "all": {
        "t": {"eviction": dyn.ExpireAfter(steps=2), "unseen": "initial"},
        "u": {"eviction": LFU, "admission": dyn.AdmitAfter(2)},
        "v": {"admission": dyn.AdmitWithProbability(0.5), "eviction": LRU, "unseen": "initial"},
    },
}


def make(names, lives, pooled=True, fused_params=ADAM, **options):
    """Returns a collection of tables of one group; tables that evict when full have few rows."""
    configs, dynamic = [], {}
    for name in names:
        life = lives.get(name, {})
        replaces = any(one in str(life.get("eviction")) for one in ("Recently", "Frequently"))
        common = {"num_embeddings": 12 if replaces else 1000, "embedding_dim": 4,
                  "name": name, "feature_names": FEATURES[name]}  # fmt: skip
        if pooled:
            configs.append(EmbeddingBagConfig(pooling=PoolingType.SUM, **common))
        else:
            configs.append(EmbeddingConfig(**common))
        dynamic[name] = dyn.DynamicTableConfig(initializer=dyn.Normal(0.0, 1.0), **life)
    options |= {"dynamic": dynamic, "fused_params": fused_params}
    if pooled:
        return dyn.DynamicEmbeddingBagCollection(configs, **options)
    return dyn.DynamicEmbeddingCollection(configs, **options)


def draw(dice, names, weighted=False, longest=3):
    """Returns one batch for each table alone and for all tables; at most 9 distinct ids per table."""
    pool = [*dice.sample(POOL, 4), dice.randint(1, 20)]
    bags = {f: [[dice.choice(pool) for _ in range(dice.randint(0, longest))] for _ in range(3)]
            for f in "abc"}  # fmt: skip

    def kjt(features):
        ids = [number for f in features for bag in bags[f] for number in bag]
        weights = None
        if weighted:
            weights = torch.linspace(0.5, 2.0, len(ids)).requires_grad_()
        lengths = torch.tensor([len(bag) for f in features for bag in bags[f]])
        return KeyedJaggedTensor(features, torch.tensor(ids, dtype=torch.int64), weights, lengths)

    return kjt(["a", "b", "c"]), {name: kjt(FEATURES[name]) for name in names}


def parts(outputs, names, alone=False):
    """Returns the outputs, [bags, D] or [ids, D], by table and feature."""
    values = outputs.to_dict() if not isinstance(outputs, dict) else outputs
    found = {}
    for name in names:
        for feature in FEATURES[name]:
            key = feature if alone or feature != "b" else f"b@{name}"
            one = values[key]
            found[name, feature] = one if isinstance(one, torch.Tensor) else one.values()
    return found


def learn(outputs):
    """Runs a backward with gradients that depend on the outputs; none if no output requires a gradient."""
    asking = {key: one for key, one in outputs.items() if one.requires_grad}
    if asking:
        grads = [
            one.detach() * 0.5 + sum(map(ord, "".join(key))) % 5 for key, one in asking.items()
        ]
        torch.autograd.backward(list(asking.values()), grads)


def state_of(collection, name):
    table = collection.local_tables().get(name)
    if table is None:
        return {}, {}
    state = {key: value.tolist() for key, value in table.export_state().items()}
    drop = {"probe_length_mean", "probe_length_max", "withheld"}
    return state, {key: one for key, one in table.stats().items() if key not in drop}


@pytest.mark.everyday(15)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("lives", LIVES)
@pytest.mark.parametrize("pooled", [True, False])
def test_frozen_in_between_as_never_given_those_batches(optimizer, lives, pooled):
    """Compares each table with a single copy, which is evaluated instead of frozen."""
    fused = {"optimizer": optimizer, "learning_rate": 0.1}
    dice = random.Random(f"{optimizer} {lives} {pooled}")
    both = make(FEATURES, LIVES[lives], pooled, fused)
    alone = {name: make([name], LIVES[lives], pooled, fused) for name in FEATURES}
    frozen: set[str] = set()
    for step in range(16):
        for name in FEATURES:
            if dice.random() < 0.3:
                handle = both.table(name)
                handle.unfreeze() if name in frozen else handle.freeze()
                frozen ^= {name}
                assert handle.is_frozen == (name in frozen)
        training = dice.random() < 0.85
        both.train(training)
        batch, of_table = draw(dice, FEATURES)
        got = parts(both(batch), FEATURES)
        for name, collection in alone.items():
            collection.train(training and name not in frozen)
            expected = parts(collection(of_table[name]), [name], alone=True)
            for key, value in expected.items():
                assert torch.equal(got[key], value), (step, key, frozen)
            learn(expected)
        learn(got)
        for name, collection in alone.items():
            assert state_of(both, name) == state_of(collection, name), (step, name, frozen)
    assert all(1 < one.table(name).stats()["step"] < 16 for name, one in alone.items())


# Single cases: requires_grad, weights, copies, edits, prefetching, deltas and errors


@pytest.mark.parametrize("mean", [False, True])
def test_weights_of_frozen_tables_get_gradients(mean):
    configs = [
        EmbeddingBagConfig(100, 2, name, feature_names=[feature],
                           pooling=PoolingType.MEAN if mean else PoolingType.SUM)
        for name, feature in (("t", "a"), ("u", "c"))
    ]  # fmt: skip
    ebc = dyn.DynamicEmbeddingBagCollection(configs, is_weighted=True, fused_params=ADAM)
    rows = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    for name in ("t", "u"):
        ebc.table(name).assign(torch.tensor([1, 2]), rows)
    ebc.table("t").freeze()
    weights = torch.tensor([0.5, 1.5, 2.0, 1.0]).requires_grad_()
    ids, lengths = torch.tensor([1, 2, 9, 1]), torch.tensor([2, 1, 1, 0])
    batch = KeyedJaggedTensor(["a", "c"], ids, weights, lengths)
    out = ebc(batch)
    out["a"].sum().backward()
    expected = torch.tensor([3.0, 8.0, 0.0, 0.0])  # the sums of the rows; 9 has no row
    if mean:  # (w1 x1 + w2 x2) / n: TorchRec's mean of a weighted bag divides by the count
        expected[:2] /= 2
    assert torch.equal(weights.grad, expected)
    assert torch.equal(ebc.table("t").lookup(torch.tensor([1, 2]))[0], rows)
    assert ebc.table("t").stats()["step"] == 0 and ebc.table("u").stats()["step"] == 1


def test_a_group_frozen_whole_has_no_graph():
    ebc = make(FEATURES, {})
    for name in FEATURES:
        ebc.table(name).freeze()
    batch, _ = draw(random.Random(1), FEATURES)
    out = ebc(batch).values()
    assert not out.requires_grad and bool(out.eq(0).all())
    assert not any(ebc.table(name).num_rows for name in FEATURES)


def kjt(*ids):
    return KeyedJaggedTensor(["c"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))


def test_a_forward_learns_or_not_as_it_began():
    ebc = make(["v"], {})
    one = torch.tensor([1])
    before_freeze = ebc(kjt(1))
    started = ebc.table("v").lookup(one)[0]
    ebc.table("v").freeze()
    before_freeze.values().sum().backward()
    assert not torch.equal(ebc.table("v").lookup(one)[0], started)
    weighted = make(["v", "u"], {}, is_weighted=True)
    weighted.table("v").assign(one, torch.ones(1, 4))
    weighted.table("v").freeze()
    features = KeyedJaggedTensor(
        ["b", "c"], torch.tensor([5, 1]), torch.ones(2), torch.ones(2).long()
    )
    out = weighted(features).values()
    weighted.table("v").unfreeze()
    out.sum().backward()
    assert torch.equal(weighted.table("v").lookup(one)[0], torch.ones(1, 4))


def test_requires_grad_and_freeze_are_one():
    ebc = make(FEATURES, {})
    handle, weight = ebc.table("u"), ebc.embedding_bags["u"].weight
    handle.freeze()
    handle.freeze()
    assert not weight.requires_grad and handle.is_frozen and ebc.table("u").is_frozen
    assert [ebc.table(name).is_frozen for name in FEATURES] == [False, True, False]
    weight.requires_grad_(True)
    assert not handle.is_frozen
    weight.requires_grad_(False)
    batch, _ = draw(random.Random(2), FEATURES)
    ebc(batch).values().sum().backward()
    assert handle.is_frozen and handle.num_rows == 0 and ebc.table("t").num_rows > 0
    handle.unfreeze()
    assert weight.requires_grad
    ebc(batch).values().sum().backward()
    assert handle.num_rows > 0


def test_every_way_to_freeze_or_mark_a_table_is_seen_by_the_next_forward():
    ebc = make("t", {}, fused_params=None)
    weight, (batch, _) = ebc.embedding_bags["t"].weight, draw(random.Random(5), "t")

    def moved():
        """Returns True if a step changes rows."""
        before = ebc(batch).values()
        if before.requires_grad:
            before.sum().backward()
        return not torch.equal(ebc(batch).values(), before)

    with pytest.warns(UserWarning, match="expected an optimizer"):
        for _ in range(3):
            ebc(batch).values().sum().backward()
    assert moved()
    for freeze in (
        lambda frozen: weight.requires_grad_(not frozen),
        lambda frozen: setattr(weight, "requires_grad", not frozen),
        lambda frozen: ebc.requires_grad_(not frozen),
        lambda frozen: ebc.table("t").freeze() if frozen else ebc.table("t").unfreeze(),
    ):
        freeze(True)
        assert [moved(), moved(), moved()] == [False] * 3
        freeze(False)
        assert [moved(), moved(), moved()] == [True] * 3
    token = TABLES.now
    weight.grad = None  # as loops do for all parameters
    assert TABLES.now is token
    options = {"lr": 0.0}
    for number in (1, 2):
        apply_optimizer_in_backward(torch.optim.SGD, [weight], options)
        if number == 1:
            assert [moved(), moved(), moved()] == [False] * 3  # marked: the rate is 0
        else:
            with pytest.raises(ValueError, match="expected one optimizer"):  # marked in place
                moved()


@pytest.mark.parametrize("used", [False, True])
def test_copies_stay_frozen(used):
    ebc = make(FEATURES, {})
    batch, _ = draw(random.Random(3), FEATURES)
    if used:
        ebc(batch).values().sum().backward()
    ebc.table("u").freeze()
    rows = ebc.table("u").num_rows
    for one in (copy.deepcopy(ebc), pickle.loads(pickle.dumps(ebc)), copy.deepcopy(ebc).half()):
        other, _ = draw(random.Random(4), FEATURES)
        one(other).values().sum().backward()
        assert one.table("u").is_frozen and one.table("u").num_rows == rows
        assert one.table("t").num_rows > ebc.table("t").num_rows
        one.table("u").unfreeze()
        assert ebc.table("u").is_frozen


def test_a_frozen_table_is_edited_and_loaded_by_hand():
    ebc, other = make(FEATURES, {}), make(FEATURES, {})
    ids = torch.tensor([1, 2, 3])
    other.table("v").assign(ids, torch.full((3, 4), 7.0))
    ebc.table("v").freeze()
    ebc.table("v").assign(ids[:2], torch.ones(2, 4))
    assert ebc.table("v").erase(ids[:1]) == 1 and ebc.table("v").num_rows == 1
    ebc.load_state_dict(other.state_dict())
    assert ebc.table("v").is_frozen and ebc.table("v").ids().numel() == 3
    thawed = make(FEATURES, {})
    thawed.load_state_dict(ebc.state_dict())  # a checkpoint does not save it
    assert not thawed.table("v").is_frozen and thawed.table("v").num_rows == 3


@pytest.mark.parametrize("lives", LIVES)
def test_prefetch_passes_frozen_tables_over(lives):
    """And tables with a life, whatever is beside them."""
    inserted = {name: 0 if name in LIVES[lives] else 2 for name in FEATURES}
    ebc = make(FEATURES, LIVES[lives])
    ebc.table("u").freeze()
    ebc.table("v").freeze()
    (group,) = (one.tables for one in ebc.unsharded_lookup._current_groups())
    ids, offsets = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 1, 2, 3, 5])
    group.prefetch(Batch(ids, offsets=offsets))
    rows = [ebc.table(name).num_rows for name in FEATURES]
    assert rows == [inserted["t"], 0, 0]
    ebc.table("t").freeze()
    ebc.table("v").unfreeze()
    ebc.local_tables()
    group = ebc.unsharded_lookup._current_groups()[0].tables
    group.prefetch(Batch(ids, offsets=offsets))
    assert ebc.table("v").num_rows == inserted["v"]
    ebc.table("v").freeze()
    ebc.unsharded_lookup._current_groups()
    group.prefetch(Batch(ids + 10, offsets=offsets))
    assert [ebc.table(name).num_rows for name in FEATURES] == [rows[0], 0, ebc.table("v").num_rows]


def test_deltas_name_nothing_of_a_frozen_table():
    ebc = make(FEATURES, LIVES["one"])
    batch, _ = draw(random.Random(5), FEATURES)
    for _ in range(2):
        ebc(batch).values().sum().backward()
    tables = ebc.local_tables()
    since = {name: table.version() for name, table in tables.items()}
    for name in ("t", "u"):
        ebc.table(name).freeze()
    edits = {name: table.edits for name, table in tables.items()}
    other, _ = draw(random.Random(6), FEATURES)
    for one in (batch, other):
        ebc(one).values().sum().backward()
    changed = {
        name: table.changes.changed_rows(since[name], table.id_map)[0].numel()
        for name, table in tables.items()
    }
    assert changed["t"] == changed["u"] == 0 < changed["v"]
    assert {name for name in tables if tables[name].edits != edits[name]} == {"v"}
    # Updates of an unfrozen table are in the change log, whether it has a life or not.
    ebc.table("t").unfreeze()
    ebc(batch).values().sum().backward()
    assert tables["t"].changes.changed_rows(since["t"], tables["t"].id_map)[0].numel() > 0


def test_an_error_changes_nothing_beside_a_frozen_table():
    lives = {"t": {"eviction": dyn.ExpireAfter(steps=1)}, "u": {"eviction": LRU}}
    for kind in (lives, {}):
        ebc = make(FEATURES, kind)
        small = ebc.table("u")
        ebc.table("v").freeze()
        limit = 12 if kind else 1000
        ebc(draw(random.Random(7), FEATURES)[0]).values().sum().backward()
        before = {name: state_of(ebc, name) for name in FEATURES}
        many = torch.arange(100, 101 + limit)
        lengths = torch.tensor([0, len(many), 1])
        batch = KeyedJaggedTensor(["a", "b", "c"], torch.cat([many, many[:1]]), lengths=lengths)
        with pytest.raises(RuntimeError):
            ebc(batch)
        assert {name: state_of(ebc, name) for name in FEATURES} == before
        small.freeze()
        ebc.table("t").freeze()
        assert ebc(batch).values().shape == (1, 16)  # a frozen table needs no room
