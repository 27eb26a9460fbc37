"""LowestScore: scores are exact sums of the user's weights, which travel with the ids."""

import random

import pytest
import torch
from life_cases import living_table, mixed, model_of
from mock_device import MockDevice
from table_cases import ids_of, make_group, same_state
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import torchrec_dyn as dyn

MOST = 2**32 - 1


def weights_of(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


class Scored:
    """One table that adds up weights, trained on one batch after another."""

    def __init__(self, admission=None, limit=1000, expire=None, **policy):
        lowest = dyn.LowestScore(**policy)
        self.table = living_table((expire, lowest) if expire else lowest, admission, limit)
        self.group = make_group(self.table)

    def step(self, weights):
        """Trains on one bag of ids and their weights; returns the ids that have a row after it."""
        offsets = torch.tensor([0, len(weights)])
        given = weights_of(*(one for _, one in weights))
        ids = ids_of(*(number for number, _ in weights))
        self.group(ids, offsets, training=True, scores=given).sum().backward()
        return set(self.table.ids().tolist())

    def counts(self, *ids):
        return self.table.count(ids_of(*ids)).tolist()


@pytest.mark.usefixtures("device")
def test_scores_are_sums_of_weights_in_units():
    stream = Scored(unit=0.5)
    stream.step([(1, 2.0), (2, 0.25), (1, 0.75), (3, 0.0)])
    assert stream.counts(1, 2, 3) == [6, 1, 1], "0.25 and 0 count one unit; 1.5 units are 2"
    stream.step([(1, 1.25), (2, 1e30), (4, 1e30), (2, 3.0)])
    assert stream.counts(1, 2, 3, 4) == [8, MOST, 1, MOST], "2.5 units are 2: a half goes to even"
    assert Scored().table.config.eviction.unit == 1 / 256


@pytest.mark.usefixtures("device")
def test_the_lowest_scores_leave_however_often_they_were_seen():
    stream = Scored(limit=2)
    stream.step([(1, 0.1)] * 9 + [(2, 1.0)])
    assert stream.step([(3, 5.0)]) == {2, 3}, "9 times 26 units are less than 256"
    low, high = mixed(0, 2**64 - 1)
    stream = Scored(limit=2)
    stream.step([(low, 1.0), (high, 0.5), (high, 0.5)])
    assert stream.step([(3, 5.0)]) == {high, 3}, "ties by the mixed id, unsigned"


@pytest.mark.usefixtures("device")
def test_the_score_of_an_admitted_id_begins_with_its_step():
    stream = Scored(dyn.AdmitAfter(3), unit=1.0)
    stream.step([(1, 7.0), (1, 7.0), (2, 9.0)])
    assert stream.counts(1, 2) == [2, 1], "occurrences, while it waits"
    assert stream.step([(1, 2.0), (2, 9.0), (1, 3.0)]) == {1}
    assert stream.counts(1, 2) == [5, 2]


@pytest.mark.everyday(4)
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("half_life", [{}, {"half_life_steps": 3}, {"half_life_time": 7}])
@pytest.mark.parametrize("admission", [None, dyn.AdmitAfter(2)])
def test_a_stream_that_drifts(half_life, admission):
    stream = Scored(admission, 130, dyn.ExpireAfter(steps=40), unit=0.25, **half_life)
    model, draw = model_of(stream.table), random.Random(5)
    for step in range(40):
        if model.is_timed and step % 3 == 0:
            model.set_time(2 * step)
            stream.table.set_time(2 * step)
        ids = [round(draw.gauss(8 * step, 60)) for _ in range(90)]
        weights = [(number, draw.choice([0.1, 0.125, 0.5, 3.0])) for number in ids]
        model.train(ids, [one for _, one in weights])
        assert stream.step(weights) == set(model.rows)
        held = sorted(model.rows)
        assert stream.counts(*held) == [model.count(number) for number in held]
    assert model.causes["evicted_full"] > 50


def test_a_table_beside_others_counts_alone():
    """The others of its group count occurrences, also where an id stands for several."""
    lowest = dyn.LowestScore(unit=1.0)
    one = living_table(dyn.LeastFrequentlyUsed(), name="t0")
    two, three = living_table(lowest, name="t1"), living_table(None, name="t2")
    group = make_group(one, two, three)
    ids, offsets = ids_of(1, 1, 5, 6, 1), torch.tensor([0, 2, 4, 5])
    times, scores = torch.tensor([2, 1, 3, 1, 1]), weights_of(9, 9, 4, 2, 9)
    for _ in range(2):
        group(ids, offsets, training=True, times=times, scores=scores)
    assert one.count(ids_of(1)).tolist() == [6]
    assert two.count(ids_of(5, 6)).tolist() == [8, 4]
    assert (one.stats()["ids_seen"], two.stats()["ids_seen"]) == (6, 8)


@pytest.mark.parametrize("wrong", [-0.5, float("nan"), float("inf")])
def test_wrong_weights_change_nothing(wrong):
    stream = Scored()
    stream.step([(1, 2.0)])
    before = stream.counts(1, 2)
    with pytest.raises(
        ValueError, match=r"'t'.*finite weights from 0 on for LowestScore, got 1 others"
    ):
        stream.step([(2, 1.0), (1, wrong)])
    with pytest.raises(ValueError, match=r"'t'.*expected weights of the ids, which LowestScore"):
        stream.group(ids_of(1), torch.tensor([0, 1]), training=True)
    with pytest.raises(ValueError, match=r"'t'.*one weight per id for LowestScore, got \[2\] of"):
        stream.group(ids_of(1), torch.tensor([0, 1]), training=True, scores=weights_of(1, 2))
    stream.group(ids_of(1), torch.tensor([0, 1]), training=False)
    assert stream.counts(1, 2) == before and stream.table.step == 1


def test_the_host_of_a_gpu_reads_no_more_often():
    """The check of the weights is read with the first numbers; scores are as on the CPU."""
    with MockDevice() as device:
        states, reads = [], []
        for where in ("cpu", "cuda"):
            table = living_table(dyn.LowestScore(half_life_steps=2), limit=40, device=where)
            for step in range(6):
                numbers = [*range(step * 8, step * 8 + 20)] * 2
                ids, scores = ids_of(*numbers), torch.arange(40.0) / 7
                if where == "cuda":
                    ids, scores = device.of(ids), device.of(scores)
                device.forget()
                offsets = torch.tensor([0, 40]).to(ids.device)
                with torch.no_grad():
                    make_group(table)(ids, offsets, training=True, scores=scores)
                reads.append(len(device.reads))
            states.append(
                {
                    name: getattr(value, "memory", value)
                    for name, value in table.export_state().items()
                }
            )
        assert states[0]["count"].tolist() == states[1]["count"].tolist()
        assert states[0]["ids"].tolist() == states[1]["ids"].tolist()
        assert device.mixed == [] and max(reads) <= 4


def test_a_step_taken_ahead_adds_the_weights_once():
    lowest = dyn.LowestScore(unit=0.5, half_life_steps=2)
    groups = [make_group(living_table(lowest, limit=40)) for _ in range(2)]
    for step in range(4):
        ids, scores = ids_of(*range(step, step + 20)), torch.arange(20.0)
        ahead = groups[0].prefetch_step(ids, torch.tensor([0, 20]), scores=scores)
        for group, given in ((groups[0], ahead), (groups[1], None)):
            group(ids, torch.tensor([0, 20]), training=True, scores=scores, ahead=given)
    one, two = (group.tables[0].export_state() for group in groups)
    assert same_state(one, two) and one["count"].max() > 50


def kjt(ids, weights=None):
    """Returns bags of features; `b` has the ids backwards, and no table reads `c`."""
    values = torch.tensor([*ids[::-1], 1, *ids])
    if weights is not None:
        weights = torch.tensor([*weights[::-1], 99.0, *weights])
    lengths = torch.tensor([len(ids), 1, len(ids)])
    return KeyedJaggedTensor(["b", "c", "a"], values, weights, lengths=lengths)


def collections(eviction):
    """Yields a pooled, a weighted and a sequence collection of a table with a policy and one without."""
    dynamic = {"s": dyn.DynamicTableConfig(eviction=eviction), "u": dyn.DynamicTableConfig()}
    of_tables = [
        {"name": name, "embedding_dim": 4, "num_embeddings": 9, "feature_names": [feature]}
        for name, feature in (("u", "a"), ("s", "b"))
    ]
    fused = {"learning_rate": 0.1}
    bags = [EmbeddingBagConfig(**one) for one in of_tables]
    for weighted in (False, True):
        yield dyn.DynamicEmbeddingBagCollection(bags, weighted, dynamic=dynamic, fused_params=fused)
    yield dyn.DynamicEmbeddingCollection(
        [EmbeddingConfig(**one) for one in of_tables], dynamic=dynamic, fused_params=fused
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_collections_pass_the_weights_of_their_batches(dtype):
    pooled, weighted, sequences = collections(dyn.LowestScore(unit=0.5))
    for collection in (pooled, weighted, sequences):
        features = kjt([1, 2, 1], [0.5, 4.0, 1.0])
        features._weights = features.weights().to(dtype).requires_grad_()
        output = collection(features)
        if collection is pooled:
            plain = kjt([1, 2, 1])
            assert torch.equal(output.values(), pooled.eval()(plain).values()), (
                "pooled without them"
            )
            pooled.train()
        assert collection.table("s").count(ids_of(1, 2)).tolist() == [3, 8]
        with pytest.raises(ValueError, match="expected weights"):
            collection(kjt([1, 2]))
    assert weighted.eval()(kjt([1], [1.0])).values().shape == (1, 8)
    assert len(sequences.eval()(kjt([1]))) == 2, "evaluation needs no weights"


def test_the_micro_batches_of_a_step_count_as_one_batch():
    """With deferred updates a half-life begins with a step, not with a micro-batch."""

    def made():
        config = EmbeddingBagConfig(
            name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"]
        )
        return dyn.DynamicEmbeddingBagCollection(
            [config],
            dynamic=dyn.DynamicTableConfig(eviction=dyn.LowestScore(unit=1.0, half_life_steps=2)),
            fused_params={"learning_rate": 0.1, "defer_updates": True},
        )

    def batch(ids, weights):
        lengths = torch.tensor([len(ids)])
        return KeyedJaggedTensor(["f"], ids_of(*ids), weights_of(*weights), lengths)

    whole, parts = made(), made()
    for step in range(7):
        ids, weights = [1, 2, 1, 10 + step % 3, 2, 1], [1, 2, 3, 4, 5, 6]
        whole(batch(ids, weights)).values().sum().backward()
        for some in (slice(2), slice(2, 6)):
            parts(batch(ids[some], weights[some])).values().sum().backward()
        for collection in (whole, parts):
            collection.fused_optimizer.step()
        asked = ids_of(1, 2, 10, 11, 12)
        expected = whole.table("t").count(asked).tolist()
        assert parts.table("t").count(asked).tolist() == expected
    assert parts.table("t").stats()["step"] == 7 and expected[:2] == [37, 26]
