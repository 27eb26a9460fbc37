"""Saved lives: partial and invalid states, smaller limits, and the state after a failure."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from life_cases import LRU, Stream
from table_cases import ids_of
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn import ops
from torchrec_dyn.life import Clock
from torchrec_dyn.life.scores import NO_STEP
from torchrec_dyn.policies import MOST_COUNT
from torchrec_dyn.storage.row_numbers import OpenForward, OpenForwards, RowNumbers


@pytest.mark.parametrize("left_out", range(1, 7))
def test_counters_above_a_smaller_number_go_after_admission(left_out):
    """Five of six waiting ids are admitted first, so no counter is dropped."""
    many = Stream(None, dyn.AdmitAfter(2, counters=100))
    many.step(*range(1, 7))
    few = Stream(None, dyn.AdmitAfter(2, counters=4))
    few.table.load_state(many.table.export_state())
    came = [number for number in range(1, 7) if number != left_out]
    assert few.step(*came) == set(came)
    assert [one[0] for one in few.waiting()] == [left_out] and few.stat("counters_dropped") == 0


def test_an_age_list_that_failed_is_made_again(monkeypatch):
    stream, search = Stream(dyn.ExpireAfter(steps=64)), ops.lowest_rows
    stream.step(*range(1, 5))
    for _ in range(63):
        stream.step(9)

    def fail(*asked, **more):
        raise MemoryError

    monkeypatch.setattr(ops, "lowest_rows", fail)
    with pytest.raises(MemoryError):
        stream.step(9)
    monkeypatch.setattr(ops, "lowest_rows", search)
    assert stream.step(9) == {1, 2, 3, 4, 9}
    assert stream.step(9) == {9}


def old_state():
    """Returns a state of step 10: two trained ids, one assigned after the last set_time, one waiting."""
    stream = Stream((dyn.ExpireAfter(time=99), LRU), dyn.AdmitAfter(2), limit=4)
    stream.table.set_time(50)
    stream.steps(*[[1, 1, 2, 2]] * 9, [1, 7])
    stream.table.set_time(60)
    stream.table.assign(ids_of(3), torch.ones(1, 4))
    return stream.table.export_state()


@pytest.mark.parametrize("kept", [("clock",), ("waiting",), ("last_seen",), ("last_seen", "count")])
def test_a_part_of_a_life_tells_which_step_it_is_of(kept):
    state = {name: old_state()[name] for name in ("ids", "weight", *kept)}
    stream = Stream((dyn.ExpireAfter(time=99), LRU), dyn.AdmitAfter(2), limit=4)
    stream.table.load_state(state)
    # Only the count 0 shows that one id was assigned for the next step.
    assert stream.table.step == (11 if kept == ("last_seen",) else 10)
    stream.table.set_time(70)
    assert len(stream.step(20, 20, 21, 21)) == 4
    stream.table.load_state(stream.table.export_state())
    stream.step(30)
    assert stream.counts(30) == [1]


@pytest.mark.parametrize(
    ("name", "saved", "told"),
    [
        ("count", torch.ones(2, dtype=torch.int64), r"count \[R\] of int64 for 3 rows, got \[2\]"),
        ("count", torch.ones(3), r"count \[R\] of int64 .* of torch.float32"),
        ("last_seen", ids_of(1, -1, 1), "last_seen from 0 to .*, got -1 to 1"),
        ("last_seen", ids_of(1, NO_STEP, 1), f"last_seen from 0 to .* to {NO_STEP}"),
        ("count", ids_of(1, MOST_COUNT + 1, 1), "count from 0 to"),
        ("waiting", torch.tensor([[8], [NO_STEP], [1]]), "last_seen from 0 to"),
        ("waiting", torch.tensor([[8], [1], [-1]]), "count from 0 to"),
        ("waiting", torch.tensor([[8, 8], [1, 1], [1, 1]]), "distinct ids in waiting"),
        ("waiting", torch.tensor([[1], [1], [1]]), "ids without a row in waiting"),
        ("clock", torch.tensor([[0, 0], [1, 2]]), "ascending steps and times"),
        ("clock", torch.tensor([[0, 1], [2, 2]]), "ascending steps and times"),
        ("clock", torch.tensor([[0], [-1]]), "clock from 0 to"),
    ],
)
def test_a_life_that_cannot_be_is_refused(name, saved, told):
    stream = Stream((dyn.ExpireAfter(time=99), LRU), dyn.AdmitAfter(2))
    before = old_state()
    stream.table.load_state(before)
    with pytest.raises(ValueError, match=rf"'t'\).load_state: expected .*{told}"):
        stream.table.load_state({**before, name: saved})
    assert stream.ids() == {1, 2, 3}


def test_a_time_that_one_table_refuses_is_set_for_none():
    config = dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(time=9))
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=9, feature_names=[name])
        for name in "ab"
    ]
    options = {"dynamic": config, "fused_params": {"learning_rate": 0.1}}
    collection = dyn.DynamicEmbeddingBagCollection(tables, **options)
    collection.embedding_bags["b"].rows().set_time(100)
    with pytest.raises(ValueError, match=r"'b'.*not before 100, got 50"):
        collection.set_time(50)
    batch = KeyedJaggedTensor.from_lengths_sync(["a", "b"], ids_of(1, 1), torch.tensor([1, 1]))
    collection.set_time(torch.tensor(200).numpy()[()])  # an event time as a numpy number
    collection(batch)
    assert [collection.table(name).last_seen(ids_of(1)).item() for name in "ab"] == [200, 200]


def test_a_loaded_step_never_goes_behind_the_scores():
    """An optimizer state is loaded without the module's state, whose scores are newer."""
    config = dyn.DynamicTableConfig(eviction=LRU)
    tables = [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])]
    options = {"dynamic": config, "fused_params": {"learning_rate": 0.1}}
    collection = dyn.DynamicEmbeddingBagCollection(tables, **options)
    batch = KeyedJaggedTensor.from_lengths_sync(["f"], ids_of(1), torch.tensor([1]))
    saved = None
    for step in range(10):
        collection(batch).values().sum().backward()
        if step == 4:
            saved = collection.fused_optimizer.state_dict()
    collection.fused_optimizer.load_state_dict(saved)
    rows = collection.embedding_bags["t"].rows()
    assert rows.step == 10 and rows.last_seen(ids_of(1)) == 10 and rows.count(ids_of(1)) == 10


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.booleans()), max_size=40))
def test_no_row_is_handed_out_twice(events):
    """Rows are taken, freed in parts, withheld while a forward is open; freed rows are reused first."""
    forwards, held, free, waiting = OpenForwards(), [], set(), set()
    numbers, opened = RowNumbers(forwards, torch.device("cpu")), []
    for takes, count, opens in events:
        if opens and forwards.numbers:
            opened.clear()
        elif opens:
            opened.append(OpenForward(forwards))
        if not forwards.numbers:
            free, waiting = free | waiting, set()
        if takes:
            high = numbers.highest_after(count)
            taken = numbers.prepare(count)
            numbers.commit(taken)
            rows = [row for part in taken.reused for row in part.tolist()]
            rows += range(taken.first, taken.high_water_mark)
            assert len({*rows}) == count and not {*rows} & {*held, *waiting}
            assert numbers.high_water_mark == high and len(free - {*rows}) == max(
                0, len(free) - count
            )
            held += rows
            free -= {*rows}
        else:
            back, held = held[:count], held[count:]
            numbers.commit(numbers.prepare(0, torch.tensor(back, dtype=torch.int64)))
            (waiting if forwards.numbers else free).update(back)


def test_the_latest_of_clocks_does_not_ask_one_for_steps_before_its_first() -> None:
    """A clock that has dropped its early times does not say that its first time held since step 0."""
    whole, dropped = torch.tensor([[0, 2, 4], [10, 20, 30]]), torch.tensor([[4], [30]])
    for clocks in ([whole, dropped], [dropped, whole]):
        assert torch.equal(Clock.latest(clocks).export(), whole)
    late = torch.tensor([[3, 6], [25, 40]])
    assert Clock.latest([whole, late]).export().tolist() == [[0, 2, 3, 4, 6], [10, 20, 25, 30, 40]]
