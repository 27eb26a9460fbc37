"""An id's home is a line of four slots, which are compared together; the search continues line by line."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import home_slot, ids_at_home, probe_lengths
from raw_maps import WHOLE, look, put, slots_of
from table_cases import ids_of

from torchrec_dyn import ops


def scattered(home, capacity, count):
    """Returns ids of one home, scaled to each of its four slots in turn."""
    pools = [iter(ids_at_home(home + s, capacity, count)) for s in range(4)]
    return [next(pools[k % 4]) for k in range(count)]


@pytest.mark.parametrize("capacity", [16, 20])
@pytest.mark.parametrize("line", range(4))
@pytest.mark.parametrize("count", range(1, 14))
def test_a_run_fills_line_after_line(count, line, capacity):
    """Runs of 1 to 13 ids from each line on, into the second, third and fourth line and around the end."""
    home = 4 * line
    *ids, absent = scattered(home, capacity, count + 1)
    slots = slots_of(capacity)
    put(slots, ids)
    assert [slots[(home + k) % capacity].tolist() for k in range(count)] == [
        [number, k + 1] for k, number in enumerate(ids)
    ]
    assert look(slots, [*ids, absent]) == [*range(count), -1]
    lengths = probe_lengths(slots)
    assert [lengths[(home + k) % capacity] for k in range(count)] == [*range(1, count + 1)]
    assert ops.probe_lengths(slots, 1).tolist() == [count, sum(lengths), count]


@pytest.mark.parametrize("further", range(3))
@pytest.mark.parametrize("home", [0, 8, 12])
def test_full_lines_end_no_search_and_one_empty_slot_does(home, further):
    """Full lines of other ids are between home and id; if one of their slots is emptied, the id is lost."""
    others = [n for k in range(further + 1) for n in scattered((home + 4 * k) % 16, 16, 4)]
    *_, wanted = scattered(home, 16, 5)
    for hole in range(4 * (further + 1)):
        slots = slots_of(16)
        put(slots, [*others, wanted])
        assert look(slots, [wanted]) == [4 * (further + 1)]
        slots[(home + hole) % 16, 1] = 0
        assert look(slots, [wanted]) == [-1]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("stale", range(4))
def test_the_id_field_of_an_empty_slot_is_never_asked(stale, at):
    """The id is also, or only, in an emptied slot before or after the valid slot."""
    number, other = scattered(4, 16, 2)
    slots = slots_of(16)
    slots[:, 0] = number
    slots[4 + at] = ids_of(number, 7)
    assert look(slots, [number, other]) == [6, -1]
    slots[4 + at, 1] = 0
    assert look(slots, [number]) == [-1]
    slots[4 + stale] = ids_of(other, 0)
    put(slots, [number])
    assert slots[4].tolist() == [number, 1]
    assert look(slots, [number, other]) == [0, -1]
    assert ops.erase(ids_of(other, number, number), [slots], WHOLE).tolist() == [-1, 0, -1]
    assert not slots[:, 1].any()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("before", range(9))
def test_id_zero_is_an_id(before):
    """An empty slot has 0 in its id field; the absent id 0 is not found in any line."""
    assert home_slot(0, 16) == 0
    others = [n for n in scattered(0, 16, 12) if n != 0][:before]
    slots = slots_of(16)
    put(slots, others)
    assert look(slots, [0]) == [-1]
    assert ops.erase(ids_of(0), [slots], WHOLE).tolist() == [-1]
    ops.insert(ids_of(0), ids_of(before), ids_of(0, 1), [slots], WHOLE)
    assert slots[before].tolist() == [0, before + 1]
    assert look(slots, [0, *others]) == [before, *range(before)]
    assert ops.erase(ids_of(0), [slots], WHOLE).tolist() == [before]
    assert look(slots, [0, *others]) == [-1, *range(before)]


@pytest.mark.usefixtures("device")
def test_every_slot_of_a_line_is_told_from_the_others():
    """Rows that use all bits: slots that do not match must not change the result."""
    ids = scattered(8, 16, 4)
    rows = [0, 2**62 - 1, 0x2AAA_AAAA_AAAA_AAAA, 0x1555_5555_5555_5555]
    slots = slots_of(16)
    ops.insert(ids_of(*ids), ids_of(*rows), ids_of(0, 4), [slots], WHOLE)
    assert look(slots, [*ids, ~ids[0], ids[1] ^ 1]) == [*rows, -1, -1]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("is_growing", [False, True])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 511, 512, 513, 1100, 40_001])
def test_many_ids_at_once(count, is_growing, threads):
    """Ids at home, in later lines and absent, in any order and repeated, are found as single ids are."""
    capacity, held = 4096, 3000
    runs = [n for home in (0, 1000, 4092) for n in scattered(home, capacity, 12)]
    ids = torch.unique(torch.cat([ids_of(*runs), torch.arange(1, held) * 7919]))
    row_of = {number: row for row, number in enumerate(ids.tolist())}
    slots, moved = [slots_of(capacity)], WHOLE
    ops.insert(ids, torch.arange(len(ids)), ids_of(0, len(ids)), slots, moved)
    assert sum(length > 8 for length in probe_lengths(slots[0])) > 12
    if is_growing:
        slots = [slots_of(2 * capacity), *slots]
        moved = ops.move_slots(slots[1], slots[0], 0, 1700)
    draw = torch.Generator().manual_seed(count)
    pool = torch.cat([ids, ids * 3 + 1, ids_of(0)])
    asked = pool[torch.randint(0, len(pool), (count,), generator=draw)]
    expected = [row_of.get(number, -1) for number in asked.tolist()]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows, absent = ops.lookup(asked, ids_of(0, count), slots, moved)
    finally:
        torch.set_num_threads(before)
    assert rows.tolist() == expected
    assert absent.tolist() == [expected.count(-1)]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("count", [1, 70, 600])
def test_full_maps_and_maps_of_one_line_and_of_none(count):
    """The search ends if there is no line after the home, or no line at all."""
    asked = [*range(count)]
    assert look(slots_of(0), asked) == [-1] * count
    for capacity in (4, 8):
        slots = slots_of(capacity)
        held = [n for k in range(capacity // 4) for n in scattered(4 * k, capacity, 4)]
        put(slots, held)
        place = {number: row for row, number in enumerate(held)}
        assert look(slots, [*held, *asked]) == [
            *range(capacity), *(place.get(number, -1) for number in asked)
        ]  # fmt: skip
        assert ops.erase(ids_of(held[0]), [slots], WHOLE).tolist() == [0]
        assert look(slots, held) == [-1, *range(1, capacity)]


MAPS = {
    "lookup": lambda slots, moved: ops.lookup(ids_of(1), ids_of(0, 1), slots, moved),
    "insert": lambda slots, moved: ops.insert(ids_of(1), ids_of(0), ids_of(0, 1), slots, moved),
    "erase": lambda slots, moved: ops.erase(ids_of(1), slots, moved),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("op", MAPS)
@pytest.mark.parametrize(
    ("capacities", "moved", "rule"),
    [
        ([9], -1, "slots of shape .* with C a multiple of 4, got C = 9"),
        ([12, 10], 0, "C a multiple of 4, got C = 10"),
        ([10, 8], 0, "C a multiple of 4, got C = 10"),
        ([12, 8], 2, r"moved in \[0, 8\), a multiple of 4, or -1, got 2"),
    ],
)
def test_maps_of_no_whole_lines_are_refused(op, capacities, moved, rule):
    with pytest.raises(RuntimeError, match=f"{op}: expected .*{rule}"):
        MAPS[op]([slots_of(capacity) for capacity in capacities], ids_of(moved))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: ops.new_slots(slots_of(8), 10), "new_slots: .*, a multiple of 4, got 10"),
        (lambda: ops.new_slots(slots_of(8), 3), r"new_slots: .* in \[4, .*, got 3"),
        (lambda: ops.new_slots(slots_of(9), 12), "new_slots: .* slots .* of 4, got C = 9"),
        (
            lambda: ops.move_slots(slots_of(8), slots_of(12), 2, 8),
            r"moved in \[0, 8\], a multiple of 4, got 2",
        ),
        (lambda: ops.move_slots(slots_of(6), slots_of(12), 0, 6), "outgoing .* of 4, got C = 6"),
        (lambda: ops.move_slots(slots_of(8), slots_of(11), 0, 8), "slots .* of 4, got C = 11"),
        (lambda: ops.probe_lengths(slots_of(5), 1), "probe_lengths: .* of 4, got C = 5"),
    ],
)
def test_arrays_of_no_whole_lines_are_refused(call, rule):
    with pytest.raises(RuntimeError, match=f"expected .*{rule}" if ":" not in rule else rule):
        call()


@pytest.mark.usefixtures("device")
def test_a_sample_of_probes_is_some_runs_of_them_all():
    """The sample takes every n-th run of 4,096 slots, from the first run on; the last run may be short."""
    slots = torch.zeros(4096 * 6 + 100, 2, dtype=torch.int64)
    slots[:, 0] = torch.arange(len(slots))
    slots[:, 1] = torch.randint(3, (len(slots),), generator=torch.Generator().manual_seed(1))
    runs = torch.tensor(probe_lengths(slots)).split(4096)
    for every, looked_at in ((1, runs), (3, [runs[0], runs[3], runs[6]]), (100, [runs[0]])):
        lengths = torch.cat(list(looked_at))
        expected = [(lengths > 0).sum(), lengths.sum(), lengths.max()]
        assert ops.probe_lengths(slots, every).tolist() == expected


# Erasing closes the gap in a run of slots, also if the run wraps around the end


def check_runs(slots):
    """Asserts that no slot between the home of an id and the id is empty; a lookup would stop there."""
    capacity = slots.shape[0]
    for slot, (number, place) in enumerate(slots.tolist()):
        if place == 0:
            continue
        walk = home_slot(number, capacity)
        while walk != slot:
            assert slots[walk, 1] > 0
            walk = (walk + 1) % capacity


@pytest.mark.usefixtures("device")
def test_every_order_of_a_wrapping_run():
    """Six ids of three homes around the end of the map, erased in each of 720 orders."""
    ids = [*ids_at_home(6, 8, 2), *ids_at_home(7, 8, 2), *ids_at_home(0, 8, 2)]
    every = slots_of(8)
    put(every, ids)
    maps = [((), every)]  # the ids that are gone, in order: orders that begin alike share a map
    for _ in ids:
        maps = [
            ((*gone, victim), without(slots, ids, (*gone, victim)))
            for gone, slots in maps
            for victim in {*range(6)} - {*gone}
        ]
    assert len(maps) == 720
    for _, slots in maps:
        assert (slots[:, 1] == 0).all()


def without(before, ids, gone):
    """Returns a copy of a map without the last of the ids that are gone then."""
    slots = before.clone()
    assert ops.erase(ids_of(ids[gone[-1]]), [slots], WHOLE).item() == gone[-1]
    assert look(slots, ids) == [-1 if k in gone else k for k in range(6)]
    return slots


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 15)), max_size=60),
    st.sampled_from([8, 12, 16]),
)
def test_small_full_maps_follow_a_dict(steps, capacity):
    homes = (0, 1, capacity - 1, capacity - 2)
    pool = [i for home in homes for i in ids_at_home(home, capacity, 4)]
    slots, held, row = slots_of(capacity), {}, 0
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


@pytest.mark.usefixtures("device")
def test_a_full_map_is_searched_and_erased_without_hanging():
    ids = [i for home in range(8) for i in ids_at_home(home, 8, 1)]
    slots = slots_of(8)
    put(slots, ids)
    assert look(slots, [*ids, 12345]) == [*range(8), -1]
    assert ops.erase(ids_of(12345), [slots], WHOLE).tolist() == [-1]
    with pytest.raises(RuntimeError, match="expected an empty slot for every new id, got a full"):
        put(slots, [12345])
    assert ops.erase(ids_of(ids[4]), [slots], WHOLE).tolist() == [4]
    assert look(slots, ids) == [0, 1, 2, 3, -1, 5, 6, 7]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("capacity", [4, 8, 12])
def test_each_id_of_a_full_map_goes_and_the_others_stay(capacity):
    ids = [i for home in range(capacity) for i in ids_at_home(home, capacity, 1)]
    for first in range(capacity):
        slots = slots_of(capacity)
        put(slots, ids)
        left = {*range(capacity)}
        for victim in (*range(first, capacity), *range(first)):
            assert ops.erase(ids_of(ids[victim]), [slots], WHOLE).item() == victim
            left.remove(victim)
            assert look(slots, ids) == [k if k in left else -1 for k in range(capacity)]
            check_runs(slots)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("filled", [*itertools.product([False, True], repeat=4)])
def test_a_line_with_gaps_keeps_the_slots_around_it(filled):
    """A damaged map has an empty slot before an id of the same line; the first slot is the map's."""
    ids = ids_at_home(0, 4, 4)
    for victim in range(4):
        memory = torch.full((12, 2), 77)
        slots = memory[4:8]
        slots.copy_(torch.tensor([[n, k + 1] for k, n in enumerate(ids)]))
        slots[~torch.tensor(filled), 1] = 0
        row = victim if filled[victim] else -1
        assert ops.erase(ids_of(ids[victim]), [slots], WHOLE).item() == row
        assert (memory[:4] == 77).all() and (memory[8:] == 77).all()
        left = [k if f and k != victim else -1 for k, f in enumerate(filled)]
        assert look(slots, ids) == left


@pytest.mark.usefixtures("device")
def test_repeats_absent_ids_and_empty_maps():
    slots = slots_of(16)
    put(slots, [1, 2])
    assert ops.erase(ids_of(1, 1, 3, 2), [slots], WHOLE).tolist() == [0, -1, -1, 1]
    assert ops.erase(ids_of(1), [slots_of(0)], WHOLE).tolist() == [-1]
    assert ops.erase(ids_of(), [slots], WHOLE).tolist() == []


@pytest.mark.parametrize("is_growing", [False, True])
def test_many_ids_are_erased_one_by_one_in_order(is_growing):
    """With prefetched homes of later ids; some ids are absent or repeated."""
    draw = random.Random(3)
    ids = draw.sample(range(10**6), 3000)
    slots, moved = [slots_of(3300)], WHOLE
    put(slots[0], ids)
    if is_growing:
        slots = [slots_of(3304), *slots]
        moved = ops.move_slots(slots[1], slots[0], 0, 1500)
    row_of = {number: row for row, number in enumerate(ids)}
    asked = [draw.randrange(10**6) if k % 3 == 0 else draw.choice(ids) for k in range(4000)]
    rows = ops.erase(ids_of(*asked), slots, moved).tolist()
    assert rows == [row_of.pop(number, -1) for number in asked]
    left = ops.lookup(ids_of(*ids), ids_of(0, 3000), slots, moved)[0].tolist()
    assert left == [row_of.get(number, -1) for number in ids]
