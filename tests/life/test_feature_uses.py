"""Features that do not insert, count or train, against a plain model of the life of rows."""

import itertools
import random

import pytest
import torch
from life_cases import ADMISSIONS, COUNTS, EVERY_LIFE, EVICTIONS, living_table, model_of
from life_model import ALL, TooFew
from mock_device import CUDA, MockDevice
from shards import deep_but
from table_cases import ids_of, make_group, make_table, same_state
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn import DynamicTableConfig, FeatureUse
from torchrec_dyn.lookup.feature_uses import uses_of
from torchrec_dyn.optimizers import OptimizerKind

FLAGS = list(itertools.product([True, False], repeat=3))
NEGATIVES = [(True, True, True), (False, False, True), (True, False, True)]
LIMIT = 12
RATE = 0.1
SGD = {"optimizer": "EXACT_SGD", "learning_rate": RATE}


def uses_of_flags(flags):
    """Returns the uses of features of one table; `flags` of each are inserts, counts and trains."""
    names = [f"f{number}" for number in range(len(flags))]
    uses = tuple(FeatureUse(name, *own) for name, own in zip(names, flags, strict=True))
    return uses_of([(DynamicTableConfig(features=uses), names)])


class Beside:
    """A table of some features, the model of its life, and sequences of random batches."""

    def __init__(self, life, flags, seed, limit=LIMIT, **options):
        eviction, admission = EVICTIONS[life[0]], ADMISSIONS[life[1]]
        kind = OptimizerKind.EXACT_SGD
        self.table = living_table(eviction, admission, limit, kind=kind, **options)
        self.model, self.flags, self.dice = model_of(self.table), flags, random.Random(seed)
        self.group = make_group(
            self.table, features=[len(flags)], pooling="none", uses=uses_of_flags(flags)
        )

    def batch(self):
        """Returns the ids of each feature: the ids in use move slowly."""
        low = self.model.step // 3
        return [
            [low + self.dice.randrange(9) for _ in range(self.dice.randrange(5))]
            for _ in self.flags
        ]

    def step(self, lists):
        """Trains one batch; the table must read and change as the model does."""
        ids = [number for of_feature in lists for number in of_feature]
        flags = [own for own, of_feature in zip(self.flags, lists, strict=True) for _ in of_feature]
        uses = [own[:2] for own in flags]
        given = ids_of(*ids)
        offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
        try:
            self.model.check(ids, uses)
        except TooFew:
            with pytest.raises(RuntimeError, match="at most"):
                self.group(given, offsets, training=True)
            return
        output = self.group(given, offsets, training=True)
        born = self.model.train(ids, uses=uses)
        before, found = self.table.lookup(given)
        assert found.tolist() == [one is not None for one in born]
        assert torch.equal(output, before)
        output.sum().backward()
        trained = [
            sum(other == number and own[2] for other, own in zip(ids, flags, strict=True))
            for number in ids
        ]
        after, _ = self.table.lookup(given)
        moved = torch.tensor(trained) * found * RATE
        torch.testing.assert_close(after, before - moved[:, None].expand_as(after))

    def check(self):
        rows, stats = self.model.rows, self.table.stats()
        assert set(self.table.ids().tolist()) == set(rows)
        ids = [*rows, *self.model.waiting]
        if self.table.life is not None:
            assert self.table.count(ids_of(*ids)).tolist() == [self.model.count(n) for n in ids]
            last_seen = self.table.last_seen(ids_of(*ids)).tolist()
            assert last_seen == [self.model.last_seen(number) for number in ids]
            assert stats["waiting"] == len(self.model.waiting)
        assert {name: stats[name] for name in COUNTS} == {n: self.model.causes[n] for n in COUNTS}


EVERYDAY = [
    ("none", "all"),
    ("none", "chance"),
    ("lru", "all"),
    ("lfu", "count"),
    ("steps", "count, few counters"),
    ("time, lru", "count"),
]


@pytest.mark.everyday(4)
@pytest.mark.parametrize(("eviction", "admission"), deep_but(EVERYDAY, EVERY_LIFE))
def test_a_table_lives_as_the_model_whatever_its_features_do(eviction, admission, device):
    life = (eviction, admission)
    flags = random.Random(str(life)).sample(FLAGS[1:], 2)
    for seed, of_features in enumerate([NEGATIVES, [(True, True, True), *flags]]):
        beside = Beside(life, of_features, seed)
        for step in range(20):
            if step % 3 == 0:
                beside.model.set_time(step)
                beside.table.set_time(step)
            beside.step(beside.batch())
            beside.check()
    assert beside.model.causes["ids_seen"] > 0


def test_an_id_that_is_drawn_only_as_a_negative_expires():
    """A negative that counts keeps its id alive for ever."""
    for counts, last in ((True, 20), (False, -1)):
        beside = Beside(("steps", "all"), [(True, True, True), (False, counts, True)], 0)
        beside.step([[7], []])
        for _ in range(19):
            beside.step([[], [7]])
            beside.check()
        assert beside.table.last_seen(ids_of(7)).tolist() == [last]


@pytest.mark.parametrize("other", [(False, True, True), (True, False, True)])
def test_a_counter_beyond_the_count_waits_for_an_occurrence_that_counts(other):
    """A load into a table with a smaller count leaves such counters, and so does a sync of replicas."""
    saved = living_table(None, dyn.AdmitAfter(5))
    make_group(saved)(ids_of(7, 7, 7, 7), torch.tensor([0, 4]), training=True)
    table = living_table(None, dyn.AdmitAfter(3))
    table.load_state(saved.export_state())
    uses = uses_of_flags([(*ALL, True), other])
    group = make_group(table, features=[2], pooling="none", uses=uses)
    group(ids_of(7), torch.tensor([0, 0, 1]), training=True)
    assert table.ids().tolist() == [] and table.count(ids_of(7)).tolist() == [4]
    group(ids_of(7, 7), torch.tensor([0, 1, 2]), training=True)
    assert table.ids().tolist() == [7] and table.count(ids_of(7)).tolist() == [5]


def test_a_row_evicted_by_the_step_that_reads_it_reads_as_unseen():
    """The row is given to another id in the same step: the negative must not read or train it."""
    beside = Beside(("lru", "all"), [(True, True, True), (False, False, True)], 0)
    beside.step([list(range(LIMIT)), []])
    beside.step([list(range(1, LIMIT)), []])
    beside.step([[100], [0, 1]])
    beside.check()
    assert set(beside.table.ids().tolist()) == {*range(1, LIMIT), 100}
    # Rows that do not count need no room beside the new ones.
    beside.step([list(range(200, 205)), list(range(1, LIMIT))])
    beside.check()
    assert {*range(200, 205)} < set(beside.table.ids().tolist())


def test_initial_rows_of_ids_that_are_not_inserted(device):
    table = make_table(unseen="initial")
    group = make_group(
        table,
        features=[2],
        pooling="none",
        uses=uses_of_flags([(*ALL, True), (False, True, True)]),
    )
    output = group(ids_of(1, 2, 1), torch.tensor([0, 1, 3]), training=True)
    assert table.ids().tolist() == [1]
    twin = make_table(unseen="initial")
    twin.find_or_insert(ids_of(1, 2))
    assert torch.equal(output.detach(), twin.lookup(ids_of(1, 2, 1))[0])
    output.sum().backward()
    assert table.ids().tolist() == [1] and table.stats()["refused"] == 1


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    "life", [("none", "all"), ("lru", "count"), ("steps, lfu", "all")], ids=str
)
def test_a_device_takes_the_steps_of_the_cpu(life):
    flags = [(True, True, True), (False, False, True), (True, False, False)]
    options = {"unseen": "initial", "limit": 1000 if life[0] == "none" else LIMIT}
    one = Beside(life, flags, 3, **options)
    with MockDevice() as device:
        two = Beside(life, flags, 3, device=CUDA, **options)
        ahead = Beside(life, flags, 3, device=CUDA, **options)
        evicting = [
            [list(range(LIMIT)), [], []],
            [list(range(1, LIMIT)), [], []],
            [[100], [0, 1], []],
        ]
        for step in range(16):
            one.model.step = step
            lists = evicting[step] if step < len(evicting) else one.batch()
            ids = ids_of(*(number for of_feature in lists for number in of_feature))
            offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
            output = one.group(ids, offsets, training=True)
            there, places = ids.to(CUDA), offsets.to(CUDA)
            others = [two.group(there, places, training=True)]
            prepared = ahead.group.prefetch_step(there, places)
            others.append(ahead.group(there, places, training=True, ahead=prepared))
            for other in others:
                assert torch.equal(other.detach().memory, output.detach())
                if output.numel():
                    other.sum().backward()
            if output.numel():
                output.sum().backward()
        assert device.mixed == []
        for twin in (two, ahead):
            state = {name: value.cpu() for name, value in twin.table.export_state().items()}
            assert same_state(state, one.table.export_state())


def test_features_of_a_varying_number_of_bags():
    """The bags of each feature and rank tell which ids are whose."""
    flags = [(True, True, True), (False, True, False), (True, False, False)]
    sizes = [[2, 1], [1, 0], [0, 2]]
    ids, offsets = ids_of(1, 1, 2, 3, 8, 9, 4, 5), torch.tensor([0, 2, 3, 4, 6, 6, 8])
    table = living_table(EVICTIONS["lru"], kind=OptimizerKind.EXACT_SGD)
    group = make_group(table, features=[3], uses=uses_of_flags(flags))
    output = group(ids, offsets, training=True, batch_sizes=sizes)
    assert table.ids().sort().values.tolist() == [1, 2, 3, 4, 5]
    assert table.count(ids_of(1, 3, 4, 8)).tolist() == [2, 1, 0, 0]
    before, _ = table.lookup(ids_of(1, 4))
    output.sum().backward()
    moved = (before - table.lookup(ids_of(1, 4))[0])[:, 0]
    torch.testing.assert_close(moved, torch.tensor([2 * RATE, 0.0]))


def test_a_prefetch_inserts_no_id_of_a_feature_that_does_not():
    table = make_table()
    group = make_group(table, features=[2], uses=uses_of_flags([(*ALL, True), (False, True, True)]))
    group.prefetch(ids_of(1, 2), torch.tensor([0, 1, 2]))
    assert table.num_rows == 0
    group(ids_of(1, 2), torch.tensor([0, 1, 2]), training=True)
    assert table.ids().tolist() == [1]


def item(kind, name="t"):
    return kind(name=name, embedding_dim=4, num_embeddings=50, feature_names=["clicked", "drawn"])


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
def test_a_collection_finds_its_features_by_name(kind):
    """In a batch they come in any order, and other tables may read them too."""
    of_bags = kind is EmbeddingBagConfig
    make = dyn.DynamicEmbeddingBagCollection if of_bags else dyn.DynamicEmbeddingCollection
    used = DynamicTableConfig(features=(FeatureUse("drawn", inserts=False),))
    collection = make([item(kind), item(kind, "whole")], dynamic={"t": used}, fused_params=SGD)
    batch = KeyedJaggedTensor(
        ["drawn", "clicked"], ids_of(1, 2, 3, 1), lengths=torch.tensor([3, 1])
    )
    collection(batch)
    assert collection.table("t").ids().tolist() == [1]
    assert collection.table("t").stats()["refused"] == 2
    assert set(collection.table("whole").ids().tolist()) == {1, 2, 3}


def ids_of_tables(model):
    return [
        one.ids().tolist()
        for collection in model.modules()
        if isinstance(collection, dyn.DynamicEmbeddingCollection)
        for one in collection.local_tables().values()
    ]


def test_a_quotient_remainder_table_uses_the_features_of_the_user():
    used = DynamicTableConfig(features=(FeatureUse("drawn", inserts=False),))
    pairs = dyn.QuotientRemainderEmbeddingBagCollection(
        [item(EmbeddingBagConfig)], buckets=10, dynamic=used, fused_params=SGD
    )
    batch = KeyedJaggedTensor(["clicked", "drawn"], ids_of(7, 25), lengths=torch.tensor([1, 1]))
    pairs(batch)
    assert sorted(ids_of_tables(pairs)) == [[0], [7]]


def test_a_use_of_a_feature_that_the_table_does_not_read():
    used = DynamicTableConfig(features=(FeatureUse("shown", inserts=False),))
    text = (
        r"^DynamicEmbeddingBagCollection\(table='t'\): expected a FeatureUse of a feature of the table, "
        r"\['clicked', 'drawn'\], got 'shown'\.$"
    )
    with pytest.raises(ValueError, match=text):
        dyn.DynamicEmbeddingBagCollection([item(EmbeddingBagConfig)], dynamic=used)


BAD_USES = [
    ({"features": [FeatureUse("f")]}, r"\.features: expected a tuple of FeatureUse, got \["),
    ({"features": ("f",)}, r"\.features: expected a tuple of FeatureUse, got \('f',\)\.$"),
    ({"features": (FeatureUse("f"), FeatureUse("f", counts=False))}, "one FeatureUse .* 2 for 'f'"),
]


@pytest.mark.parametrize(("options", "text"), BAD_USES, ids=["list", "name", "twice"])
def test_uses_that_are_not_valid(options, text):
    with pytest.raises(ValueError, match=r"^DynamicTableConfig.*" + text):
        DynamicTableConfig(**options)


def test_flags_that_are_not_valid():
    with pytest.raises(ValueError, match=r"^FeatureUse\.counts: expected True or False, got 0\.$"):
        FeatureUse("f", counts=0)
    with pytest.raises(ValueError, match=r"^FeatureUse\.feature: expected the name .*, got ''\.$"):
        FeatureUse("")
