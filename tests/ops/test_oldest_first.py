"""The order of a list of rows: by `last_seen`, then by unsigned mixed id, at any size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import mix64, unmixed
from table_cases import hard_ids, ids_of

from torchrec_dyn import ops

pytestmark = pytest.mark.usefixtures("device")
steps = st.sampled_from([0, 1, 2, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)


def expected(ids, last_seen):
    places = range(len(ids))
    return sorted(places, key=lambda i: (last_seen[i], mix64(ids[i])))


@given(st.lists(st.tuples(hard_ids, steps), max_size=40))
def test_a_plain_sort_agrees(listed):
    ids, last_seen = [one[0] for one in listed], [one[1] for one in listed]
    order = ops.oldest_first(ids_of(*ids), ids_of(*last_seen)).tolist()
    assert sorted(order) == [*range(len(ids))]
    # Repeats are neighbours, in any order.
    assert [listed[i] for i in order] == [listed[i] for i in expected(ids, last_seen)]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("high_halves", [1, 7, 1 << 32], ids=["one", "seven", "any"])
def test_many_are_sorted_even_if_their_mixed_ids_begin_alike(high_halves, far):
    """More rows than the radix sort leaves to a plain sort; equal high bits are sorted by the low bits.

    `far`: one mixed id is far from the others.
    """
    draw = torch.Generator().manual_seed(0)
    low = torch.randperm(5000, generator=draw) * 800_000
    high = torch.randint(high_halves, (5000,), generator=draw) << 32
    high[17] += far << 62
    ids = unmixed(high + low)
    last_seen = torch.randint(1 << 20, (5000,), generator=draw) // 200_000
    order = ops.oldest_first(ids, last_seen).tolist()
    assert order == expected(ids.tolist(), last_seen.tolist())


def test_two_of_one_step_with_equal_high_bits_are_in_the_order_of_their_low_bits():
    """A run of two is the shortest that is sorted by whole words; far ids beside it leave few bits first."""
    mixed = [0, -1, 2**62 + 1, 2**62]  # -1: 2^64 - 1
    ids = unmixed(torch.tensor(mixed))
    for last_seen in ([5, 5, 5, 5], [5, 6, 5, 5]):
        assert ops.oldest_first(ids, ids_of(*last_seen)).tolist() == [0, 3, 2, 1]


@pytest.mark.parametrize("step", [-1, 2**32])
def test_a_step_that_no_score_holds_is_refused(step):
    with pytest.raises(RuntimeError, match=f"oldest_first: expected last_seen in .* got {step}"):
        ops.oldest_first(ids_of(1, 2), ids_of(3, step))


def test_every_id_has_a_last_sight():
    with pytest.raises(
        RuntimeError, match="oldest_first: expected the number of last_seen = 2, got 1"
    ):
        ops.oldest_first(ids_of(1, 2), ids_of(3))
