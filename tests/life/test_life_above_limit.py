"""Tables that a load or an assign left above their limit, and what assigned rows count for."""

import pytest
import torch
from life_cases import LFU, LRU, Stream, assert_seen, seen
from table_cases import ids_of

import torchrec_dyn as dyn


@pytest.mark.parametrize(
    ("limit", "loaded", "left"), [(6, 18, 6), (128, 129, 127), (128, 140, 128)]
)
@pytest.mark.parametrize("batch", [[], [0, 5]], ids=["empty", "known"])
def test_a_load_above_the_limit_is_restored_by_the_next_step(limit, loaded, left, batch):
    """Though it brings no new id; the lowest leave, and at least a 64th."""
    large = Stream(LRU)
    large.steps(range(loaded - 1), [-1])
    small = Stream(LRU, limit=limit)
    small.table.load_state(large.table.export_state())
    assert small.stat("rows") == loaded and small.stat("evicted_full") == 0
    assert small.step(*batch) >= {-1, *batch}
    assert small.stat("rows") == left and small.stat("evicted_full") == loaded - left


def test_known_ids_beyond_the_limit_do_not_fit_either():
    large, small = Stream(LRU), Stream(LRU, limit=3)
    large.step(1, 2, 3, 4, 5)
    small.table.load_state(large.table.export_state())
    before = seen([small.table])
    with pytest.raises(RuntimeError, match=r"'t'.*at most 3 rows.*\b4\b"):
        small.step(1, 2, 3, 4, 4)
    assert_seen([small.table], before)
    assert small.step(1, 2, 4) == {1, 2, 4}


def test_without_eviction_a_load_above_the_limit_trains_on_but_takes_no_one_in():
    large = Stream(dyn.ExpireAfter(steps=9))
    large.step(*range(9))
    small = Stream(dyn.ExpireAfter(steps=9), limit=6)
    small.table.load_state(large.table.export_state())
    assert len(small.step(1, 2)) == 9
    with pytest.raises(RuntimeError, match="at most 6 rows"):
        small.step(100)


def test_assign_goes_beyond_the_limit_until_the_next_step():
    stream = Stream(LRU, dyn.AdmitAfter(2), limit=3)
    stream.steps([1, 1], [2, 2, 9])
    stream.table.assign(ids_of(9, 8, 7, 1), torch.full((4, 4), 3.0))
    assert stream.ids() == {1, 2, 7, 8, 9}
    assert stream.counts(1, 2, 7, 8, 9) == [2, 2, 0, 0, 0], "9 waits no longer"
    assert stream.last_seen(1, 2, 7, 8, 9) == [1, 2, 2, 2, 2], "1 keeps its own"
    assert stream.waiting() == [] and stream.stat("inserted") == 5
    assert stream.step(1) >= {1} and stream.stat("rows") == 3
    assert stream.stat("evicted_full") == 2
    full = Stream(dyn.ExpireAfter(steps=9), limit=3)
    with pytest.raises(RuntimeError, match=r"'t'.*at most 3 rows"):
        full.table.assign(ids_of(1, 2, 3, 4), torch.zeros(4, 4))
    assert full.ids() == set()


def test_an_assigned_row_ages_from_the_step_it_was_written_in():
    stream = Stream(dyn.ExpireAfter(steps=1))
    stream.step()
    stream.table.assign(ids_of(5), torch.ones(1, 4))
    assert stream.step() == {5} and stream.step() == set()


@pytest.mark.parametrize("replacement", [LRU, LFU])
def test_rows_assigned_at_a_new_time_are_of_that_time_and_make_room_like_others(replacement):
    stream = Stream((dyn.ExpireAfter(time=5), replacement), limit=40)
    stream.table.set_time(10)
    stream.steps([1], [1])
    stream.table.set_time(15)
    stream.table.assign(torch.arange(101, 140), torch.ones(39, 4))
    assert stream.last_seen(1, 101, 139) == [10, 15, 15]
    assert stream.step(*range(40)) == set(range(40))
    assert stream.stat("evicted_full") == 39


def test_a_state_without_its_step_is_restored_to_the_limit_too():
    """Its rows were seen at steps that the table has yet to come to."""
    large, small = Stream(LRU), Stream(LRU, limit=3)
    large.steps([1], [2], [3], [4])
    state = large.table.export_state()
    del state["step"]
    small.table.load_state(state)
    assert small.step(5) == {3, 4, 5}


def test_a_clock_that_nobody_asked_for_changes_nothing():
    """Of two tables of a collection, one by time and one by use, both are told the time."""
    told, untold = Stream(LRU, limit=3), Stream(LRU, limit=3)
    for step in range(3):
        for stream in (told, untold):
            stream.step(step)
        told.table.set_time(10 + step)
        for stream in (told, untold):
            stream.table.assign(ids_of(20 + step), torch.ones(1, 4))
    before, after = untold.table.export_state(), told.table.export_state()
    assert before["last_seen"].tolist() == after["last_seen"].tolist()
    assert before["clock"].tolist() == after["clock"].tolist()
