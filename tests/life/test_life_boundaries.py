"""The ids that have a row after each step: all boundaries of age and limit, in plain numbers."""

import pytest
import torch
from life_cases import LFU, LRU, Stream, assert_seen, mixed, seen
from table_cases import ids_of

import torchrec_dyn as dyn

MOST = 2**32 - 1


# Age.


def test_an_age_of_exactly_the_steps_stays():
    stream = Stream(dyn.ExpireAfter(steps=2))
    assert stream.steps([1, 2], [2], [2]) == {1, 2}  # 1: seen at step 1, now step 3
    assert stream.stat("evicted_expired") == 0
    assert stream.step(2) == {2}
    assert stream.stat("evicted_expired") == 1 and stream.last_seen(1, 2) == [-1, 4]


def test_an_id_that_comes_back_in_time_goes_on():
    stream = Stream(dyn.ExpireAfter(steps=2))
    stream.step(1)
    learnt = stream.weights(1)
    stream.step()
    read = stream.group(ids_of(1, 1), torch.tensor([0, 2]), training=True)
    assert read[0, 0].item() == 2 * learnt[0]
    assert (stream.counts(1), stream.stat("hits"), stream.stat("inserted")) == ([3], 2, 1)


def test_an_id_that_comes_back_too_late_starts_anew_in_that_very_batch():
    stream = Stream(dyn.ExpireAfter(steps=2))
    first = stream.group(ids_of(1), torch.tensor([0, 1]), training=True)
    first.sum().backward()
    stream.steps([], [])
    read = stream.group(ids_of(1, 1), torch.tensor([0, 2]), training=True)
    assert read[0, 0].item() == 2 * first[0, 0].item(), "not the initial row"
    assert stream.counts(1) == [2] and stream.last_seen(1) == [4]
    assert (stream.stat("evicted_expired"), stream.stat("hits"), stream.stat("inserted")) == (
        1,
        0,
        2,
    )


def test_who_is_soon_too_old_may_still_be_seen_again():
    """Rows near the age are listed in advance; later changes of these rows must count."""
    stream = Stream(dyn.ExpireAfter(steps=200))
    assert stream.steps(*[[number] for number in range(1, 9)]) == set(range(1, 9))
    stream.steps(*[[]] * 193)  # step 201
    assert stream.ids() == set(range(1, 9)) and stream.step() == set(range(2, 9))
    stream.table.erase(ids_of(4))
    assert stream.step(3, 4) == set(range(3, 9))  # 4 has a new row, reused
    stream.table.erase(ids_of(5))
    assert stream.step() == {3, 4, 6, 7, 8}
    assert stream.steps([], []) == {3, 4, 6, 7, 8} and stream.step(9) == {3, 4, 7, 8, 9}
    stream.steps(*[[]] * 193)  # step 400
    assert stream.ids() == {3, 4, 9} and stream.last_seen(3, 4, 9) == [203, 203, 207]
    assert stream.steps([], [], []) == {3, 4, 9} and stream.step() == {9}


def test_empty_batches_are_steps():
    stream = Stream(dyn.ExpireAfter(steps=1))
    assert stream.steps([1], []) == {1}
    assert stream.step() == set()
    assert stream.table.step == 3 and stream.stat("evicted_expired") == 1


def test_ages_by_the_clock():
    stream = Stream(dyn.ExpireAfter(time=5))
    stream.table.set_time(10)
    stream.step(1)
    stream.table.set_time(15)
    assert stream.step(2) == {1, 2}, "an age of exactly 5 stays, however many steps"
    stream.table.set_time(15)
    assert stream.last_seen(1, 2, 3) == [10, 15, -1]
    stream.table.set_time(16)
    assert stream.ids() == {1, 2}, "rows leave at the next training forward"
    assert stream.last_seen(1, 2) == [10, 15], "the clock moves no row"
    assert stream.step() == {2}
    stream.table.set_time(20)
    assert stream.step(3) == {2, 3}
    stream.table.set_time(21)
    assert stream.step(2) == {2, 3} and stream.counts(2) == [1], "anew"
    assert stream.stat("evicted_expired") == 2


def test_the_first_time_holds_for_all_steps_before_it():
    """So no row expires when a clock is first set, for example to the seconds since 1970."""
    stream = Stream(dyn.ExpireAfter(time=5))
    stream.steps([1], [], [], [], [], [], [])
    assert stream.ids() == {1} and stream.last_seen(1) == [0], "no clock: no age"
    stream.table.set_time(10**9)
    assert stream.step() == {1} and stream.last_seen(1) == [10**9]
    stream.table.set_time(10**9 + 5)
    assert stream.step() == {1}
    stream.table.set_time(10**9 + 6)
    assert stream.step() == set()


def test_only_the_last_of_several_times_before_a_step_counts():
    stream = Stream(dyn.ExpireAfter(time=5))
    for time in (1, 2, 3):
        stream.table.set_time(time)
    stream.step(1)
    assert stream.last_seen(1) == [3]
    for time in (4, 7, 8):
        stream.table.set_time(time)
    assert stream.step(2) == {1, 2} and stream.last_seen(1, 2) == [3, 8]


@pytest.mark.parametrize("time", [9, -1, 2**63, 10.5, True, "11", None])
def test_times_that_no_clock_shows(time):
    stream = Stream(dyn.ExpireAfter(time=5))
    stream.table.set_time(10)
    stream.step(1)
    with pytest.raises(ValueError, match=r"'t'.*expected"):
        stream.table.set_time(time)
    stream.table.set_time(10)
    assert stream.step() == {1}


# The limit.


@pytest.mark.parametrize("eviction", [LRU, LFU])
def test_a_limit_of_one(eviction):
    stream = Stream(eviction, limit=1)
    assert [stream.step(number) for number in (1, 1, 2, 1)] == [{1}, {1}, {2}, {1}]
    assert stream.counts(1, 2) == [1, 0] and stream.stat("evicted_full") == 2
    with pytest.raises(RuntimeError, match=r"'t'.*at most 1 rows.*\b2\b"):
        stream.step(1, 2)
    assert stream.ids() == {1}


@pytest.mark.parametrize("eviction", [LRU, LFU, (dyn.ExpireAfter(steps=9), LRU)])
def test_a_batch_of_as_many_ids_as_the_limit_fits(eviction):
    stream = Stream(eviction, limit=3)
    assert stream.steps([7, 8], [9, 8], [1, 2, 3]) == {1, 2, 3}
    assert stream.step(3, 3, 5, 6, 5) == {3, 5, 6}
    with pytest.raises(RuntimeError, match=r"'t'.*at most 3 rows.*\b4\b"):
        stream.step(3, 5, 1, 2)
    assert stream.ids() == {3, 5, 6} and stream.table.step == 4


@pytest.mark.parametrize(("limit", "freed"), [(63, 1), (64, 1), (127, 1), (128, 2), (200, 3)])
def test_a_full_table_frees_a_64th_of_its_limit_at_once(limit, freed):
    for needed in (1, 2, 5):
        stream = Stream(LRU, limit=limit)
        stream.steps(range(limit - 1), [-1])
        assert stream.stat("rows") == limit and stream.stat("evicted_full") == 0
        stream.step(*range(1000, 1000 + needed))
        assert stream.stat("evicted_full") == max(freed, needed)
        assert stream.stat("rows") == limit + needed - max(freed, needed)


def test_a_64th_is_no_more_than_the_ids_that_are_not_in_the_batch():
    stream = Stream(LRU, limit=128)
    stream.step(*range(128))
    assert stream.step(*range(127), 1000) == {*range(127), 1000}
    assert stream.stat("evicted_full") == 1


@pytest.mark.parametrize("eviction", [LRU, LFU])
def test_ties_go_by_the_mixed_id_unsigned(eviction):
    old = mixed(0, 2**63 - 1, 2**63, 2**64 - 1)
    for order in (old, old[::-1]):
        stream = Stream(eviction, limit=4)
        stream.step(*order)
        for gone in range(1, 5):
            stream.step(10**6 + gone, 10**6 + gone)  # twice, so not the rarest id
            assert stream.ids() & set(old) == set(old[gone:])


def test_the_oldest_ids_stay_if_the_batch_has_them():
    stream = Stream(LRU, limit=3)
    assert stream.steps([1], [2], [3], [1, 9]) == {1, 3, 9}


def test_the_rarest_ids_stay_if_the_batch_has_them():
    """Even an id that stays the rarest, and a new id that is still rarer."""
    stream = Stream(LFU, limit=3)
    assert stream.steps([1] * 5, [2] * 4, [3], [3, 9]) == {1, 3, 9}
    assert stream.counts(1, 2, 3, 9) == [5, 0, 2, 1]
    assert stream.step(8) == {1, 3, 8}, "9 was the rarest"


def test_frequencies_count_every_occurrence():
    stream = Stream(LFU, limit=3)
    assert stream.steps([1, 1, 1], [2], [2], [3, 3, 3, 3], [9, 9]) == {1, 3, 9}
    assert stream.step(8) == {1, 3, 8}


def test_expiry_comes_before_the_limit():
    """The expired row makes the room, so no other id is evicted."""
    stream = Stream((dyn.ExpireAfter(steps=2), LFU), limit=2)
    assert stream.steps([1, 1, 1], [2], [], [3]) == {2, 3}
    assert (stream.stat("evicted_expired"), stream.stat("evicted_full")) == (1, 0)
    stream = Stream(dyn.ExpireAfter(steps=2), limit=2)
    assert stream.steps([1], [2], [], [3]) == {2, 3}
    with pytest.raises(RuntimeError, match=r"'t'.*at most 2 rows"):
        stream.step(4, 5, 3)


def test_refused_ids_need_no_room():
    stream = Stream(LRU, dyn.AdmitAfter(2, counters=9), limit=2)
    assert stream.steps([1, 1], [2, 2], [3, 4, 5, 1]) == {1, 2}
    assert stream.step(3) == {1, 3}


def test_a_count_stays_at_the_most_it_can_say():
    stream = Stream(LFU)
    stream.step(1)
    state = stream.table.export_state()
    stream.table.load_state({**state, "count": torch.tensor([MOST - 2])})
    stream.step(1)
    assert stream.counts(1) == [MOST - 1]
    stream.step(1, 1, 1)
    assert stream.counts(1) == [MOST] and stream.last_seen(1) == [3]


# Tables above their limit after a load or an assign, and the scores of assigned rows.


@pytest.mark.parametrize(
    ("limit", "loaded", "left"), [(6, 18, 6), (128, 129, 127), (128, 140, 128)]
)
@pytest.mark.parametrize("batch", [[], [0, 5]], ids=["empty", "known"])
def test_a_load_above_the_limit_is_restored_by_the_next_step(limit, loaded, left, batch):
    """Even a step without new ids evicts the rows with the lowest scores, at least a 64th of the limit."""
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
    """The rows were last seen at steps that the table has not reached."""
    large, small = Stream(LRU), Stream(LRU, limit=3)
    large.steps([1], [2], [3], [4])
    state = large.table.export_state()
    del state["step"]
    small.table.load_state(state)
    assert small.step(5) == {3, 4, 5}


def test_a_clock_that_nobody_asked_for_changes_nothing():
    """A collection sets the time of all its tables, also of a table whose policy does not use it."""
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
