"""Vocabularies cut fairly, or whole in groups: the values of the original notebook, its defects left out."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from torchrec_dyn.planner import fair_cuts, whole_features

NOTEBOOK = [100, 2020, 3203, 3434, 3023, 4545, 123, 4566]
LARGE = [100, 2020, 3203, 3434302, 3023, 45459, 123, 4566]


def cuts_of(made):
    return {feature: list(cuts) for feature, cuts in enumerate(made.cuts) if cuts}


def lists(nested):
    return [list(one) for one in nested]


@pytest.mark.parametrize(
    ("rows", "cuts", "features", "offsets", "sizes"),
    [
        (
            NOTEBOOK,
            {2: [3133], 4: [1749], 5: [3979]},
            [[0, 1, 2], [2, 3, 4], [4, 5], [5, 6, 7]],
            [[0, 100, 2120], [0, 70, 3504], [0, 1274], [0, 566, 689]],
            (5253, 5253, 5253, 5255),
        ),
        (
            LARGE,
            {3: [867876, 1741075, 2614274]},
            [[0, 1, 2, 3], [3], [3], [3, 4, 5, 6, 7]],
            [[0, 100, 2120, 5323], [0], [0], [0, 820028, 823051, 868510, 868633]],
            (873199, 873199, 873199, 873199),
        ),
    ],
)
def test_the_notebook(rows, cuts, features, offsets, sizes):
    made = fair_cuts(rows, 4)
    assert cuts_of(made) == cuts
    assert lists(made.features) == features
    assert lists(made.offsets) == offsets
    assert made.sizes == sizes and sum(sizes) == sum(rows)


vocabularies = st.lists(st.integers(0, 60), min_size=1, max_size=12)


# The original is wrong in the first three: an empty piece behind a cut at the end of a feature, a wrong first
# offset of the last rank, and fewer features than ranks refused.
@given(vocabularies, st.integers(1, 9))
@example([12, 9, 24, 42], 4)
@example([2, 59, 9, 47, 2], 4)
@example([10], 4)
@example([0, 2, 0, 2, 0], 2)
@example([1, 0, 1], 1)
def test_pieces_are_a_partition(rows, ranks):
    if sum(rows) < ranks:
        with pytest.raises(ValueError, match="Use fewer ranks"):
            fair_cuts(rows, ranks)
        return
    made = fair_cuts(rows, ranks)
    line = [(feature, row) for feature, count in enumerate(rows) for row in range(count)]
    per = len(line) // ranks
    for rank in range(ranks):
        held = line[rank * per :] if rank == ranks - 1 else line[rank * per : (rank + 1) * per]
        first = {}
        for place, (feature, _) in enumerate(held):
            first.setdefault(feature, place)
        assert made.sizes[rank] == len(held)
        assert dict(zip(made.features[rank], made.offsets[rank], strict=True)) == first
        assert list(made.features[rank]) == sorted(first)
        # Only where two ranks meet inside a feature is it cut.
        if rank and held[0][1]:
            assert held[0][1] in made.cuts[held[0][0]]
    assert sum(map(len, made.cuts)) == sum(line[r * per][1] > 0 for r in range(1, ranks))
    assert all(low < high for cuts in made.cuts for low, high in pairwise(cuts))
    owner, local = made.owners(*torch.tensor(line).unbind(1))
    assert owner.tolist() == [min(place // per, ranks - 1) for place in range(len(line))]
    assert local.tolist() == [
        place - min(place // per, ranks - 1) * per for place in range(len(line))
    ]


@pytest.mark.parametrize(
    ("rows", "ranks", "said"),
    [
        ([3, 4], 0, r"fair_cuts\.ranks: expected an integer, 1 or more, got 0\. Pass"),
        ([3, 4], True, r"fair_cuts\.ranks: .* got True"),
        ([3, -4], 1, r"fair_cuts\.rows\[1\]: expected an integer, 0 or more, got -4\. Pass"),
        ([3.0], 1, r"fair_cuts\.rows\[0\]: .* got 3\.0"),
        (5, 2, r"fair_cuts\.rows: expected a list of the number of rows .* got 5\. Pass"),
        (None, 2, r"fair_cuts\.rows: .* got None"),
        ("34", 2, r"fair_cuts\.rows\[0\]: .* got '3'"),
        (torch.tensor([3]), 1, r"got tensor\(3\)\. .* a tensor as rows\.tolist\(\)"),
        ([1, 2], 4, r"expected a row for each of 4 ranks, got 3 rows\. Use fewer ranks\."),
        ([], 1, r"expected a row for each of 1 ranks, got 0 rows"),
        (
            [2**62, 2**62],
            2,
            r"expected fewer than 2\^63 rows in all, got 9223372036854775808\. Check",
        ),
    ],
)
def test_what_cannot_be_cut(rows, ranks, said):
    with pytest.raises(ValueError, match=said):
        fair_cuts(rows, ranks)


def test_as_many_rows_as_an_int64_counts():
    made = fair_cuts([2**62, 2**62 - 1], 2)
    owner, local = made.owners(torch.tensor([0, 0, 1]), torch.tensor([0, 2**62 - 1, 2**62 - 2]))
    assert owner.tolist() == [0, 1, 1] and local.tolist() == [0, 0, 2**62 - 1]


@pytest.mark.parametrize(
    ("features", "rows", "said"),
    [
        ([0], [3], r"owners\.rows: expected numbers from 0 and below 3, got 3"),
        ([1], [-1], r"owners\.rows: expected numbers from 0 and below 4, got -1"),
        ([2], [0], r"owners\.features: expected numbers from 0 and below 2, got 2"),
        ([-1], [0], r"owners\.features: .* got -1"),
    ],
)
def test_rows_that_are_nowhere(features, rows, said):
    with pytest.raises(ValueError, match=said):
        fair_cuts([3, 4], 2).owners(torch.tensor(features), torch.tensor(rows))


def test_owners_take_int64():
    with pytest.raises(ValueError, match=r"owners\.rows: expected int64, got torch\.int32"):
        fair_cuts([3], 1).owners(torch.tensor([0]), torch.tensor([0], dtype=torch.int32))
    for numbers in (1, [1], np.array([1])):
        with pytest.raises(
            ValueError, match=r"owners\.features: expected an int64 tensor, got .* Write"
        ):
            fair_cuts([3], 1).owners(numbers, torch.tensor([0]))


def test_whole_features_of_the_notebook():
    made = whole_features(LARGE, 4)
    assert lists(made.features) == [[3, 0], [1, 2], [5, 6], [7, 4]]
    assert lists(made.offsets) == [[0, 3434302], [0, 2020], [0, 45459], [0, 4566]]
    assert made.sizes == (3434402, 5223, 45582, 7589)
    assert made.cuts == ((),) * 8
    # Two samples of the notebook, in its order of groups: 3 and 0, 1 and 2, 5 and 6, 7 and 4.
    features = torch.tensor([3, 0, 1, 2, 5, 6, 7, 4])
    samples = [[3002450, 69, 1590, 2101, 18711, 3, 4532, 1443]]
    owner, row = made.owners(features, torch.tensor(samples))
    assert owner.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]
    assert row.tolist() == [[3002450, 3434371, 1590, 4121, 18711, 45462, 4532, 6009]]


@given(vocabularies, st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_whole_features_are_a_partition(rows, ranks, seed):
    if len(rows) < ranks:
        with pytest.raises(ValueError, match=r"whole_features: .* or fair_cuts"):
            whole_features(rows, ranks, seed)
        return
    made = whole_features(rows, ranks, seed)
    assert sorted(f for group in made.features for f in group) == list(range(len(rows)))
    assert [len(group) for group in made.features[:-1]] == [len(rows) // ranks] * (ranks - 1)
    held = [[(f, row) for f in group for row in range(rows[f])] for group in made.features]
    assert made.sizes == tuple(map(len, held))
    where = {place: (rank, at) for rank, of in enumerate(held) for at, place in enumerate(of)}
    line = [(feature, row) for feature, count in enumerate(rows) for row in range(count)]
    if line:
        owner, row = made.owners(*torch.tensor(line).unbind(1))
        assert list(zip(owner.tolist(), row.tolist(), strict=True)) == [where[one] for one in line]


@pytest.mark.parametrize(
    ("rows", "ranks", "said"),
    [
        ([3], 0, r"whole_features\.ranks: expected an integer, 1 or more, got 0\."),
        ([-3], 1, r"whole_features\.rows\[0\]: .* got -3\."),
        ([3], 2, r"whole_features: expected a feature for each of 2 ranks, got 1 features\."),
        ([2**62, 2**62], 2, r"whole_features: expected fewer than 2\^63 rows in all"),
    ],
)
def test_what_cannot_be_grouped(rows, ranks, said):
    with pytest.raises(ValueError, match=said):
        whole_features(rows, ranks)


@pytest.mark.parametrize("seed", ["x", None, -1])
def test_a_seed_is_a_number(seed):
    with pytest.raises(
        ValueError, match=r"whole_features\.seed: expected an integer, 0 or more, got"
    ):
        whole_features([3, 4], 2, seed)
