"""Counts with a half-life: when they are halved, how they are rounded, and what the ties are."""

import copy
import warnings

import pytest
import torch
from life_cases import Stream, living_table, mixed
from table_cases import ids_of, make_group, same_state
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import apply_delta, export_delta, mark, open_checkpoint
from torchrec_dyn.life import STEPS_WITHOUT_TIME

MOST = 2**32 - 1
IN_STEPS = dyn.LeastFrequentlyUsed(half_life_steps=4)
IN_TIME = dyn.LeastFrequentlyUsed(half_life_time=10)


@pytest.mark.usefixtures("device")
def test_counts_are_halved_at_the_multiples_of_the_half_life():
    stream = Stream(IN_STEPS)
    stream.steps([1] * 5, [], [])
    assert stream.counts(1) == [5], "step 3"
    assert stream.step() == {1} and stream.counts(1) == [3], "step 4; a half is rounded up"
    stream.steps([], [], [])
    assert stream.counts(1) == [3]
    stream.step()
    assert stream.counts(1, 2) == [1, 0], "5/4, not 3/2: it is rounded once"
    stream.step(1, 1)
    assert stream.counts(1) == [3], "two more than the present count"
    state = stream.table.export_state()
    assert state["count"].tolist() == [3] and state["last_seen"].tolist() == [9]
    assert stream.steps([], [], []) == {1} and stream.counts(1) == [2]
    assert stream.table.export_state()["count"].tolist() == [3], "as it was when it was seen"


@pytest.mark.usefixtures("device")
def test_an_old_favourite_gives_way():
    always, halved = Stream(dyn.LeastFrequentlyUsed(), limit=2), Stream(IN_STEPS, limit=2)
    for stream in (always, halved):
        stream.steps([1] * 9, [], [], [], [], [], [], [2, 2])
    assert always.step(3) == {1, 3} and halved.step(3) == {1, 3}, "9/4 is more than 2"
    for stream in (always, halved):
        stream.steps([], [], [], [3, 3])  # step 13; the 9 are halved for the third time at step 12
    assert always.step(4) == {1, 4} and halved.step(4) == {3, 4}


@pytest.mark.usefixtures("device")
def test_the_order_has_256ths_and_then_the_mixed_id():
    low, high = mixed(0, 2**64 - 1)
    stream = Stream(IN_STEPS, limit=2)
    stream.steps([high], [], [], [low])
    assert stream.counts(high, low) == [1, 1], "a half is rounded up"
    assert stream.step(7) == {low, 7}, "but 1/2 is less than 1"
    stream = Stream(dyn.LeastFrequentlyUsed(half_life_steps=1), limit=2)
    stream.steps([high], [low], *[[]] * 6)  # at step 9: 1/256 and 1/128
    assert stream.step(7, 7) == {low, 7}
    stream = Stream(dyn.LeastFrequentlyUsed(half_life_steps=1), limit=2)
    stream.steps([high], [low], *[[]] * 8)  # at step 11: both below 1/256
    assert stream.step(7, 7) == {high, 7}
    stream = Stream(IN_STEPS, limit=2)
    stream.step(high, low)
    state = stream.table.export_state()
    most = torch.where(state["ids"] == high, 2**24, 2**25)
    stream.table.load_state({**state, "count": most})
    assert stream.step(7) == {high, 7}, "from 2^24 on, counts are ties"


@pytest.mark.usefixtures("device")
def test_a_halved_count_stays_at_the_most_it_can_say():
    stream = Stream(IN_STEPS)
    stream.step(1)
    state = stream.table.export_state()
    stream.table.load_state({**state, "count": torch.tensor([MOST])})
    stream.step(1, 1)
    assert stream.counts(1) == [MOST]
    stream.steps([], [])
    assert stream.counts(1) == [2**31]
    stream.steps(*[[]] * 170)
    assert stream.counts(1) == [0] and stream.ids() == {1}


@pytest.mark.usefixtures("device")
def test_half_lives_by_the_clock():
    stream = Stream(IN_TIME, limit=3)
    stream.steps([1] * 8, [])
    assert stream.counts(1) == [8]
    stream.table.set_time(1009)
    assert stream.steps([], [2] * 3, []) == {1, 2} and stream.counts(1, 2) == [8, 3]
    assert stream.last_seen(1, 2) == [1009, 1009], "in the unit of the clock"
    stream.table.set_time(1010)
    assert stream.counts(1, 2) == [4, 2], "the next step's"
    stream.step(1)
    assert stream.counts(1, 2) == [5, 2]
    stream.table.set_time(1029)
    stream.step(3)
    assert stream.counts(1, 2, 3) == [3, 1, 1] and stream.last_seen(1) == [1010]
    assert stream.step(4) == {1, 3, 4}, "2 had 3/4"


@pytest.mark.parametrize("policy", [IN_TIME, (dyn.ExpireAfter(steps=3), IN_TIME)])
def test_a_half_life_without_a_clock_warns_once(policy):
    stream = Stream(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream.steps(*[[1]] * (STEPS_WITHOUT_TIME - 1))
    with pytest.warns(UserWarning, match=r"'t'.*set_time.*so no count decays\. Call") as noted:
        stream.steps([1], [1])
    assert len(noted) == 1 and stream.counts(1) == [STEPS_WITHOUT_TIME + 1]


def test_times_that_no_count_needs_are_forgotten():
    """A row of an earlier time reads as the first time that is left: more than 39 half-lives ago."""
    stream = Stream(dyn.LeastFrequentlyUsed(half_life_time=2))
    stream.table.set_time(0)
    stream.step(1000)
    for time in range(300):
        stream.table.set_time(time)
        stream.step(time % 50, -1)
    clock = stream.table.export_state()["clock"]
    assert clock.shape[1] < 170
    assert 0 < clock[1, 0] <= 299 - 39 * 2
    assert stream.last_seen(7) == [257] and stream.last_seen(1000) == [int(clock[1, 0])], "for 0"
    assert stream.last_seen(-1, 49) == [299, 299] and stream.counts(-1, 48) == [4, 1]


def test_a_table_goes_on_with_the_counts_of_another_policy():
    """As checkpoints do: a count is what it was when the row was last seen."""
    plain, halved = Stream(dyn.LeastFrequentlyUsed()), Stream(IN_STEPS)
    plain.steps([1] * 6, [2], [2])
    halved.table.load_state(plain.table.export_state())
    assert halved.counts(1, 2) == [6, 2]
    halved.step()
    assert halved.counts(1, 2) == [3, 1]
    plain.table.load_state(halved.table.export_state())
    assert plain.counts(1, 2) == [6, 2]


def test_first_counts_include_those_of_a_waiting_id():
    stream = Stream(IN_STEPS, dyn.AdmitAfter(5))
    stream.steps([1, 1], [1, 1])
    assert stream.counts(1) == [4] and stream.ids() == set()
    stream.steps([], [], [1])
    assert stream.counts(1) == [5], "counters of waiting ids are not halved"
    stream.steps([], [], [])
    assert stream.counts(1) == [3]


def test_a_frozen_table_and_evaluation_halve_nothing():
    table = living_table(IN_STEPS)
    group = make_group(table)
    group(ids_of(1, 1), torch.tensor([0, 2]), training=True)
    for _ in range(9):
        group(ids_of(1, 1), torch.tensor([0, 2]), training=False)
    assert table.count(ids_of(1)).tolist() == [2]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("policy", [IN_STEPS, IN_TIME])
def test_a_delta_has_no_rows_that_were_only_halved(policy, tmp_path):
    """Nothing is written at the start of a half-life."""

    def trained(collection, *batches):
        for ids in batches:
            if policy is IN_TIME:
                collection.set_time(12 * (collection.table("t").stats()["step"] + 1))
            lengths = torch.tensor([len(ids)])
            collection(KeyedJaggedTensor(["f"], ids_of(*ids), lengths=lengths))

    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"])
    collection = dyn.DynamicEmbeddingBagCollection(
        [config],
        dynamic=dyn.DynamicTableConfig(eviction=policy),
        fused_params={"learning_rate": 0.1},
    )
    trained(collection, [1] * 9, [2, 2], [3, 4, 5])
    twin = copy.deepcopy(collection)
    marker = mark(collection)
    trained(collection, [2], [], [7])
    export_delta(collection, tmp_path / "delta", marker)
    apply_delta(twin, tmp_path / "delta")
    [saved] = open_checkpoint(tmp_path / "delta").tables.values()
    assert saved.num_rows == 2
    for _ in range(2):
        one, two = (it.local_tables()["t"] for it in (collection, twin))
        assert same_state(one.export_state(), two.export_state())
        assert one.count(one.ids()).tolist() == two.count(one.ids()).tolist()
        for each in (collection, twin):
            trained(each, [11, 12, 13, 2])  # evicts


def test_a_checkpoint_goes_on():
    """Counts, steps and clock are loaded, so that the table halves on as the saved one does."""

    def made():
        config = EmbeddingBagConfig(
            name="t", embedding_dim=4, num_embeddings=4, feature_names=["f"]
        )
        return dyn.DynamicEmbeddingBagCollection(
            [config],
            dynamic=dyn.DynamicTableConfig(eviction=dyn.LowestScore(half_life_time=10)),
            fused_params={"learning_rate": 0.1},
        )

    def trained(collection, time, *ids):
        collection.set_time(time)
        weights = torch.arange(1.0, len(ids) + 1)
        collection(KeyedJaggedTensor(["f"], ids_of(*ids), weights, torch.tensor([len(ids)])))

    one, two = made(), made()
    for time in range(3, 40, 6):
        trained(one, time, time, time + 1, 8)
    for saves, loads in ((one, two), (two, one)):
        loads.load_state_dict(saves.state_dict())
    for time in range(40, 80, 7):
        for each in (one, two):
            trained(each, time, time, 8)
        states = [each.local_tables()["t"].export_state() for each in (one, two)]
        assert same_state(*states)
        counts = [each.table("t").count(states[0]["ids"]).tolist() for each in (one, two)]
        assert counts[0] == counts[1] and counts[0] != states[0]["count"].tolist()
