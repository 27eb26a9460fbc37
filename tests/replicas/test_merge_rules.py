"""The rules of a merge, one by one, on replicas of one table in one process."""

import pytest
import torch
from life_cases import Stream
from oracle import unmixed
from policy_cases import SmallNorm
from replica_cases import side_of, sync
from table_cases import ids_of, same_state

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.optimizers import OptimizerKind
from torchrec_dyn.replicas.merge import packed, unpacked
from torchrec_dyn.replicas.merging import part_of, rounds_of
from torchrec_dyn.replicas.side import Side


def replicas_of(count: int = 2, **options) -> tuple[list[Stream], list[Side]]:
    streams = [Stream(**options) for _ in range(count)]
    return streams, [side_of(stream.table) for stream in streams]


def equal_states(streams: list[Stream]) -> dict[str, torch.Tensor]:
    """Asserts that all replicas are equal, and returns what they have."""
    states = [stream.table.export_state() for stream in streams]
    assert all(same_state(state, states[0]) for state in states)
    return states[0]


def rows_of(stream: Stream, *ids: int) -> torch.Tensor:
    return stream.table.lookup(ids_of(*ids))[0]


def assign(stream: Stream, number: int, weight: float) -> None:
    stream.table.assign(ids_of(number), torch.full((1, 4), weight))


def test_an_unseen_id_counts_with_its_initial_row_and_state():
    (one, other, third), sides = replicas_of(3)
    third.step()
    initial = third.group(ids_of(5), torch.tensor([0, 1]), training=False)  # zeros: unseen
    assert not initial.any()
    one.step(5)
    other.step(5)
    first = rows_of(one, 5)
    fresh = Stream()
    fresh.table.find_or_insert(ids_of(5))
    sync(sides)
    state = equal_states([one, other, third])
    mean = (2 * first.double() + rows_of(fresh, 5).double()) / 3
    torch.testing.assert_close(rows_of(third, 5).double(), mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(state["momentum1"], torch.full((1, 4), 2 / 3))


@pytest.mark.parametrize("count", [2, 3])
def test_equal_rows_stay_as_they_are(count):
    streams, sides = replicas_of(count, kind=OptimizerKind.ADAM)
    for stream in streams:
        stream.steps([1, 2, 2], [2, 3])
        assign(stream, 9, -0.0)
    before = streams[0].table.export_state()
    assert len(sync(sides)[0][0]) == 4
    assert same_state(equal_states(streams), before)


def test_a_replica_that_evicted_an_id_does_not_count():
    (one, other), sides = replicas_of(eviction=dyn.LeastRecentlyUsed(), limit=2)
    one.step(1, 2)
    other.step(1, 2)
    sync(sides)
    assert one.steps([3, 4]) == {3, 4}
    assert other.steps([1, 2]) == {1, 2}
    kept = rows_of(other, 1, 2)
    sync(sides)  # a union of four, cut to two: all were seen in the same step
    state = equal_states([one, other])
    assert len(state["ids"]) == 2
    for place, number in enumerate([1, 2]):
        if number in state["ids"].tolist():
            assert torch.equal(rows_of(one, number)[0], kept[place])
    assert one.stat("evicted_full") == 4 and other.stat("evicted_full") == 2


def test_what_one_replica_evicted_and_another_kept_stays():
    (one, other), sides = replicas_of(eviction=dyn.ExpireAfter(steps=2))
    for stream in (one, other):
        stream.step(1, 2)
    sync(sides)
    one.steps([2], [2], [2])  # 1 expires
    other.steps([1], [2], [2])
    assert one.ids() == {2} and other.ids() == {1, 2}
    trained = rows_of(other, 1)
    sync(sides)
    equal_states([one, other])
    assert torch.equal(rows_of(one, 1), trained) and one.last_seen(1) == [2]


def test_the_cut_is_exact_and_by_merged_counts():
    (one, other), sides = replicas_of(eviction=dyn.LeastFrequentlyUsed(), limit=200)
    one.step(*range(200), *range(100))  # counts 2 and 1
    other.step(*range(150, 350), *range(150, 200))
    sync(sides)
    state = equal_states([one, other])
    counts = dict(zip(state["ids"].tolist(), state["count"].tolist(), strict=True))
    assert len(counts) == 200  # not a 64th less
    assert {n for n in counts if n < 100} == {*range(100)} and counts[150] == 3
    assert one.stat("evicted_full") == 150 and other.stat("evicted_full") == 150


def test_own_scores_cut_by_merged_rows_and_their_errors_change_nothing():
    """Of replicas over their limit; the score of one breaks once."""
    streams, sides = replicas_of(eviction=SmallNorm(), limit=60)
    for replica, stream in enumerate(streams):
        stream.step(*range(50 * replica, 50 * replica + 55))
    before = [stream.table.export_state() for stream in streams]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SmallNorm, "score", lambda *given: given[1].float())
        with pytest.raises(ValueError, match=r"DynamicTable\('t'\): expected scores of SmallNorm"):
            sync(sides)
    for stream, state in zip(streams, before, strict=True):
        assert same_state(stream.table.export_state(), state) and stream.stat("evicted_full") == 0
    merged = {}
    for stream in streams:
        held = sorted(stream.ids())
        merged |= dict(zip(held, rows_of(stream, *held), strict=True))
    for number in {*streams[0].ids()} & {*streams[1].ids()}:
        merged[number] = torch.stack([rows_of(one, number)[0] for one in streams]).mean(0)
    order = sorted(merged, key=lambda number: merged[number].double().square().sum().item())
    sync(sides)
    assert {*equal_states(streams)["ids"].tolist()} == {*order[-60:]}
    assert [stream.stat("evicted_full") for stream in streams] == [45, 45]


def test_counts_are_added_up_once():
    (one, other), sides = replicas_of(eviction=dyn.LeastFrequentlyUsed())
    for rounds in range(1, 4):
        one.step(1, 1, 2)
        other.step(1, 3)
        sync(sides)
        assert one.counts(1, 2, 3) == other.counts(1, 2, 3) == [3 * rounds, rounds, rounds]
        assert one.last_seen(1, 2, 3) == [rounds] * 3


def test_half_lives_begin_for_all_counts_at_once():
    policy = dyn.LeastFrequentlyUsed(half_life_steps=2)
    (one, other), sides = replicas_of(eviction=policy)
    for stream in (one, other):
        stream.step(*[1] * 8)  # at step 1
    sync(sides)
    assert one.table.export_state()["count"].tolist() == [16]
    one.steps([], [])  # step 3; the count of 16 is 8 from step 2 on
    other.steps([1], [])  # 8 + 1 at step 2
    sync(sides)
    state = equal_states([one, other])
    assert state["last_seen"].tolist() == [2] and state["count"].tolist() == [9]


def test_an_erased_id_goes_everywhere_and_what_came_after_stays():
    (one, other, third), sides = replicas_of(3)
    for stream in (one, other, third):
        stream.step(1, 2, 3)
    sync(sides)
    one.table.erase(ids_of(1, 2, 77))
    one.step(2)
    other.step(1, 2, 77)
    third.step(3)
    fresh = Stream()
    fresh.table.find_or_insert(ids_of(2))
    trained, initial = rows_of(one, 2).double(), rows_of(fresh, 2).double()
    sync(sides)
    equal_states([one, other, third])
    assert third.ids() == {2, 3}
    mean = (trained + 2 * initial) / 3
    torch.testing.assert_close(rows_of(third, 2).double(), mean, rtol=1e-6, atol=1e-7)
    assert sync(sides)[0][0].numel() == 0
    other.step(1)  # it may come again
    one.step()
    third.step()
    sync(sides)
    assert one.ids() == {1, 2, 3}


def test_waiting_ids_are_added_up():
    (one, other), sides = replicas_of(admission=dyn.AdmitAfter(4))
    one.step(1, 2, 2, 3, 3, 3)
    other.step(1, 2, 4, 4, 4, 4)
    sync(sides)
    assert one.waiting() == other.waiting() == [[1, 1, 2], [2, 1, 3], [3, 1, 3]]
    assert one.ids() == {4} and one.counts(4) == [4]
    one.step(1, 2)  # 2 is admitted
    other.step(1, 1, 2)  # 1 and 2 are
    sync(sides)
    assert one.waiting() == other.waiting() == [[3, 1, 3]]
    assert one.ids() == other.ids() == {1, 2, 4}
    assert one.counts(1, 2) == other.counts(1, 2) == [5, 5]
    one.table.erase(ids_of(3))
    sync(sides)
    assert one.waiting() == other.waiting() == []


def test_dropped_counters_come_back_from_a_replica_that_has_them():
    (one, other), sides = replicas_of(admission=dyn.AdmitAfter(2, counters=3))
    one.step(1, 2)
    other.step(1, 2)
    sync(sides)
    one.steps([3, 4], [3, 4])  # 1 or 2 is dropped, then 3 and 4 are admitted
    other.steps([], [])
    assert len(one.waiting()) == 1 and one.ids() == {3, 4}
    sync(sides)
    assert one.waiting() == other.waiting() == [[1, 1, 2], [2, 1, 2]]


def test_counters_above_their_limit_are_dropped():
    (one, other), sides = replicas_of(admission=dyn.AdmitAfter(9, counters=2))
    one.step(1, 2)
    other.steps([3, 4])
    sync(sides)
    assert one.waiting() == other.waiting()
    assert len(one.waiting()) == 2 and one.stat("counters_dropped") == 2


def test_sums_of_weights_are_not_added_to_occurrences():
    (one, other), sides = replicas_of(
        eviction=dyn.LowestScore(unit=0.5), admission=dyn.AdmitAfter(3)
    )

    def step(stream: Stream, *ids: int) -> None:
        weights = torch.full((len(ids),), 4.0)  # 8 units
        bags = torch.tensor([0, len(ids)])
        stream.group(ids_of(*ids), bags, training=True, scores=weights).sum().backward()

    step(one, 1, 1, 1)
    step(other, 1, 2)
    sync(sides)
    state = equal_states([one, other])
    assert state["count"].tolist() == [24]
    assert other.waiting() == [[2, 1, 1]]


def test_clocks_take_the_latest_time():
    policy = (dyn.ExpireAfter(time=5), dyn.LeastRecentlyUsed())
    (one, other), sides = replicas_of(eviction=policy)
    for stream, times in ((one, (3, 4)), (other, (2, 9))):
        for number, time in enumerate(times):
            stream.table.set_time(time)
            stream.step(number)
    sync(sides)
    equal_states([one, other])
    assert one.last_seen(0, 1) == other.last_seen(0, 1) == [3, 9]
    assert one.table.time == 9
    with pytest.raises(ValueError, match="not before 9"):
        one.table.set_time(8)
    assert one.step() == {1}  # 0 was last seen at 3


def test_rows_of_half_precision_and_states_of_a_number_a_row():
    options = {"dtype": torch.bfloat16, "kind": OptimizerKind.PARTIAL_ROWWISE_ADAM}
    (one, other), sides = replicas_of(**options)
    one.step(1, 1, 2)
    other.step(2, 3)
    before = [stream.table.export_state() for stream in (one, other)]
    sync(sides)
    state = equal_states([one, other])
    place = state["ids"].tolist().index(2)
    both = [one["ids"].tolist().index(2) for one in before]
    for name in ("weight", "momentum1", "momentum2"):
        values = [one[name][at].double() for one, at in zip(before, both, strict=True)]
        mean = (sum(values) / 2).to(state[name].dtype)
        assert torch.equal(state[name][place], mean), name


def test_rows_are_sent_in_rounds(monkeypatch):
    monkeypatch.setattr(knobs, "ROUND_BYTES", 100)  # three rows of 32 bytes
    (one, other), sides = replicas_of()
    one.step(*range(40))
    other.step(*range(20, 70))
    sync(sides)
    assert len(equal_states([one, other])["ids"]) == 70


def test_rounds_have_all_rows_once_and_at_most_so_many_bytes():
    assert rounds_of([3, 0, 2], [40, 9, 10], 100) == [
        [(0, slice(0, 2)), ],
        [(0, slice(2, 3)), (2, slice(0, 2))],
    ]  # fmt: skip
    assert rounds_of([2], [500], 100) == [[(0, slice(0, 1))], [(0, slice(1, 2))]]
    assert rounds_of([0], [8], 100) == []


def test_parts_of_a_range_of_mixed_ids_are_of_a_size():
    words = torch.arange(3000) * (2**40 + 12343) + 2**62  # of one rank of several
    sizes = part_of(unmixed(words), 3).bincount(minlength=3)
    assert sizes.sum() == 3000 and sizes.min() > 900


def test_scores_are_packed_into_words():
    last_seen, counts = torch.tensor([0, 2**32 - 2, 7]), torch.tensor([2**32 - 1, 0, 9])
    assert all(map(torch.equal, unpacked(packed(last_seen, counts)), (last_seen, counts)))


@pytest.mark.parametrize("admission", [None, dyn.AdmitAfter(2)])
def test_a_union_over_the_limit_is_refused_without_an_eviction(admission):
    (one, other), sides = replicas_of(limit=3, admission=admission)
    one.step(1, 1, 2, 2)
    other.step(2, 2, 3, 3, 4, 4)
    before = [one.table.export_state(), other.table.export_state()]
    with pytest.raises(RuntimeError, match=r"at most 3 rows here .* in the union .* got 4\."):
        sync(sides)
    now = [one.table.export_state(), other.table.export_state()]
    assert all(map(same_state, before, now))
    other.table.erase(ids_of(2))
    sync(sides)
    assert equal_states([one, other])["ids"].numel() == 3


def test_other_versions_see_the_rows_of_a_sync():
    (one, other), sides = replicas_of(eviction=dyn.LeastRecentlyUsed())
    one.step(1, 2)
    other.step(2, 3)
    sync(sides)
    version = one.table.version()
    one.step(1)
    other.step(2)
    other.table.erase(ids_of(3))
    sync(sides)
    log = one.table.changes
    assert log is not None
    changed, _ = log.changed_rows(version, one.table.id_map)
    assert {*changed.tolist()} == {1, 2}
    assert log.removed_ids(version, one.table.id_map).tolist() == [3]
