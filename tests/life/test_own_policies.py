"""OwnAdmission and OwnEviction: the user's functions decide, and their errors change nothing.

`own` in life_cases.py runs them against the model, too, under all operations.
"""

import copy
import pickle
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from device_twins import DeviceTwins
from life_cases import LFU, LRU, Stream, assert_seen, living_table, seen
from mock_device import MockDevice
from oracle import mix64
from policy_cases import AsLeastFrequent, AsLeastRecent, ByTime, Dense, Late, Often, SmallNorm
from table_cases import ids_of, make_group, same_state

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.life import row_life
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

DEFERS = RowOptimizer(OptimizerKind.EXACT_SGD, learning_rate=0.1, defer_updates=True)
EXPIRE = dyn.ExpireAfter(steps=6)
PAIRS = {
    "recent": (AsLeastRecent(), LRU),
    "frequent": (AsLeastFrequent(), LFU),
    "recent, expires": ((EXPIRE, AsLeastRecent()), (EXPIRE, LRU)),
    "frequent, expires": ((EXPIRE, AsLeastFrequent()), (EXPIRE, LFU)),
}


def drifting(draw, step):
    return [round(draw.gauss(60 * step, 300)) for _ in range(200)]


@pytest.mark.everyday(6)
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("together", [37, 1 << 20])
@pytest.mark.parametrize("policies", PAIRS)
def test_a_copy_of_a_built_in_policy_has_its_bits(policies, together, monkeypatch):
    """Also if rows are scored in many parts, and while the map grows."""
    monkeypatch.setattr(knobs, "IDS_SCORED_TOGETHER", together)
    monkeypatch.setattr(knobs, "LARGE_MAP_SLOTS", 256)
    own, built_in = (Stream(one, dyn.AdmitAfter(2), limit=250) for one in PAIRS[policies])
    draw = random.Random(3)
    for step in range(25):
        batch = drifting(draw, step)
        assert own.step(*batch) == built_in.step(*batch)
        assert same_state(own.table.export_state(), built_in.table.export_state())
    assert own.stat("evicted_full") == built_in.stat("evicted_full") > 100
    assert own.stat("evicted_expired") == built_in.stat("evicted_expired")


@pytest.mark.usefixtures("device")
def test_the_lowest_scores_go_then_the_lowest_mixed_ids():
    stream, rows, draw = Stream(Dense(), limit=128), {}, random.Random(1)
    for step in range(1, 40):
        batch = drifting(draw, step / 3)[:90]
        new = {*batch} - rows.keys()
        surplus = len(rows) + len(new) - 128
        others = {n: s for n, s in rows.items() if n not in batch}
        order = sorted(
            others, key=lambda n: (rows[n][1] * 256 // (step + 1 - rows[n][0]), mix64(n))
        )
        for number in order[: max(surplus, 2)] if surplus > 0 else ():
            del rows[number]
        for number in batch:
            rows[number] = (step, rows.get(number, (0, 0))[1] + 1)
        assert stream.step(*batch) == rows.keys()
    assert stream.stat("evicted_full") > 300


class Listens(dyn.OwnEviction):
    """Scores by count, and keeps what it was asked."""

    keeps_times = True

    def __init__(self):
        self.asked = []

    def score(self, last_seen, counts, times, step):
        told = [*zip(*(one.tolist() for one in (last_seen, counts, times)), strict=True)]
        self.asked.append((step, sorted(told)))
        for one in (last_seen, counts, times):
            one.fill_(-7)  # copies: the table does not see it
        return torch.tensor([count for _, count, _ in told])


@pytest.mark.usefixtures("device")
def test_a_score_gets_what_was_known_before_the_step():
    stream = Stream(Listens(), limit=3)
    asked = stream.table.config.eviction.asked
    stream.step(1, 1)
    stream.table.set_time(50)
    stream.steps([2], [3, 2])
    assert asked == [], "a table with room asks nothing"
    stream.table.set_time(60)
    stream.table.assign(ids_of(3), torch.zeros(1, 4))
    stream.step(2, 4)
    assert asked == [(4, [(1, 2, 50), (3, 1, 50)])], "no ids of the batch"
    assert stream.last_seen(2, 4) == [60, 60] and stream.counts(2) == [3]
    stream.group(ids_of(9), torch.tensor([0, 1]), training=False)
    assert len(asked) == 1, "an evaluation asks nothing"


def test_times_are_those_of_the_clock_or_none():
    stream = Stream(ByTime(), limit=2)
    stream.steps([1], [2])
    assert stream.last_seen(1, 2) == [0, 0], "no time was set"
    for time in (3, 7):
        stream.table.set_time(time)
        stream.step(1 if time == 7 else 2)
    assert stream.step(3) == {1, 3}, "2 has 0 * 100 + 2, and 1 has 100 + 2"
    steps_only = Stream((EXPIRE, Dense()), limit=2)
    steps_only.table.set_time(5)
    assert steps_only.table.time is None


@pytest.mark.parametrize("expires", [None, dyn.ExpireAfter(time=10**9)])
def test_the_last_times_are_kept(expires, monkeypatch):
    monkeypatch.setattr(row_life, "TIMES_KEPT", 10)
    stream = Stream((expires, ByTime()) if expires else ByTime())
    for time in range(40):
        stream.table.set_time(time)
        stream.step(time)
    kept = stream.table.life.clock.export().shape[1]
    times = stream.last_seen(*range(40))
    if expires:
        assert kept == 40 and times == [*range(40)], "all that living rows need"
    else:
        assert 10 <= kept <= 20 and times[-10:] == [*range(30, 40)]
        assert times[0] == times[40 - kept] == 40 - kept


@pytest.mark.usefixtures("device")
def test_rows_are_passed_to_a_policy_that_asks(monkeypatch):
    monkeypatch.setattr(knobs, "IDS_SCORED_TOGETHER", 16)
    for dtype in (torch.float32, torch.bfloat16):
        stream, draw = Stream(SmallNorm(), limit=100, dtype=dtype), random.Random(2)
        for step in range(20):
            before = stream.ids()
            norms = {n: sum(v * v for v in row) for n, row in rows_of(stream, before).items()}
            batch = drifting(draw, step)[:60]
            surplus = len({*batch} | before) - 100
            after = stream.step(*batch)
            gone, left = before - after, (before & after) - {*batch}
            assert len(gone) == (max(surplus, 1) if surplus > 0 else 0)
            if gone and left:
                assert max(norms[n] for n in gone) <= min(norms[n] for n in left) + 2**-19
        assert stream.stat("evicted_full") > 300


def rows_of(stream, ids):
    held = sorted(ids)
    return dict(zip(held, stream.table.lookup(ids_of(*held))[0].tolist(), strict=True))


# Admission


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("least", [1, 2, 3])
def test_an_id_is_admitted_at_its_next_occurrence(least):
    """As AdmitAfter, one step with the id later."""
    own, after = Stream(None, Counts(least)), Stream(None, dyn.AdmitAfter(least))
    draw, counts, held = random.Random(4), Counter(), set()
    for _ in range(60):
        batch = [draw.randrange(40) for _ in range(draw.randrange(8))]
        held |= {*batch} & after.ids()
        after.step(*batch)
        counts.update(batch)
        assert own.step(*batch) == held
        assert own.counts(*range(40)) == [counts[number] for number in range(40)]
    assert len(held) > 25


@dataclass(frozen=True)
class Counts(dyn.OwnAdmission):
    least: int

    def admit(self, ids, counts, step):
        return counts >= self.least


class Hears(dyn.OwnAdmission):
    def __init__(self, answer=None):
        self.asked, self.answer = [], answer

    def admit(self, ids, counts, step):
        self.asked.append((step, sorted(zip(ids.tolist(), counts.tolist(), strict=True))))
        admitted = ids % 2 == 0
        ids.fill_(-7)
        counts.fill_(-7)
        return admitted


@pytest.mark.usefixtures("device")
def test_admission_is_asked_about_waiting_ids_of_the_batch():
    stream = Stream(None, Hears())
    asked = stream.table.config.admission.asked
    assert stream.step(1, 2, 2) == set() and asked == [], "a first occurrence waits"
    assert stream.waiting() == [[1, 1, 1], [2, 1, 2]]
    stream.step(3)
    assert stream.step(2, 1, 1, 4) == {2}
    assert asked == [(2, [(1, 1), (2, 2)])], "counts until the step before"
    assert stream.waiting() == [[1, 3, 3], [3, 2, 1], [4, 3, 1]] and stream.counts(2) == [3]
    stream.table.erase(ids_of(1, 4))
    assert stream.step(1, 4) == {2}, "they wait anew"
    assert [step for step, _ in asked] == [2]
    assert stream.stat("refused") == 3 + 1 + 3 + 2


def test_counters_of_own_admission_are_limited_and_expire():
    few = Stream(dyn.ExpireAfter(steps=3), Late(10, counters=2))
    few.steps([1], [2], [3])
    assert [one[0] for one in few.waiting()] == [2, 3] and few.stat("counters_dropped") == 1
    few.steps([9], [9], [9], [9])
    assert [one[0] for one in few.waiting()] == [9] and few.stat("counters_expired") == 1
    assert few.stat("counters_dropped") == 2
    assert few.table.life.waiting.limit == 2
    by_default = Stream(None, Late(10), limit=500).table.life.waiting.limit
    assert by_default == Stream(None, dyn.AdmitAfter(2), limit=500).table.life.waiting.limit


def test_an_answer_by_the_step_admits_all_that_waited():
    stream = Stream(None, Late(3))
    assert stream.steps([1, 2], [1], [1]) == set()
    assert stream.steps([2, 5]) == {2}, "step 3 has ended"
    assert stream.steps([5]) == {2, 5}


@pytest.mark.usefixtures("device")
def test_forwards_of_one_step_are_decided_by_the_step_before():
    stream = Stream(None, Counts(2), optimizer=DEFERS)
    assert stream.steps([1, 1, 2], [1, 2], [1]) == set(), "one step of three forwards"
    assert stream.waiting() == [[1, 1, 4], [2, 1, 2]]
    stream.group.write_updates()
    assert stream.steps([1], [2]) == {1, 2}
    assert stream.counts(1, 2) == [5, 3] and stream.table.step == 2


def test_a_device_decides_as_the_cpu(monkeypatch):
    """By tensors of the device only."""
    monkeypatch.setattr(knobs, "IDS_SCORED_TOGETHER", 16)
    with MockDevice() as device:
        lives = ("own", "own"), ("steps, own by time", "all"), ("own", "all")
        twins, draw = DeviceTwins(device, *lives, limit=40), random.Random(6)
        for step in range(12):
            for tables in (twins.tables, twins.twins):
                tables[1].set_time(3 * step)
            batch = [round(draw.gauss(8 * step, 10)) for _ in range(30)]
            twins.step(batch, batch, batch)
            twins.compare()
        waits, timed, alone = (one.stats() for one in twins.tables)
        assert min(waits["counters_dropped"], timed["evicted_full"], alone["evicted_full"]) > 10


# Errors


class Breaks(dyn.OwnEviction):
    def score(self, last_seen, counts, times, step):
        raise KeyError("broken")


class BreaksAdmission(dyn.OwnAdmission):
    def admit(self, ids, counts, step):
        raise KeyError("broken")


class Returns(dyn.OwnEviction):
    def __init__(self, what):
        self.what = what

    def score(self, last_seen, counts, times, step):
        return ANSWERS[self.what](counts)


class Admits(dyn.OwnAdmission):
    def __init__(self, what):
        self.what = what

    def admit(self, ids, counts, step):
        return ANSWERS[self.what](counts)


ANSWERS = {
    "none": lambda counts: None,
    "float": lambda counts: counts.double(),
    "int32": lambda counts: counts.int(),
    "fewer": lambda counts: counts[:-1],
    "pairs": lambda counts: torch.stack([counts, counts], 1),
    "meta": lambda counts: counts.to("meta"),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("what", ["raises", *ANSWERS])
@pytest.mark.parametrize("kind", ["eviction", "admission"])
def test_errors_of_the_users_code_change_no_table(kind, what):
    """Nor other tables of the call; expired rows are back."""
    policies = {
        "eviction": (None, Breaks() if what == "raises" else Returns(what)),
        "admission": (BreaksAdmission() if what == "raises" else Admits(what), LFU),
    }
    admission, eviction = policies[kind]
    tables = [
        living_table((dyn.ExpireAfter(steps=2), LRU), dyn.AdmitAfter(2), name="t0"),
        living_table((dyn.ExpireAfter(steps=2), eviction), admission, 3, name="t1"),
        living_table(None, name="t2"),
    ]
    group = make_group(*tables)

    def step(*ids):
        bags = torch.tensor([0, 1, 2, 3]) * len(ids)
        return group(ids_of(*ids, *ids, *ids), bags, training=True).sum().backward()

    for ids in ([1, 2], [3], [4] if kind == "admission" else [3]):
        step(*ids)
    before = seen(tables)
    told = {
        "none": "got None",
        "float": r"got \[\d\] of torch.float64 on cpu",
        "int32": r"got \[\d\] of torch.int32",
        "fewer": r"got \[\d\] of torch.int64",
        "pairs": r"got \[\d, 2\]",
        "meta": "on meta",
    }
    match = "broken" if what == "raises" else rf"DynamicTable\('t1'\): expected .*{told[what]}"
    with pytest.raises(KeyError if what == "raises" else ValueError, match=match):
        step(*([4, 5, 6] if kind == "eviction" else [3, 4]))
    assert_seen(tables, before)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"admission": Often}, r"admission: expected AdmitAfter, .*OwnAdmission,.*Write Often"),
        ({"admission": Dense()}, "admission: expected AdmitAfter"),
        ({"admission": Often(2, counters=0)}, "admission.counters: expected an integer from 1"),
        ({"eviction": Dense}, r"eviction: expected .* OwnEviction, .* Write Dense\(...\)"),
        ({"eviction": Often()}, "eviction: expected .*in this order"),
        ({"eviction": (Dense(), EXPIRE)}, "eviction: expected .*in this order"),
    ],
)
def test_what_a_config_refuses(wrong, told):
    with pytest.raises(ValueError, match=told):
        dyn.DynamicTableConfig(**wrong)


def test_names_versions_and_hashes_are_checked():
    class Named(Dense):
        name, version = "dense", 3

    assert Named().label == "dense, version 3"
    assert Dense().label == "policy_cases.Dense, version 1"
    config = dyn.DynamicTableConfig(admission=Often(), eviction=(EXPIRE, Named()))
    own = {"admission": "policy_cases.Often, version 1", "eviction": "dense, version 3"}
    assert config.saved == {"policies": own}
    assert dyn.DynamicTableConfig(eviction=LRU).saved == {}
    for changed, told in (({"name": 5}, "string as the name"), ({"version": "2"}, "version of")):
        wrong = type("Wrong", (Dense,), changed)
        with pytest.raises(ValueError, match=rf"eviction: .*{told}|expected a {told}"):
            dyn.DynamicTableConfig(eviction=wrong())

    late = Late(3)
    late.table = torch.ones(2)
    with pytest.raises(
        ValueError, match=r"by which policies can be compared, got the tensor 'table'"
    ):
        dyn.DynamicTableConfig(admission=late)

    @dataclass
    class Changes(dyn.OwnAdmission):
        least: int = 2

        def admit(self, ids, counts, step):
            return counts >= self.least

    with pytest.raises(ValueError, match=r"a policy that can be hashed, .*frozen=True"):
        dyn.DynamicTableConfig(admission=Changes())


def test_policies_are_values():
    assert Late(3) == Late(3) != Late(4) and Late(3) != Often(3) and Dense() == Dense()
    assert len({Late(3), Late(3), Late(4)}) == 2
    assert repr(Late(3)) == "Late(counters=None, step=3)"
    configs = [dyn.DynamicTableConfig(admission=Late(step)) for step in (3, 3, 4)]
    assert configs[0] == configs[1] != configs[2] and len({*configs}) == 2
    assert pickle.loads(pickle.dumps(configs[0])) == configs[0] == copy.deepcopy(configs[0])


# Formulas of the page on policies, of dynamicemb, TorchRec's virtual tables and ReCIS' filter


class Formula(dyn.OwnEviction):
    keeps_times = True

    def __init__(self, number):
        self.number = number

    def score(self, last_seen, counts, times, step):
        return FORMULAS[self.number][0](last_seen, counts, times, step)


# What is scored, and which of 1, 2 and 3 stay. They occurred 3, 4 and 1 times, last at steps 4, 2 and 3
# (times 40, 20 and 30).
FORMULAS = [
    (lambda last_seen, counts, times, step: counts, [1, 2]),
    (
        lambda last_seen, counts, times, step: (counts * 0.5 ** (step - last_seen) * 2**20).long(),
        [1, 2],
    ),
    (
        lambda last_seen, counts, times, step: (counts * 0.01 ** (step - last_seen) * 2**20).long(),
        [1, 3],
    ),
    (lambda last_seen, counts, times, step: times, [1, 3]),
    (lambda last_seen, counts, times, step: times + 2**48 * (counts >= 3), [1, 2]),
    (lambda last_seen, counts, times, step: times + 2**48 * (counts >= 5), [1, 3]),
    (lambda last_seen, counts, times, step: last_seen, [1, 3]),
]


@pytest.mark.parametrize("number", range(len(FORMULAS)))
def test_formulas_of_other_libraries(number):
    stream = Stream(Formula(number), limit=3)
    for time, batch in ((10, [2, 2]), (20, [2, 2, 1]), (30, [3]), (40, [1, 1])):
        stream.table.set_time(time)
        stream.step(*batch)
    assert stream.counts(1, 2, 3) == [3, 4, 1] and stream.last_seen(1, 2, 3) == [40, 20, 30]
    assert stream.step(9) == {9, *FORMULAS[number][1]}


class ReadOnly(dyn.OwnAdmission):
    def admit(self, ids, counts, step):
        return torch.zeros_like(ids, dtype=torch.bool)


def test_admit_hooks_of_other_libraries():
    own, never = Stream(None, ReadOnly()), Stream(None, dyn.Never())
    for _ in range(3):
        assert own.step(1, 1, 2) == never.step(1, 1, 2) == set()
    assert own.stat("refused") == never.stat("refused") == 9
