"""Policies are values; invalid policies are refused when they are constructed."""

import copy
import pickle
import re

import pytest

import torchrec_dyn as dyn
from torchrec_dyn import (
    AdmitAfter,
    AdmitWithProbability,
    DynamicTableConfig,
    ExpireAfter,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LowestScore,
    Never,
)
from torchrec_dyn.policies import age_limit_of, replacement_of

LRU, LFU, STEPS, TIME = (
    LeastRecentlyUsed(),
    LeastFrequentlyUsed(),
    ExpireAfter(steps=3),
    ExpireAfter(time=3),
)
ADMISSIONS = [None, AdmitAfter(2), AdmitAfter(2, 5), AdmitWithProbability(0.5), Never()]
EVICTIONS = [None, LRU, LFU, STEPS, TIME, (STEPS, LRU), (STEPS, LFU), (TIME, LRU), (TIME, LFU)]
HALVED = [
    LeastFrequentlyUsed(half_life_steps=9),
    LeastFrequentlyUsed(half_life_time=9),
    LowestScore(),
    LowestScore(unit=0.5),
    LowestScore(unit=0.5, half_life_steps=1),
    LowestScore(half_life_time=2**63 - 1),
]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: AdmitAfter(0),
            "AdmitAfter.count: expected an integer from 1 to 4294967295, got 0.",
        ),
        (
            lambda: AdmitAfter(2**32),
            "AdmitAfter.count: expected an integer from 1 to 4294967295, got",
        ),
        (lambda: AdmitAfter(2.0), "to 4294967295, got 2.0."),
        (lambda: AdmitAfter(True), "to 4294967295, got True."),
        (lambda: AdmitAfter(None), "to 4294967295, got None."),
        (
            lambda: AdmitAfter(2, counters=0),
            "AdmitAfter.counters: expected an integer from 1 to 9223372036854775807, got 0. "
            "Omit it for a number that follows the rows in use.",
        ),
        (lambda: AdmitAfter(2, counters=True), "AdmitAfter.counters: expected an integer"),
        (lambda: AdmitAfter(2, counters="5"), "9223372036854775807, got '5'."),
        (
            lambda: AdmitWithProbability(0.0),
            "AdmitWithProbability.p: expected a number above 0 and at most 1, got 0.0.",
        ),
        (lambda: AdmitWithProbability(1.01), "at most 1, got 1.01."),
        (lambda: AdmitWithProbability(float("nan")), "at most 1, got nan."),
        (lambda: AdmitWithProbability(True), "at most 1, got True."),
        (lambda: AdmitWithProbability("0.5"), "at most 1, got '0.5'."),
        (
            lambda: ExpireAfter(),
            "ExpireAfter: expected exactly one of steps and time, got steps=None and time=None. "
            "Count in training steps with steps=, or by your own clock with time=.",
        ),
        (lambda: ExpireAfter(steps=1, time=1), "one of steps and time, got steps=1 and time=1."),
        (
            lambda: ExpireAfter(steps=0),
            "ExpireAfter.steps: expected an integer from 1 to 4294967294, got 0.",
        ),
        (lambda: ExpireAfter(steps=2**32 - 1), "to 4294967294, got 4294967295."),
        (lambda: ExpireAfter(steps=True), "to 4294967294, got True."),
        (
            lambda: ExpireAfter(time=0),
            "ExpireAfter.time: expected an integer from 1 to 9223372036854775807, got 0.",
        ),
        (lambda: ExpireAfter(time=1.5), "9223372036854775807, got 1.5."),
        (lambda: ExpireAfter(time=2**63), "9223372036854775807, got 9223372036854775808."),
        (
            lambda: LeastFrequentlyUsed(half_life_steps=0),
            "LeastFrequentlyUsed.half_life_steps: expected an integer from 1 to 4294967294, got 0.",
        ),
        (
            lambda: LowestScore(half_life_time=1.5),
            "LowestScore.half_life_time: expected an integer from 1 to 9223372036854775807, got 1.5.",
        ),
        (
            lambda: LowestScore(half_life_steps=1, half_life_time=2),
            "LowestScore: expected at most one half-life, got half_life_steps=1 and half_life_time=2. "
            "Count in training steps, or by your own clock.",
        ),
        (lambda: LowestScore(unit=0), "LowestScore.unit: expected a finite number above 0, got 0."),
        (lambda: LowestScore(unit=float("inf")), "a finite number above 0, got inf."),
        (lambda: LowestScore(unit=float("nan")), "a finite number above 0, got nan."),
        (lambda: LowestScore(unit=True), "a finite number above 0, got True."),
    ],
)
def test_impossible_policies(call, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        call()


def test_the_extremes_are_legal():
    assert AdmitAfter(1, 1).count == 1 and AdmitAfter(2**32 - 1).counters is None
    assert AdmitWithProbability(1).p == 1 and AdmitWithProbability(1e-300).p == 1e-300
    assert ExpireAfter(steps=2**32 - 2).time is None and ExpireAfter(time=2**63 - 1).steps is None
    assert ExpireAfter(steps=1).steps == 1 == ExpireAfter(time=1).time


def test_steps_and_time_are_written_out():
    text = "ExpireAfter: expected an age with its name, got 3. Count in training steps with steps=, or by"
    for call in (lambda: ExpireAfter(3), lambda: ExpireAfter(3, time=5)):
        with pytest.raises(ValueError, match=re.escape(text)):
            call()


ADMISSION_RULE = (
    "DynamicTableConfig.admission: expected AdmitAfter, AdmitWithProbability, OwnAdmission, Never or "
    "None, got "
)
EVICTION_RULE = (
    "DynamicTableConfig.eviction: expected LeastRecentlyUsed, LeastFrequentlyUsed, LowestScore, "
    "OwnEviction, ExpireAfter, a pair (ExpireAfter, LeastRecentlyUsed, LeastFrequentlyUsed, LowestScore or "
    "OwnEviction) or None, got "
)


@pytest.mark.parametrize(
    "value",
    [3, "lru", AdmitAfter, Never, LRU, [AdmitAfter(2)], (AdmitAfter(2), AdmitWithProbability(0.5))],
)
def test_what_is_no_admission(value):
    with pytest.raises(ValueError, match=re.escape(f"{ADMISSION_RULE}{value!r}.")):
        DynamicTableConfig(admission=value)


@pytest.mark.parametrize(
    "value",
    [
        *(7, "lru", LeastRecentlyUsed, AdmitAfter(2)),
        *([LRU], [STEPS, LRU], (LRU, STEPS), (LRU, LFU), (STEPS, TIME), (STEPS, STEPS)),
        *((), (STEPS,), (LRU,), (STEPS, LRU, LFU), (STEPS, None), (STEPS, LeastRecentlyUsed)),
    ],
)
def test_what_is_no_eviction(value):
    with pytest.raises(ValueError, match=re.escape(f"{EVICTION_RULE}{value!r}. Write a pair as a")):
        DynamicTableConfig(eviction=value)


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_every_combination_is_a_value(admission, eviction):
    one = DynamicTableConfig(admission=admission, eviction=eviction)
    for again in (
        DynamicTableConfig(admission=copy.copy(admission), eviction=copy.deepcopy(eviction)),
        pickle.loads(pickle.dumps(one)),
        copy.deepcopy(one),
    ):
        assert again == one and hash(again) == hash(one)
    others = [(a, e) for a in ADMISSIONS for e in EVICTIONS if (a, e) != (admission, eviction)]
    assert len(others) == len(ADMISSIONS) * len(EVICTIONS) - 1
    assert all(one != DynamicTableConfig(admission=a, eviction=e) for a, e in others)
    assert one.has_life == (admission is not None or eviction is not None)


def test_half_lives_and_units_make_policies_of_their_own():
    each = [*EVICTIONS[1:3], *HALVED]
    for one in each:
        assert [other == one for other in each].count(True) == 1
        for eviction in (one, (STEPS, one)):
            assert replacement_of(DynamicTableConfig(eviction=eviction).eviction) is one
        assert DynamicTableConfig(eviction=one).scores_weights == isinstance(one, LowestScore)
        assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert repr(LFU) == "LeastFrequentlyUsed()" and repr(LowestScore()) == "LowestScore()"


@pytest.mark.parametrize("policy", [*ADMISSIONS[1:], *EVICTIONS[1:5], *HALVED])
def test_policies_are_frozen_and_written_as_they_print(policy):
    assert eval(repr(policy), vars(dyn)) == policy
    with pytest.raises(AttributeError):
        policy.count = 3


def test_the_parts_of_an_eviction():
    parts = {eviction: (age_limit_of(eviction), replacement_of(eviction)) for eviction in EVICTIONS}
    assert parts == {
        None: (None, None),
        LRU: (None, LRU),
        LFU: (None, LFU),
        STEPS: (STEPS, None),
        TIME: (TIME, None),
        (STEPS, LRU): (STEPS, LRU),
        (STEPS, LFU): (STEPS, LFU),
        (TIME, LRU): (TIME, LRU),
        (TIME, LFU): (TIME, LFU),
    }
