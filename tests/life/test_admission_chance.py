"""Admission by chance against its formula, and pinned."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import chance, draw_of, unmix64
from table_cases import ids_of

import torchrec_dyn as dyn
from torchrec_dyn.life.admission import AdmissionRule, AdmissionRules

pytestmark = pytest.mark.usefixtures("device")


NO_COUNTERS = torch.empty(0, dtype=torch.int64)


def admitted(ids, counts, key, step, probability):
    """Returns which ids [M] with so many occurrences are admitted, [M] bool."""
    rules = AdmissionRules([AdmissionRule(dyn.AdmitWithProbability(probability), key, False)])
    new = ids, counts, [0, ids.numel()]
    places = rules.admit(*new, None, NO_COUNTERS, lambda _: step).places
    return torch.zeros(ids.numel(), dtype=torch.bool).index_fill(0, places, True)


words64 = st.integers(-(2**63), 2**63 - 1)


@given(
    ids=st.lists(st.tuples(words64, st.integers(0, 2**32) | st.integers(0, 9)), max_size=20),
    key=words64,
    step=st.integers(0, 2**40),
    probability=st.floats(0, 1, exclude_min=True) | st.sampled_from([1.0, 0.5, 1e-9]),
)
def test_admission_is_the_formula(ids, key, step, probability):
    numbers, counts = ids_of(*(i for i, _ in ids)), ids_of(*(c for _, c in ids))
    got = admitted(numbers, counts, key, step, probability)
    assert got.tolist() == [
        draw_of(key, step, number) < chance(probability, count) for number, count in ids
    ]


@pytest.mark.parametrize("probability", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_admission_is_as_frequent_as_said(probability, count):
    number, expected = 200_000, 1 - (1 - probability) ** count
    deviation = (expected * (1 - expected) / number) ** 0.5
    many = torch.arange(number)
    counts = torch.full((number,), count)
    for key, step in ((1, 1), (1, 2), (-9, 1)):
        share = admitted(many, counts, key, step, probability).double().mean()
        assert abs(share - expected) < 4 * deviation
    steps = [admitted(many, counts, 5, step, probability) for step in range(3)]
    both = (steps[0] & steps[1]).double().mean()  # each step has a new draw for each id
    assert abs(both - expected**2) < 4 * (expected**2 * (1 - expected**2) / number) ** 0.5


def test_never_and_always():
    many, ones = torch.arange(-500, 500), torch.ones(1000, dtype=torch.int64)
    for count in (0, 1, 3, 2**32):
        assert admitted(many, count * ones, 3, 4, 1.0).all() == (count > 0)
    zero = unmix64(0)  # with key 0 and step 0 the draw of this id is 0 exactly
    assert draw_of(0, 0, zero) == 0.0
    drawn = [admitted(ids_of(zero), ids_of(k), 0, 0, p).item() for k, p in ((0, 1.0), (1, 1e-9))]
    assert drawn == [False, True]


PINNED = [1, 4, 6, 11, 14, 17, 23, 27, 29, 32, 44, 48, 49, 58]
PINNED_DRAW = 0.4179630657137705


def test_admission_is_pinned_and_pure(threads):
    """The draws of an id must not change with a version, so that a run continues as it began."""
    many, ones = torch.arange(20_000), torch.ones(20_000, dtype=torch.int64)
    got = []
    for number in (1, 2, 4):
        threads(number)
        got.append(admitted(many, ones, 42, 7, 0.25))
        back = admitted(many.flip(0), ones, 42, 7, 0.25).flip(0)
        assert torch.equal(got[-1], back)
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])
    assert got[0][:64].nonzero().flatten().tolist() == PINNED
    assert draw_of(42, 7, 5) == PINNED_DRAW
