"""Erasing closes the gap in a run of slots, also where the run wraps around the end."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import home_slot, ids_at_home
from table_cases import ids_of

from torchrec_dyn import ops

WHOLE = ids_of(-1)  # one map that does not grow


def empty_map(capacity):
    return torch.zeros(capacity, 2, dtype=torch.int64)


def put(slots, ids, first_row=0):
    rows = torch.arange(first_row, first_row + len(ids))
    ops.insert(ids_of(*ids), rows, torch.tensor([0, len(ids)]), [slots], WHOLE)


def look(slots, ids):
    return ops.lookup(ids_of(*ids), torch.tensor([0, len(ids)]), [slots], WHOLE)[0].tolist()


def check_runs(slots):
    """No empty slot between the home of an id and the id: else a lookup would stop early."""
    capacity = slots.shape[0]
    for slot, (number, place) in enumerate(slots.tolist()):
        if place == 0:
            continue
        walk = home_slot(number, capacity)
        while walk != slot:
            assert slots[walk, 1] > 0
            walk = (walk + 1) % capacity


@pytest.mark.parametrize("home", [0, 3, 6, 7])
@pytest.mark.parametrize("victim", range(5))
def test_one_of_a_run_goes_and_the_others_stay(home, victim):
    ids = ids_at_home(home, 8, 5)
    slots = empty_map(8)
    put(slots, ids)
    assert ops.erase(ids_of(ids[victim]), [slots], WHOLE).tolist() == [victim]
    assert look(slots, ids) == [-1 if k == victim else k for k in range(5)]
    check_runs(slots)
    assert int((slots[:, 1] > 0).sum()) == 4


def test_every_order_of_a_wrapping_run():
    """Six ids of three homes around the end of the map, erased in each of 720 orders."""
    ids = [*ids_at_home(6, 8, 2), *ids_at_home(7, 8, 2), *ids_at_home(0, 8, 2)]
    for order in itertools.permutations(range(6)):
        slots = empty_map(8)
        put(slots, ids)
        left = set(range(6))
        for victim in order:
            assert ops.erase(ids_of(ids[victim]), [slots], WHOLE).item() == victim
            left.remove(victim)
            assert look(slots, ids) == [k if k in left else -1 for k in range(6)]
        assert (slots[:, 1] == 0).all()


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 15)), max_size=60),
    st.sampled_from([8, 12, 16]),
)
def test_small_full_maps_follow_a_dict(steps, capacity):
    homes = (0, 1, capacity - 1, capacity - 2)
    pool = [i for home in homes for i in ids_at_home(home, capacity, 4)]
    slots, held, row = empty_map(capacity), {}, 0
    for is_insert, choice in steps:
        number = pool[choice]
        if is_insert and number not in held and len(held) < capacity:
            put(slots, [number], row)
            held[number] = row
            row += 1
        elif not is_insert:
            assert ops.erase(ids_of(number), [slots], WHOLE).item() == held.pop(number, -1)
        assert look(slots, pool) == [held.get(i, -1) for i in pool]
        check_runs(slots)


def test_a_full_map_is_searched_and_erased_without_hanging():
    ids = [i for home in range(8) for i in ids_at_home(home, 8, 1)]
    slots = empty_map(8)
    put(slots, ids)
    assert look(slots, [*ids, 12345]) == [*range(8), -1]
    assert ops.erase(ids_of(12345), [slots], WHOLE).tolist() == [-1]
    with pytest.raises(RuntimeError, match="expected an empty slot for every new id, got a full"):
        put(slots, [12345])
    assert ops.erase(ids_of(ids[4]), [slots], WHOLE).tolist() == [4]
    assert look(slots, ids) == [0, 1, 2, 3, -1, 5, 6, 7]


def test_repeats_absent_ids_and_empty_maps():
    slots = empty_map(16)
    put(slots, [1, 2])
    assert ops.erase(ids_of(1, 1, 3, 2), [slots], WHOLE).tolist() == [0, -1, -1, 1]
    assert ops.erase(ids_of(1), [empty_map(0)], WHOLE).tolist() == [-1]
    assert ops.erase(ids_of(), [slots], WHOLE).tolist() == []


def test_probe_lengths_shrink_again():
    ids = ids_at_home(5, 32, 10)
    slots = empty_map(32)
    put(slots, ids)
    assert ops.probe_lengths(slots, 1).tolist() == [10, sum(range(1, 11)), 10]
    ops.erase(ids_of(*ids[:9]), [slots], WHOLE)
    assert ops.probe_lengths(slots, 1).tolist() == [1, 1, 1]
    ops.erase(ids_of(ids[9]), [slots], WHOLE)
    assert ops.probe_lengths(slots, 1).tolist() == [0, 0, 0]
    assert ops.probe_lengths(empty_map(0), 1).tolist() == [0, 0, 0]


@pytest.mark.parametrize("is_growing", [False, True])
def test_many_ids_are_erased_one_by_one_in_order(is_growing):
    """With the homes of later ones on their way; absent ids and repeats among them."""
    draw = random.Random(3)
    ids = draw.sample(range(10**6), 3000)
    slots, moved = [empty_map(3300)], WHOLE
    put(slots[0], ids)
    if is_growing:
        slots = [empty_map(3304), *slots]
        moved = ops.move_slots(slots[1], slots[0], 0, 1500)
    row_of = {number: row for row, number in enumerate(ids)}
    asked = [draw.randrange(10**6) if k % 3 == 0 else draw.choice(ids) for k in range(4000)]
    rows = ops.erase(ids_of(*asked), slots, moved).tolist()
    assert rows == [row_of.pop(number, -1) for number in asked]
    left = ops.lookup(ids_of(*ids), ids_of(0, 3000), slots, moved)[0].tolist()
    assert left == [row_of.get(number, -1) for number in ids]
