"""The kernels of the id map for GPUs against the ops of the CPU: the contents are equal, slots may differ.

On `simt` four threads take turns on neighbouring ids, so that they meet in the same lines.
"""

import random

import pytest
import torch
from device_ops import CPU
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import ids_at_home
from raw_maps import WHOLE, look, put, slots_of
from table_cases import ids_of
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.storage.id_map import MAX_LOAD, IdMap

pytestmark = pytest.mark.usefixtures("device")
# A test with a fixture and examples: the fixture is the same for all examples.
of_devices = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def some_ids(count: int, seed: int) -> Tensor:
    """Returns distinct ids out of all int64, the extremes among them."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**63), 2**63 - 1, (count + 10,), generator=draw)
    ids[:5] = ids_of(0, -1, 1, 2**63 - 1, -(2**63))
    return ids.unique()[torch.randperm(count, generator=draw)]


def cpu_map(ids: Tensor, capacity: int) -> Tensor:
    slots = slots_of(capacity)
    CPU.insert(ids, torch.arange(len(ids)), ids_of(0, len(ids)), [slots], WHOLE)
    return slots


def contents(slots: list[Tensor]) -> list[list[int]]:
    """Returns ids and rows, sorted."""
    every = torch.cat(slots)
    return sorted(every[every[:, 1] != 0].tolist())


def found_by_the_cpu(ids: Tensor, slots: list[Tensor], moved: Tensor) -> Tensor:
    return CPU.lookup(ids, ids_of(0, len(ids)), slots, moved)[0]


@pytest.mark.parametrize("seed", range(20))
def test_twenty_thousand_ids_inserted_at_once_are_found(seed):
    ids = some_ids(20_000, seed)
    slots = slots_of(32_000)
    ops.insert(ids, torch.arange(20_000), ids_of(0, 20_000), [slots], WHOLE)
    assert torch.equal(found_by_the_cpu(ids, [slots], WHOLE), torch.arange(20_000))
    assert int((slots[:, 1] != 0).sum()) == 20_000


@pytest.mark.parametrize("home", [0, 60, 124])
def test_all_threads_insert_into_one_line(home):
    """A run of sixteen lines, which may wrap around the end; no slot inside it stays empty."""
    ids = ids_at_home(home, 128, 64)
    for _ in range(20):
        slots = slots_of(128)
        put(slots, ids)
        assert found_by_the_cpu(ids_of(*ids), [slots], WHOLE).tolist() == [*range(64)]
        assert slots.roll(-home, 0)[:64, 1].all() and not slots.roll(-home, 0)[64:, 1].any()


@pytest.mark.parametrize("capacity", [4, 8, 1000, 20_000])
def test_a_map_is_filled_to_its_last_slot_and_emptied(capacity):
    """Its one run has no end. Ids are removed in another order, with repeats and absent ids."""
    ids = some_ids(capacity + 1, capacity)
    slots = slots_of(capacity)
    ids, one_more = ids[:capacity], ids[capacity:]
    ops.insert(ids, torch.arange(capacity), ids_of(0, capacity), [slots], WHOLE)
    assert torch.equal(found_by_the_cpu(ids, [slots], WHOLE), torch.arange(capacity))
    with pytest.raises(RuntimeError, match="insert: expected an empty slot for every new id, got"):
        put(slots, one_more.tolist())
    assert look(slots, [*one_more.tolist(), *ids.tolist()]) == [-1, *range(capacity)]
    for asked in (ids[::3].repeat(2), torch.cat([one_more, ids.flip(0)])):
        expected = CPU.erase(asked, [slots.clone()], WHOLE)
        assert torch.equal(ops.erase(asked, [slots], WHOLE), expected)
        left = ids if expected[0] >= 0 else ids[:0]
        kept = found_by_the_cpu(left, [slots], WHOLE)
        assert torch.equal(kept < 0, torch.isin(left, asked))
    assert not slots[:, 1].any()


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("is_growing", [False, True])
def test_erased_ids_are_those_that_the_cpu_erases(share, is_growing):
    """At a load of 0.8, where runs are long; repeats in any order, and absent ids."""
    ids = some_ids(8_000, 3)
    slots, moved = [cpu_map(ids, 10_000)], WHOLE
    if is_growing:
        slots = [slots_of(10_400), *slots]
        moved = CPU.move_slots(slots[1], slots[0], 0, 4_000)
    draw = torch.Generator().manual_seed(5)
    gone = ids[torch.rand(8_000, generator=draw) < share]
    asked = torch.cat([gone, gone[::2], some_ids(500, 4)])
    asked = asked[torch.randperm(len(asked), generator=draw)]
    other = [array.clone() for array in slots]
    assert torch.equal(ops.erase(asked, slots, moved), CPU.erase(asked, other, moved))
    assert contents(slots) == contents(other)
    rows = torch.where(torch.isin(ids, asked), -1, torch.arange(8_000))
    assert torch.equal(found_by_the_cpu(ids, slots, moved), rows)


@of_devices
@given(
    st.lists(st.integers(0, 39), min_size=1, max_size=60),
    st.integers(0, 40),
    st.sampled_from([40, 44, 64]),
)
def test_small_runs_are_closed_as_by_the_cpu(erased, count, capacity):
    """Runs of six homes, some around the end, in maps that may be full."""
    homes = (0, 4, 20, capacity - 8, capacity - 4)
    pool = [number for home in homes for number in ids_at_home(home, capacity, 8)]
    slots = slots_of(capacity)
    put(slots, pool[:count])
    asked = ids_of(*(pool[k] for k in erased))
    other = slots.clone()
    assert torch.equal(ops.erase(asked, [slots], WHOLE), CPU.erase(asked, [other], WHOLE))
    assert contents([slots]) == contents([other])
    rows = [-1 if k in erased or k >= count else k for k in range(len(pool))]
    assert found_by_the_cpu(ids_of(*pool), [slots], WHOLE).tolist() == rows


def test_maps_that_grow_are_read_and_written():
    """Two tables, of which one grows: an id is in the array that its spread hash names."""
    ids = some_ids(5_000, 7)
    first, new = ids[:3_000], ids[3_000:]
    slots = [slots_of(8_000), cpu_map(first, 5_000), cpu_map(first, 5_000)]
    moved = ids_of(CPU.move_slots(slots[2], slots[0], 0, 2_500).item(), -1)
    offsets = ids_of(0, 5_000, 10_000)
    absent = CPU.lookup(ids.repeat(2), offsets, slots, moved)[1]
    rows, counted = ops.lookup(ids.repeat(2), offsets, slots, moved)
    expected = torch.where(torch.arange(5_000) < 3_000, torch.arange(5_000), -1)
    assert torch.equal(rows, expected.repeat(2)) and torch.equal(counted, absent)
    ops.insert(new.repeat(2), torch.arange(9_000, 13_000), ids_of(0, 2_000, 4_000), slots, moved)
    rows, absent = CPU.lookup(ids.repeat(2), offsets, slots, moved)
    assert absent.tolist() == [0, 0]
    assert torch.equal(rows[3_000:5_000], torch.arange(9_000, 11_000))
    assert torch.equal(rows[8_000:], torch.arange(11_000, 13_000))
    assert torch.equal(rows[:3_000], torch.arange(3_000))


def test_maps_are_copied_to_larger_arrays():
    """Two at once, one of them empty; ids that wrap around the end included. The old slots stay."""
    capacity = 10_000
    wrapped = ids_of(*ids_at_home(capacity - 4, capacity, 12))
    ids = torch.cat([wrapped, some_ids(6_000, 9)]).unique()
    slots = cpu_map(ids, capacity)
    before = slots.clone()
    grown, empty = ops.grown_slots([slots, slots_of(0)], [capacity + 4, 8], [0, 9])
    assert torch.equal(slots, before) and empty.tolist() == [[0, 0]] * 8
    assert torch.equal(found_by_the_cpu(ids, [grown], WHOLE), torch.arange(len(ids)))
    assert int((grown[:, 1] > 0).sum()) == len(ids)


@pytest.mark.parametrize("count", [1, 31, 5_000])
def test_new_ids_are_collected_bit_for_bit(count):
    """Few ids that repeat often, tables without ids, the same ids in several tables, and ids with a row."""
    draw = random.Random(count)
    pool = some_ids(max(count // 4, 1), 11).tolist()
    heavy = [pool[min(int(draw.paretovariate(0.3)) - 1, len(pool) - 1)] for _ in range(3 * count)]
    ids = ids_of(*heavy)
    rows = ids_of(*(draw.choice((-1, -1, 0, 5)) for _ in heavy))
    offsets = ids_of(0, 0, count, count, count + 1, 3 * count, 3 * count)
    for got, expected in zip(
        ops.collect_new(ids, rows, offsets), CPU.collect_new(ids, rows, offsets), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("count", [0, 1])
def test_calls_without_ids_or_tables(count):
    none, offsets = ids_of(), ids_of(*[0] * (count + 1))
    slots, moved = [slots_of(0)] * count, ids_of(*[-1] * count)
    rows, absent = ops.lookup(none, offsets, slots, moved)
    assert rows.tolist() == [] and absent.tolist() == [0] * count
    new_ids, counts, new_offsets, index = ops.collect_new(none, none, offsets)
    assert new_ids.tolist() == counts.tolist() == index.tolist() == []
    assert new_offsets.tolist() == offsets.tolist()
    ops.insert(none, none, offsets, slots, moved)
    if count:
        assert ops.grown_slots(slots, [8], [0])[0].tolist() == [[0, 0]] * 8


def test_a_map_that_is_not_on_the_cpu_grows_at_once(monkeypatch):
    """It has one array after every call, at a load of at most MAX_LOAD, and large maps grow by a quarter."""
    monkeypatch.setattr(IdMap, "_grows_in_steps", lambda self, capacity: False)
    id_map, sizes, held = IdMap(limit=150_000), [], 0
    while held < 150_000:
        id_map.reserve(5_000)
        assert id_map.outgoing is None and id_map.moved == -1
        id_map.insert(torch.arange(held, held + 5_000) * 31, torch.arange(held, held + 5_000))
        held += 5_000
        sizes += [id_map.capacity] if id_map.capacity not in sizes else []
        assert held / id_map.capacity <= MAX_LOAD
    assert sizes[-1] == 240_004 and sizes[-2] * 1.25 >= sizes[-1] > sizes[-2]
    id_map.check_invariants()


def test_a_new_map_is_on_its_device():
    assert IdMap(device=torch.device("meta")).slots.is_meta
    assert not IdMap(device=torch.device("meta"))._grows_in_steps(1 << 20)
    assert IdMap()._grows_in_steps(1 << 20)


@pytest.mark.needs_cuda
def test_slots_begin_at_a_multiple_of_16_bytes_of_a_gpu():
    slots = torch.zeros(17, dtype=torch.int64, device="cuda")[1:].view(8, 2)
    with pytest.raises(RuntimeError, match="lookup: expected slots at a multiple of 16 bytes"):
        CPU.lookup(ids_of(1).cuda(), ids_of(0, 1), [slots], WHOLE)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="has no two GPUs")
def test_tensors_of_two_gpus_are_refused():
    """A kernel that reads the memory of another GPU ends the process's use of CUDA."""
    ids, slots = torch.zeros(1, dtype=torch.int64), torch.zeros(8, 2, dtype=torch.int64)
    with pytest.raises(
        RuntimeError, match="lookup: expected slots on GPU 1, as the first tensor, got GPU 0"
    ):
        CPU.lookup(ids.to("cuda:1"), ids_of(0, 1), [slots.to("cuda:0")], WHOLE)
