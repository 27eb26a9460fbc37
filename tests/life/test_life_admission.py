"""Admission of unseen ids: boundaries of counting and of chance, in plain numbers."""

import math

import pytest
from life_cases import LRU, Stream, assert_seen, mixed, seen
from table_cases import ids_of, same_state

import torchrec_dyn as dyn
from torchrec_dyn import ops


@pytest.mark.parametrize(
    ("batches", "count", "refused"),
    [
        ([[7, 7]], None, 2),
        ([[7, 7, 7]], 3, 0),
        ([[7, 7, 7, 7]], 4, 0),
        ([[7, 7], [7]], 3, 2),
        ([[7], [7, 7, 7]], 4, 1),
        ([[7], [], [7], [7]], 3, 2),
        ([[7, 7, 7], [7, 7]], 5, 0),
    ],
)
def test_an_id_is_in_at_exactly_the_count(batches, count, refused):
    stream = Stream(admission=dyn.AdmitAfter(3))
    assert stream.steps(*batches) == (set() if count is None else {7})
    assert stream.counts(7, 8) == [count or 2, 0]
    assert stream.last_seen(7) == [-1 if count is None else len(batches)]
    assert stream.waiting() == ([[7, 1, 2]] if count is None else [])
    assert stream.stat("refused") == refused and stream.stat("inserted") == (count is not None)
    assert stream.stat("ids_seen") == sum(map(len, batches))
    assert stream.stat("ids_seen") == stream.stat("hits") + stream.stat("unseen")


def test_all_occurrences_of_a_forward_learn_when_its_id_is_let_in():
    stream, free = Stream(admission=dyn.AdmitAfter(3)), Stream()
    assert stream.steps([7, 7], [7, 7]) == free.step(7, 7)
    assert stream.weights(7) == free.weights(7)


def test_an_id_that_lost_its_row_is_counted_from_0():
    stream = Stream(dyn.ExpireAfter(steps=1), dyn.AdmitAfter(2))
    stream.steps([1, 1], [9], [9], [])
    assert stream.ids() == {9} and stream.counts(1, 9) == [0, 2]
    stream.step(1)
    assert stream.waiting() == [[1, 5, 1]]


def test_a_waiting_id_expires_as_a_row_does():
    stream = Stream(dyn.ExpireAfter(steps=2), dyn.AdmitAfter(2))
    stream.steps([1, 2], [], [1])
    assert stream.ids() == {1}, "1 has an age of exactly 2"
    assert stream.step(2) == {1} and stream.stat("counters_expired") == 1
    assert stream.waiting() == [[2, 4, 1]], "2 is counted from 0"
    stream.steps([], [], [])
    assert stream.waiting() == [] and stream.stat("counters_expired") == 2
    assert stream.stat("counters_dropped") == 0 and stream.stat("evicted_expired") == 1


def test_a_waiting_id_expires_by_the_clock():
    stream = Stream(dyn.ExpireAfter(time=10), dyn.AdmitAfter(2))
    stream.step(1)  # before the first time is set, which holds for this step too
    stream.table.set_time(100)
    stream.step(2, 3)
    stream.table.set_time(110)
    assert stream.step(3) == {3} and stream.stat("counters_expired") == 0
    stream.table.set_time(111)
    assert stream.step(2) == {3} and stream.waiting() == [[2, 4, 1]]
    assert stream.stat("counters_expired") == 2


def test_a_refused_batch_expires_no_counter():
    stream = Stream(dyn.ExpireAfter(steps=3), dyn.AdmitAfter(2, counters=9), limit=1)
    stream.steps([1, 2], [], [], [3, 3])
    before = seen([stream.table])
    with pytest.raises(RuntimeError, match="at most 1 rows"):
        stream.step(4, 4)
    assert_seen([stream.table], before)
    assert before[0][1]["waiting"] == 2
    stream.step(1, 2)
    assert stream.waiting() == [[1, 5, 1], [2, 5, 1]] and stream.stat("counters_expired") == 2


def test_a_step_without_memory_changes_nothing(monkeypatch):
    """The search for the row to evict fails."""
    stream = Stream(LRU, dyn.AdmitAfter(3), limit=8)
    stream.steps([*range(8)] * 3, [90, 90, 91])
    before = seen([stream.table])

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(ops, "lowest_rows", fail)
        stream.step(0, 90, 91, 92)
    assert_seen([stream.table], before)
    assert 90 in stream.step(0, 90, 91, 92) and len(stream.ids()) == 8
    assert stream.waiting() == [[91, 3, 2], [92, 3, 1]]


def test_erase_ends_a_count():
    stream = Stream(admission=dyn.AdmitAfter(2))
    stream.step(1, 2)
    assert stream.table.erase(ids_of(1, 3)) == 0, "an id had a row"
    assert stream.counts(1, 2) == [0, 1] and stream.stat("erased") == 0
    assert stream.step(1, 2) == {2} and stream.waiting() == [[1, 2, 1]]


def test_a_load_brings_counters_and_clock_along():
    one = Stream((dyn.ExpireAfter(time=5), LRU), dyn.AdmitAfter(2))
    other = Stream((dyn.ExpireAfter(time=5), LRU), dyn.AdmitAfter(2))
    one.table.set_time(10)
    one.step(1, 1)
    one.table.set_time(14)
    one.step(3, 3, 2)
    other.table.load_state(one.table.export_state())
    assert other.last_seen(1, 3) == [10, 14] and other.counts(1, 2, 3) == [2, 1, 2]
    with pytest.raises(ValueError, match="before 14"):
        other.table.set_time(13)
    other.table.set_time(16)
    assert other.step(2) == {2, 3}


@pytest.mark.parametrize(("p", "k"), [(0.25, 1), (0.25, 2), (0.9, 1), (0.01, 60)])
def test_occurrences_of_a_forward_are_as_many_chances(p, k):
    stream = Stream(admission=dyn.AdmitWithProbability(p), limit=5000)
    inside = stream.step(*[number for number in range(4000) for _ in range(k)])
    chance = 1 - (1 - p) ** k
    assert len(inside) / 4000 == pytest.approx(chance, abs=5 * math.sqrt(chance / 4000))
    assert set(stream.counts(*inside)) == {k}
    assert stream.stat("refused") == (4000 - len(inside)) * k


def test_chance_knows_seed_table_id_and_step_only():
    def run(ids=range(500), empty=0, **options):
        stream = Stream(admission=dyn.AdmitWithProbability(0.5), **options)
        return stream.steps(*[[]] * empty, list(ids))

    first = run()
    column_shard = {"embedding_dim": 8, "first_column": 4, "columns": 2}
    assert first == run() == run(reversed(range(500))) == run(eviction=LRU, **column_shard)
    assert first == {number for number in run(range(1000)) if number < 500}
    assert len({frozenset(run(**o)) for o in ({}, {"seed": 6}, {"name": "u"}, {"empty": 1})}) == 4


def test_a_sure_chance_admits_all():
    assert Stream(admission=dyn.AdmitWithProbability(1.0)).step(*range(50)) == set(range(50))


def test_one_counter():
    stream = Stream(admission=dyn.AdmitAfter(2, counters=1))
    stream.steps([1], [2])
    assert stream.waiting() == [[2, 2, 1]] and stream.stat("counters_dropped") == 1
    assert stream.steps([1], [2]) == set() and stream.stat("counters_dropped") == 3
    assert stream.step(2) == {2} and stream.waiting() == []
    assert stream.step(1, 1) == {2, 1} and stream.stat("counters_dropped") == 3


def test_counters_expire_and_are_dropped_in_one_step():
    stream = Stream(dyn.ExpireAfter(steps=2), dyn.AdmitAfter(3, counters=2))
    stream.steps([1], [], [], [2, 3, 4])
    assert stream.stat("waiting") == 2
    assert (stream.stat("counters_expired"), stream.stat("counters_dropped")) == (1, 1)


def test_counters_of_the_batch_itself_may_go():
    low, high = mixed(2**63 - 1, 2**63)
    stream = Stream(admission=dyn.AdmitAfter(2, counters=1))
    stream.step(high, low)
    assert stream.waiting() == [[high, 1, 1]]


@pytest.mark.parametrize(
    ("counters", "most", "left"), [(63, 63, 63), (127, 127, 127), (128, 128, 127), (None, 200, 198)]
)
def test_a_64th_of_the_counters_goes_at_once(counters, most, left):
    """`counters` None: as many counters as the limit, which is small."""
    stream = Stream(admission=dyn.AdmitAfter(2, counters=counters), limit=200)
    stream.step(*range(most))
    assert stream.stat("waiting") == most and stream.stat("counters_dropped") == 0
    stream.step(-1)
    assert stream.stat("waiting") == left and stream.stat("counters_dropped") == most + 1 - left
    assert stream.step(-1) == {-1}, "not the oldest counters were dropped"


def test_a_load_of_more_counters_is_restored_by_the_next_step():
    """All rows and counters are kept until then."""
    many, few = (Stream(LRU, dyn.AdmitAfter(3, counters=c)) for c in (9, 2))
    many.steps([1, 2, 3], [4], [4])
    few.table.load_state(many.table.export_state())
    assert few.waiting() == many.waiting() and few.stat("waiting") == 4
    few.step()
    assert few.stat("waiting") == 2 and few.stat("counters_dropped") == 2
    assert [4, 3, 2] in few.waiting()


LEAST = 65_536


def test_by_default_the_counters_follow_the_rows():
    """At least 65,536, then 4 for each row in use before the step, and never more than the limit."""
    stream = Stream(admission=dyn.AdmitAfter(2), limit=100_000)
    stream.step(*range(LEAST))
    assert stream.stat("waiting") == LEAST and stream.stat("counters_dropped") == 0
    stream.step(-1)
    assert stream.stat("counters_dropped") == LEAST // 64
    # The admission of this step adds rows, which count from the next step on.
    stream.step(*range(-20_002, -2), *range(-20_002, -2), *range(-LEAST - 40_000, -40_000))
    assert stream.stat("rows") == 20_000 and stream.stat("waiting") == LEAST
    stream.step(*range(-180_000, -116_000))
    assert stream.stat("waiting") == 80_000, "not four for each row"
    stream.step(*range(-30_000, -22_000), *range(-30_000, -22_000))
    assert stream.stat("rows") == 28_000
    stream.step(*range(-400_000, -300_000))
    assert stream.stat("waiting") == 100_000, "more than the limit"
    # Without its rows a table has fewer counters again.
    stream.table.erase(stream.table.ids())
    stream.steps([])
    assert stream.stat("waiting") == LEAST


def test_counters_of_a_former_default_are_kept_until_the_next_step():
    """The default was as many as the limit. The saved form is the same."""
    former = Stream(admission=dyn.AdmitAfter(2, counters=10**6), limit=10**6)
    former.steps(range(10_000), range(10_000, 100_000))
    now = Stream(admission=dyn.AdmitAfter(2), limit=10**6)
    now.table.load_state(former.table.export_state())
    assert same_state(now.table.export_state(), former.table.export_state())
    kept = now.step(*range(9_000), *range(50_000, 60_000))
    assert kept == {*range(9_000), *range(50_000, 60_000)}, "admitted before counters are dropped"
    assert now.stat("waiting") == LEAST and now.stat("counters_dropped") == 81_000 - LEAST
    assert not any(now.counts(*range(9_000, 10_000))), "not the oldest were dropped"
    former.table.load_state(now.table.export_state())
    assert former.stat("waiting") == LEAST
