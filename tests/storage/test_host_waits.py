"""Where the host waits for a GPU in an id map and in rows, seen on a mock GPU."""

import pytest
import torch
from mock_device import CUDA, MockDevice
from oracle import unmixed

from torchrec_dyn import ops
from torchrec_dyn.storage import places_of
from torchrec_dyn.storage.id_map import IdMap
from torchrec_dyn.storage.row_store import RowStore

I64 = torch.int64


@pytest.fixture
def device():
    with MockDevice() as device:
        yield device


def ids_of(count, first=0):
    """Returns distinct ids, the ends of int64 among them."""
    return unmixed(torch.arange(first, first + count, dtype=I64) * -(2**40) - first)


def on(device, ids):
    return device.of(ids.clone())


def check_waits(device, *expected):
    """Asserts that a mock device has noted these reads since the last call, and nothing else."""
    reads = [note.op for note in device.reads]
    assert reads == [*expected] or not device.is_mock
    assert device.mixed == [] and device.without_kernel == [], device.mixed + device.without_kernel
    device.forget()


def test_where_the_host_waits_for_an_id_map(device):
    """More waits than these are a slip: each costs about as long as a kernel."""
    id_map = IdMap(device=CUDA)
    ids, rows = ids_of(100), torch.arange(100)
    id_map.reserve(100)
    check_waits(device)
    id_map.insert(on(device, ids), on(device, rows))
    check_waits(device)
    assert id_map.lookup(on(device, ids)).memory.tolist() == rows.tolist()
    check_waits(device)
    more, more_rows = ids_of(400, 100), torch.arange(100, 500)
    capacity = id_map.capacity
    id_map.reserve(400)
    assert id_map.capacity > capacity
    check_waits(device)
    id_map.insert(on(device, more), on(device, more_rows))
    device.forget()
    ops.erase(on(device, ids[:50]), *id_map.arrays())
    id_map.num_ids -= 50
    check_waits(device)
    found = id_map.lookup(on(device, torch.cat([ids, more])))
    assert found.memory.tolist() == [-1] * 50 + list(range(50, 500))
    listed, has_id = ops.ids_of_rows(*id_map.arrays(), 40, 100)
    check_waits(device)
    assert torch.equal(listed.memory[has_id.memory], ids[50:])


def test_where_the_host_waits_for_new_ids(device):
    id_map, ids = IdMap(device=CUDA), ids_of(100)
    offsets = torch.tensor([0, 200])
    asked = on(device, torch.cat([ids, ids]))
    found, _ = ops.lookup(asked, offsets, *id_map.arrays())
    device.forget()
    new, _, new_offsets, new_index = ops.collect_new(asked, found, offsets)
    check_waits(device, "collect_new")  # reads numbers of new ids
    assert new_offsets.tolist() == [0, 100] and torch.equal(new.memory, ids)
    assert new_index.memory.tolist() == [*range(100), *range(100)]


def test_where_the_host_waits_for_rows(device):
    store = RowStore(5, 4, torch.float32, CUDA)
    store.reserve(40)
    check_waits(device)
    rows, values = torch.tensor([39, 0, 17, 39]), torch.randn(4, 5)
    store.write(on(device, rows), on(device, values))
    check_waits(device)
    assert torch.equal(store.read(on(device, rows)).memory, values[[3, 1, 2, 3]])
    check_waits(device)


@pytest.mark.parametrize("count", range(5))
def test_places_of_a_mask_are_the_same_on_every_device(device, count):
    mask = torch.tensor([False, True, True, False, True])
    expected = [1, 2, 4, -1][:count]
    assert places_of(mask, count).tolist() == expected
    there = places_of(device.of(mask), count)
    check_waits(device)
    assert there.memory.tolist() == expected
