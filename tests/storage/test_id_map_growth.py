"""Growth moves slots and never a row.

A growing map has two arrays and one frontier. While it grows, every id is found, with its own row.
"""

import itertools
import os
import resource
import sys

import pytest
import torch
from another_process import call
from hypothesis import given
from hypothesis import strategies as st
from oracle import WORD, home_slot, id_of_hash, ids_at_home
from raw_maps import slots_of
from shards import deep_but
from table_cases import HARD_IDS, ids_of, make_group, make_table

from torchrec_dyn import ops
from torchrec_dyn.storage.id_map import MAX_LOAD, SLOT_BYTES, IdMap, most_slots


def filled(ids):
    id_map = IdMap()
    id_map.reserve(len(ids))
    ops.insert(ids_of(*ids), torch.arange(len(ids)), torch.tensor([0, len(ids)]), *id_map.arrays())
    id_map.num_ids = len(ids)
    return id_map


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("capacity", [68, 100, 128, 4096, 100_004])
def test_growth_keeps_every_row_at_any_capacity(capacity):
    old = filled(HARD_IDS[:39])
    grown = ops.new_slots(old.slots, capacity)
    assert ops.move_slots(old.slots, grown, 0, 64).item() == 64
    rows, absent = ops.lookup(ids_of(*HARD_IDS[:39]), torch.tensor([0, 39]), [grown], ids_of(-1))
    assert rows.tolist() == list(range(39))
    assert absent.item() == 0
    assert int((grown[:, 1] != 0).sum()) == 39
    assert not old.slots.any()


def test_a_map_is_never_fuller_than_its_load():
    id_map, held = IdMap(), 0
    for count in [1, 1, 40, 3, 500, 7, 20_000, 1, 200_000, 50_000]:
        id_map.reserve(count)
        ids = torch.arange(held, held + count) * 31
        ops.insert(
            ids, torch.arange(held, held + count), torch.tensor([0, count]), *id_map.arrays()
        )
        id_map.num_ids += count
        held += count
        assert held / id_map.held <= MAX_LOAD
        assert id_map.held <= most_slots(held)
    assert torch.equal(id_map.lookup(torch.arange(held) * 31), torch.arange(held))
    id_map.check_invariants()


def test_bytes_of_a_row_in_a_large_map_are_bounded():
    """A large map grows by a quarter: at most 32 bytes per row."""
    assert most_slots(10_000_000) * SLOT_BYTES / 10_000_000 <= 32.01


def test_rows_stay_where_they_are_while_the_table_grows():
    """New blocks are appended; the memory of old blocks is neither moved nor written."""
    table = make_table(embedding_dim=1 << 16, num_embeddings=100_000)
    group = make_group(table)
    ids = torch.arange(100)
    group(ids, torch.tensor([0, 100]), training=True)
    first, places = table.id_map.lookup(ids), [b.data_ptr() for b in table.weights.blocks]
    before = table.lookup(ids)[0]
    for start in (100, 200, 300):
        group(torch.arange(start, start + 100), torch.tensor([0, 100]), training=True)
    assert len(table.weights.blocks) > len(places)
    assert [b.data_ptr() for b in table.weights.blocks[: len(places)]] == places
    assert torch.equal(table.id_map.lookup(ids), first)
    assert torch.equal(table.lookup(ids)[0], before)


def test_rows_are_numbered_in_order_of_first_sight():
    table = make_table()
    rows = table.find_or_insert(ids_of(9, -4, 9, 7, -4))
    assert rows.tolist() == [0, 1, 0, 2, 1]
    assert table.find_or_insert(ids_of(8, 7)).tolist() == [3, 2]


@pytest.mark.deep
def test_ten_million_rows():
    table = make_table(embedding_dim=1, num_embeddings=20_000_000)
    for start in range(0, 10_000_000, 1_000_000):
        table.find_or_insert(torch.arange(start, start + 1_000_000) * 2654435761)
    assert table.num_rows == 10_000_000
    assert table.lookup(torch.arange(10_000_000) * 2654435761)[1].all()
    assert not table.lookup(torch.arange(10_000_000) * 2654435761 + 1)[1].any()
    table.id_map.check_invariants()
    assert table.stats()["probe_length_mean"] < 3.6


# Between two arrays


class Growing:
    """Two arrays of a map; the test moves the slots."""

    def __init__(self, capacity, grown):
        self.outgoing = torch.zeros(capacity, 2, dtype=torch.int64)
        self.slots = torch.zeros(grown, 2, dtype=torch.int64)
        self.moved, self.held = 0, {}

    def arrays(self):
        if self.moved == len(self.outgoing):
            return [self.slots], ids_of(-1)
        return [self.slots, self.outgoing], ids_of(self.moved)

    def put(self, *ids):
        rows = torch.arange(len(self.held), len(self.held) + len(ids))
        ops.insert(ids_of(*ids), rows, ids_of(0, len(ids)), *self.arrays())
        self.held |= dict(zip(ids, rows.tolist(), strict=True))

    def erase(self, *ids):
        rows = ops.erase(ids_of(*ids), *self.arrays()).tolist()
        assert rows == [self.held.pop(number, -1) for number in ids]

    def move(self, until):
        before = self.moved
        self.moved = ops.move_slots(self.outgoing, self.slots, self.moved, until).item()
        assert max(before, min(until, len(self.outgoing))) <= self.moved <= len(self.outgoing)
        assert self.moved % 4 == 0

    def check(self, *others):
        asked = [*self.held, *others]
        rows = ops.lookup(ids_of(*asked), ids_of(0, len(asked)), *self.arrays())[0].tolist()
        assert rows == [*self.held.values(), *[-1] * len(others)]
        capacity = len(self.outgoing)
        homes = [
            [home_slot(number, capacity) for number, place in array.tolist() if place]
            for array in (self.slots, self.outgoing)
        ]
        assert all(home < self.moved for home in homes[0])
        assert all(home >= self.moved for home in homes[1])
        assert len(homes[0]) + len(homes[1]) == len(self.held)


# Scaled slots of ids in 16 slots, four lines; the home of ids with scaled slots 4 to 7 is 4.
RUNS = {
    "inside": (4, 4, 5, 7, 7, 7),
    "to the end": (8, 9, 11, 8, 8, 12, 15, 15),
    "around the end": (12, 12, 13, 15, 15, 15, 0, 1),
    "two lines around the end": (15, 15, 12, 12, 15, 15, 12, 12, 14, 15, 4),
    "a line each, all full": (0, 1, 2, 3, 4, 4, 4, 4, 8, 9, 9, 9),
}


@pytest.mark.everyday(7)
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("grown", deep_but([20, 32], [16, 20, 24, 32]))
@pytest.mark.parametrize("scaled", RUNS.values(), ids=RUNS)
def test_every_way_to_the_end(scaled, grown):
    """Moves of every length, alone and up to three in sequence; each ends with a whole line."""
    pool = {slot: iter(ids_at_home(slot, 16, 12)) for slot in set(scaled)}
    ids = [next(pool[slot]) for slot in scaled]
    absent = [next(pool[slot]) for slot in scaled[:1]]
    for stops in itertools.chain.from_iterable(
        itertools.combinations(range(1, 16), count) for count in range(3)
    ):
        grows = Growing(16, grown)
        grows.put(*ids)
        for until in (*stops, 16):
            grows.move(until)
            grows.check(*absent)
        assert grows.moved == 16 and not grows.outgoing.any()


@pytest.mark.parametrize("capacity", [12, 16, 20, 100])
def test_the_frontier_parts_neighbours(capacity):
    """The last spread hash before each line and the first spread hash of the line."""
    firsts = [-(-line * WORD // capacity) for line in range(4, capacity, 4)]
    ids = [id_of_hash(first - back) for first in firsts for back in (1, 0)]
    assert [home_slot(number, capacity) for number in ids[:4]] == [0, 4, 4, 8]
    grows = Growing(capacity, capacity + 4)
    grows.put(*ids)
    for line in range(4, capacity + 1, 4):
        grows.move(line)
        assert grows.moved == line  # two ids per line: no run continues
        grows.check()


@given(
    st.lists(st.tuples(st.sampled_from(["put", "erase", "move"]), st.integers(0, 23)), max_size=40),
    st.sampled_from([12, 16]),
)
def test_ids_come_and_go_while_slots_move(steps, capacity):
    scaled = (0, 1, 5, capacity // 2, capacity - 4, capacity - 1)
    pool = [number for slot in scaled for number in ids_at_home(slot, capacity, 4)]
    grows = Growing(capacity, capacity + 8)
    row = 0
    for what, choice in steps:
        if what == "move":
            grows.move(min(choice, capacity))
        elif what == "erase":
            grows.erase(pool[choice])
        elif pool[choice] not in grows.held and len(grows.held) < capacity - 1:
            ops.insert(ids_of(pool[choice]), ids_of(row), ids_of(0, 1), *grows.arrays())
            grows.held[pool[choice]] = row
            row += 1
        grows.check(*(number for number in pool if number not in grows.held))


def test_growth_is_spread_over_the_ids_that_cause_it():
    """Each id moves 16 outgoing slots; growth ends before the load is above MAX_LOAD, or a run later."""
    id_map, stretches, sizes = IdMap(), [], set()
    for held in range(0, 600_000, 500):
        leaving, before = id_map.outgoing, id_map.moved
        id_map.reserve(500)
        if leaving is not None and id_map.outgoing is leaving:
            stretches.append(id_map.moved - before)
        ids = torch.arange(held, held + 500) * 2654435761
        ops.insert(ids, torch.arange(held, held + 500), ids_of(0, 500), *id_map.arrays())
        id_map.num_ids += 500
        sizes.add(id_map.capacity)
        assert id_map.num_ids / id_map.held <= MAX_LOAD
        assert id_map.held <= most_slots(id_map.num_ids)
        assert torch.equal(id_map.lookup(ids), torch.arange(held, held + 500))
    assert len([size for size in sizes if size > 1 << 16]) >= 4
    assert len(stretches) > 50
    assert min(stretches) > 16 * 500 - 300 and max(stretches) < 16 * 500 + 300
    id_map.check_invariants()


def test_large_batches_leave_no_page_half_moved():
    """A huge page of outgoing slots is given back as a whole, so a large batch stops at the end of one."""
    id_map, page, stops = IdMap(), (2 << 20) // SLOT_BYTES, []
    for held in range(0, 1_500_000, 40_960):
        id_map.reserve(40_960)
        ids = torch.arange(held, held + 40_960) * 2654435761
        ops.insert(ids, torch.arange(held, held + 40_960), ids_of(0, 40_960), *id_map.arrays())
        id_map.num_ids += 40_960
        assert id_map.num_ids / id_map.held <= MAX_LOAD
        assert id_map.held <= most_slots(id_map.num_ids)
        if id_map.outgoing is not None:
            stops.append(id_map.moved % page)
    assert len(stops) >= 5
    assert max(stops) < 300  # to the end of a run
    id_map.check_invariants()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_pieces_of_a_stretch_are_moved_at_any_thread_count(threads):
    ids = torch.arange(150_000) * 2654435761
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        outgoing = ops.new_slots(torch.empty(0, 2, dtype=torch.int64), 200_000)
        ops.insert(ids, torch.arange(150_000), ids_of(0, 150_000), [outgoing], ids_of(-1))
        slots = ops.new_slots(outgoing, 200_004)
        moved = ops.move_slots(outgoing, slots, 0, 140_000)
        rows = ops.lookup(ids, ids_of(0, 150_000), [slots, outgoing], moved)[0]
        assert torch.equal(rows, torch.arange(150_000))
        assert ops.move_slots(outgoing, slots, moved.item(), 200_000).item() == 200_000
        rows = ops.lookup(ids, ids_of(0, 150_000), [slots], ids_of(-1))[0]
        assert torch.equal(rows, torch.arange(150_000))
    finally:
        torch.set_num_threads(before)


def test_a_run_around_the_end_survives_memory_given_back():
    """Ids wrap into the first huge page, which is freed except for the slots of these ids."""
    capacity = 1 << 18
    wrapped = ids_at_home(capacity - 1, capacity, 9)
    ids = ids_of(*wrapped, *(number for number in range(1000) if number not in wrapped))
    everyone = torch.arange(ids.numel())
    outgoing = ops.new_slots(torch.empty(0, 2, dtype=torch.int64), capacity)
    slots = ops.new_slots(outgoing, 2 * capacity)
    ops.insert(ids, everyone, ids_of(0, ids.numel()), [outgoing], ids_of(-1))
    moved = ids_of(0)
    for until in (5, 1 << 17, 200_000, capacity - 5):
        moved = ops.move_slots(outgoing, slots, moved.item(), until)
        rows = ops.lookup(ids, ids_of(0, ids.numel()), [slots, outgoing], moved)[0]
        assert torch.equal(rows, everyone)
    assert ops.move_slots(outgoing, slots, moved.item(), capacity).item() == capacity
    rows = ops.lookup(ids, ids_of(0, ids.numel()), [slots], ids_of(-1))[0]
    assert torch.equal(rows, everyone)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: ops.erase(ids_of(1), [slots_of(8)], ids_of(0)), "erase: .* of slots = 2, got 1"),
        (
            lambda: ops.erase(ids_of(1), [slots_of(8)] * 2, ids_of(8)),
            r"in \[0, 8\), .* or -1, got 8",
        ),
        (
            lambda: ops.erase(ids_of(1), [slots_of(8)] * 2, ids_of(-2)),
            r"in \[0, 8\), .* or -1, got -2",
        ),
        (lambda: ops.erase(ids_of(1), [slots_of(8)] * 2, ids_of(-1, -1)), "of maps = 1, got 2"),
        (lambda: ops.new_slots(slots_of(8), 0), r"new_slots: .* in \[4, 2\^48\), .*, got 0"),
        (lambda: ops.move_slots(slots_of(8), slots_of(4), 0, 8), "for 8 outgoing ones, got 4"),
        (
            lambda: ops.move_slots(slots_of(8, 1), slots_of(8, 1), 0, 8),
            "for every id, got a full map",
        ),
        (lambda: ops.move_slots(slots_of(8), slots_of(12), -4, 8), r"in \[0, 8\], .*, got -4"),
        (lambda: ops.move_slots(slots_of(8), slots_of(12), 12, 8), r"in \[0, 8\], .*, got 12"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(call, rule):
    with pytest.raises(RuntimeError, match=rf"expected .*{rule}" if ":" not in rule else rule):
        call()


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def grow():
    """Returns after each batch: ids, bytes of the process, bytes that the map counts, unfinished growths."""

    def step(id_map, ids):
        id_map.reserve(100_000)
        rows = torch.arange(id_map.num_ids, id_map.num_ids + 100_000)
        ops.insert(ids, rows, torch.tensor([0, 100_000]), *id_map.arrays())
        id_map.num_ids += 100_000

    step(IdMap(), torch.arange(100_000))
    before, id_map, growing, lines = resident_bytes(), IdMap(), 0, []
    for k in range(40):
        step(id_map, torch.arange(k * 100_000, (k + 1) * 100_000) * 2654435761)
        growing += id_map.outgoing is not None
        lines.append((id_map.num_ids, resident_bytes() - before, id_map.bytes, growing))
    return lines


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer keeps memory of its own")
def test_growth_takes_no_more_memory_than_it_says():
    """The memory of moved slots is freed at once, so that the process never holds two whole maps."""
    lines = call(grow)
    assert lines[-1][-1] >= 3  # steps that ended in the middle of growth
    for rows, resident, told, _ in lines:
        if rows > 500_000:
            assert told <= rows * SLOT_BYTES * 1.25 / MAX_LOAD + 2**12
            # Half-moved huge pages and the batch: measured 7 to 12.5 MB. Two whole maps: 50 MB more.
            assert resident < told + 20e6
