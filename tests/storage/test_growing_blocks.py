"""Blocks in ranges of addresses grow in place; memory follows the rows; without memory nothing changes."""

import copy
import ctypes
import os
import pickle
import re
import resource
import sys
from pathlib import Path

import pytest
import torch
from another_process import call
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_device import CUDA, MockDevice
from score_blocks import read_rows, write_rows
from table_cases import ids_of
from workers import WorkerError

from torchrec_dyn import knobs, ops
from torchrec_dyn.storage import RowStore, block_shift

CPU = torch.device("cpu")
MIB = 1 << 20
plain_linux = pytest.mark.skipif(
    sys.platform != "linux" or "LD_PRELOAD" in os.environ,
    reason="reads /proc; a sanitizer has memory of its own",
)


@pytest.fixture
def ranges(monkeypatch):
    """Stores of the CPU use ranges, and small pages, as long as the test runs."""
    set_ranges(monkeypatch.setattr)


def set_ranges(setattr_, page=4096):
    setattr_(knobs, "RANGE_DEVICES", {"cpu"})
    setattr_(knobs, "PAGE_BYTES", page)


def filled(store, rows):
    """Reserves `rows` rows and writes the row number to each; returns the store."""
    store.reserve(rows)
    store.write(torch.arange(rows), numbers(rows, store.columns))
    return store


def numbers(rows, columns):
    return torch.arange(float(rows))[:, None].expand(rows, columns)


def holds(store, rows):
    return torch.equal(store.read(torch.arange(rows)), numbers(rows, store.columns))


# The op


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_block_keeps_its_rows(dtype, on_host):
    block = torch.arange(6).view(2, 3).to(dtype)
    longer = ops.grow_block(block, 700, 5000, on_host)
    assert longer.shape == (700, 3) and longer.dtype == dtype
    assert torch.equal(longer[:2], block)
    longer[699] = 1
    assert torch.equal(ops.grow_block(longer, 5000, 5000, on_host)[:700], longer)


@pytest.mark.parametrize("device", ["cpu", "simt"], indirect=True)
def test_a_block_grows_in_place(device):
    first = ops.grow_block(torch.empty(0, 8), 1, 1 << 20)
    first.fill_(3.0)
    address = first.data_ptr()
    for rows in (2, 2, 1000, 1 << 20):
        block = ops.grow_block(first, rows, 1 << 20)
        assert block.data_ptr() == address
        block[-1] = 4.0
    assert first[0, 0] == 3.0
    del first  # the memory stays, as long as one block uses it
    assert block[0, 0] == 3.0 and block[999, 7] == 4.0
    assert ops.grow_block(block[:5], 6, 1 << 20).data_ptr() == address
    moved = ops.grow_block(block, 1 << 20, 1 << 21), ops.grow_block(block[1:], 1 << 20, 1 << 20)
    assert moved[0].data_ptr() == address, "the range suffices, whatever the limit"
    assert moved[1].data_ptr() != address and moved[1][998, 7] == 4.0
    assert ops.grow_block(block, (1 << 20) + 1, 1 << 21).data_ptr() != address


def memory_left():
    """Bytes that the GPU has left, without what torch keeps for later."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.needs_cuda
def test_a_block_of_a_gpu_grows_in_place():
    torch.ones(9, 64, device="cuda").fill_(3.0).sum(dtype=torch.float64).item()  # loads kernels
    free = memory_left()
    block = ops.grow_block(torch.empty(0, 64, device="cuda"), 1000, 1 << 30)  # 256 GiB of addresses
    address = block.data_ptr()
    block.fill_(3.0)
    block = ops.grow_block(block, 1 << 20, 1 << 30)
    block[1000:] = 4.0
    assert block.data_ptr() == address and block.sum(dtype=torch.float64) == 64 * ((1 << 22) - 1000)
    assert 256 * MIB <= free - memory_left() <= 300 * MIB
    with pytest.raises(MemoryError, match="grow_block: expected memory for this call, got none"):
        ops.grow_block(block, 1 << 30, 1 << 30)
    assert block[-1, 0] == 4.0
    del block
    assert free - memory_left() <= 40 * MIB


def pages_resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def resident_memory():
    """Returns resident bytes: with a range of 1 TiB, with 64 MiB of it written, and when it is dropped."""
    ops.grow_block(torch.empty(0, 256), 1, 1).fill_(1.0)  # loads code
    before = pages_resident()
    block = ops.grow_block(torch.empty(0, 256), 1, 1 << 30)
    reserved = pages_resident() - before
    block = ops.grow_block(block, 1 << 16, 1 << 30)
    block.fill_(1.0)
    written = pages_resident() - before
    del block
    return reserved, written, pages_resident() - before


@plain_linux
def test_memory_follows_the_rows_and_is_given_back():
    reserved, written, dropped = call(resident_memory)
    assert reserved < 4 * MIB and 64 * MIB <= written < 70 * MIB and dropped < 4 * MIB


def read_behind(rows):
    block = ops.grow_block(torch.empty(0, 1024), rows, 1 << 20)  # a row is a page
    return ctypes.string_at(block.data_ptr() + block.nbytes - 1 + (rows == 1), 1)


@plain_linux
def test_what_is_not_committed_cannot_be_read():
    assert call(read_behind, 2) == b"\0"
    with pytest.raises(WorkerError, match="the process died"):
        call(read_behind, 1)


# Stores


@pytest.mark.usefixtures("ranges")
def test_a_store_has_one_block_that_grows_in_place():
    store = RowStore(3, block_shift(100_000, 12), torch.float32, CPU)
    assert store.capacity == 0 and store.read(ids_of(-1)).tolist() == [[0.0] * 3]
    addresses, sizes = set(), set()
    for rows in range(1, 100_000, 1111):
        filled(store, rows)
        assert rows <= store.capacity <= rows + rows // 8 + 4096
        addresses.add(store.blocks[0].data_ptr())
        sizes.add(store.capacity)
    assert len(store.blocks) == len(addresses) == 1 and holds(store, 98_880)
    assert len(sizes) < 40, "growth is rare"
    with pytest.raises(RuntimeError, match="rows in"):  # what is not committed is no row
        store.read(ids_of(store.capacity))


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    st.sampled_from(
        [(3, torch.float32), (1, torch.int64), (700, torch.float16), (64, torch.float32)]
    ),
    st.sampled_from([1 << 12, 1 << 16, 1 << 20]),
)
def test_stores_beyond_one_range(added, kind, largest):
    """A load may bring more rows than the limit, and a range has an upper bound: both need more blocks."""
    columns, dtype = kind
    words = dtype == torch.int64
    with pytest.MonkeyPatch.context() as patch:
        set_ranges(patch.setattr)
        patch.setattr(knobs, "RANGE_BYTES", largest)
        shift = block_shift(1000, columns * dtype.itemsize)
        store, rows, places = RowStore(columns, shift, dtype, CPU), 0, {}
        for more in added:
            before, rows = rows, rows + more
            store.reserve(rows)
            assert rows <= store.capacity <= len(store.blocks) << shift
            new = torch.arange(before, rows)
            if words:
                write_rows(store.blocks, shift, new, new, new)
            else:
                store.write(new, (new % 1000)[:, None].expand(more, columns))
            for place, block in enumerate(store.blocks):
                assert places.setdefault(place, block.data_ptr()) == block.data_ptr()
        known = torch.arange(rows)
        if words:
            assert torch.equal(read_rows(store.blocks, shift, known)[1], known)
        else:
            assert torch.equal(store.read(known)[:, 0], (known % 1000).to(dtype))


def limited_store():
    """Returns (error, what has changed) of a store that gets no memory, and its rows with memory again."""
    set_ranges(setattr, 2 << 20)
    store = filled(RowStore(64, 20, torch.float32, CPU), 40_000)  # 10 MiB
    address, capacity, before = store.blocks[0].data_ptr(), store.capacity, resource.RLIMIT_DATA
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(before)
    resource.setrlimit(before, (used + 30 * MIB, hard))
    error = ""
    try:
        store.reserve(300_000)
    except MemoryError as raised:
        error = str(raised)
    same = (
        store.capacity == capacity
        and store.blocks[0].data_ptr() == address
        and holds(store, 40_000)
    )
    resource.setrlimit(before, (soft, hard))
    filled(store, 300_000)
    return error, same, store.blocks[0].data_ptr() == address and holds(store, 300_000)


@plain_linux
def test_without_memory_a_store_stays_as_it_was():
    error, same, grown = call(limited_store)
    missing = (
        r"RowStore: expected \d+ more bytes of memory on cpu, got none; no row has changed\. Free"
    )
    assert re.match(missing, error) and same and grown


def limited_host_memory():
    """Returns (error, whether nothing has changed) of a store in host memory that gets no block."""
    with MockDevice():
        store = RowStore(64, 12, torch.float32, CUDA, on_host=True)  # blocks of 1 MiB
        store.reserve(9000)
        addresses = [block.data_ptr() for block in store.blocks]
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + 5 * MIB, limits[1]))
        error = ""
        try:
            store.reserve(400_000)
        except MemoryError as raised:
            error = str(raised)
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        kept = [block.data_ptr() for block in store.blocks][: len(addresses)]
        store.reserve(400_000)
        return error, kept == addresses and store.blocks[0].data_ptr() == addresses[0]


@plain_linux
@pytest.mark.simt
def test_without_host_memory_blocks_stay_where_they_are():
    error, same = call(limited_host_memory)
    assert error == (
        "RowStore: expected 1048576 more bytes of host memory for cuda:0, got none; no row has "
        "changed. Free memory, let the process lock more memory, or use smaller tables."
    )
    assert same


class ScarceMemory:
    """Memory for a number of rows of one page; torch keeps some more until its cache is emptied."""

    def __init__(self, monkeypatch, rows, kept=0):
        self.rows, self.kept, self.calls, self.emptied = rows, kept, [], 0
        self._grow = ops.grow_block
        monkeypatch.setattr(ops, "grow_block", self.grow_block)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)

    def grow_block(self, block, rows, limit):
        self.calls.append(rows)
        if rows > self.rows:
            raise MemoryError("grow_block: expected memory")
        return self._grow(block, rows, limit)

    def empty_cache(self):
        self.emptied += 1
        self.rows, self.kept = self.rows + self.kept, 0


@pytest.fixture
def page_store(ranges):
    return RowStore(1024, 10, torch.float32, CPU)  # a row is a page


def test_without_memory_for_more_the_rows_alone_are_asked_for(page_store, monkeypatch):
    memory = ScarceMemory(monkeypatch, rows=112, kept=10)
    for rows in (1, 100, 101, 112):
        page_store.reserve(rows)
    assert memory.calls == [1, 100, 113, 101, 114, 112] and memory.emptied == 0
    page_store.reserve(113)
    assert page_store.capacity == 113 and memory.emptied == 1
    with pytest.raises(MemoryError, match="RowStore: expected 40960 more bytes of memory on cpu"):
        page_store.reserve(123)
    assert page_store.capacity == 113


@pytest.mark.usefixtures("ranges")
def test_copies_of_a_store_are_stores_of_their_own():
    store = filled(RowStore(5, 12, torch.float32, CPU), 300)
    copies = copy.deepcopy(store), pickle.loads(pickle.dumps(store))
    store.fill(torch.arange(300), 0.0)
    for one in copies:
        assert holds(one, 300)
        assert holds(filled(one, 3000), 3000)
        assert one.blocks[0].data_ptr() != store.blocks[0].data_ptr()
    assert store.capacity < 3000 and not store.read(torch.arange(300)).any()


@pytest.mark.usefixtures("ranges")
def test_ranges_of_rows(monkeypatch):
    store = filled(
        RowStore(40, 8, torch.float32, CPU), 600
    )  # blocks of 256 rows, the last of fewer
    assert len(store.blocks) == 3 and 600 < store.capacity < 768
    assert torch.equal(store.within(513, 1, (80, 2)), numbers(600, 2)[513:593])
    assert store.within(500, 0, (20, 1)) is None
    store.put(250, 3, torch.zeros(300, 2))
    assert not store.read(torch.arange(250, 550))[:, 3:5].any()
    store.put(250, 3, numbers(600, 2)[250:550])
    assert holds(store, 600)
    grow = ops.grow_block  # the memory of a GPU may hold any numbers
    monkeypatch.setattr(ops, "grow_block", lambda *args: grow(*args).fill_(3.0))
    zeros = RowStore(40, 8, torch.float32, CPU)
    zeros.reserve_zeros(600)
    assert zeros.capacity >= 600 and not zeros.read(torch.arange(600)).any()


class RowsOfAGpu:
    """Stands for a tensor of one of two GPUs; notes its copies."""

    def __init__(self, log, device, shape=(3, 4)):
        self.log, self.device, self.shape = log, torch.device(device), shape

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, part):
        return self

    def data_ptr(self):
        return 64

    def clone(self):
        self.log.append(f"clone on {self.device}")
        return self

    def to(self, device):
        self.log.append(f"{self.device} to {device}")
        return RowsOfAGpu(self.log, device)

    def copy_(self, rows):
        self.log.append(f"{rows.device} into the range")


@pytest.mark.parametrize("source", ["cpu", "cuda:0", "cuda:1"])
def test_rows_of_another_gpu_reach_a_range_from_the_memory_of_its_gpu(source):
    log = []
    store = RowStore(4, 4, torch.float32, torch.device("cuda:0"))
    store.blocks = [RowsOfAGpu(log, "cuda:0")]
    values = RowsOfAGpu(log, source)
    values.data_ptr = lambda: 128
    store.put(0, 0, values)
    moved = ["clone on cuda:1", "cuda:1 to cuda:0"] if source == "cuda:1" else []
    assert log == [*moved, f"{'cuda:0' if moved else source} into the range"]
