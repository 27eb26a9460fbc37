"""Ops for checkpoints, against plain Python: content sums, and ids in canonical order."""

import itertools

import numpy as np
import pytest
import torch
from device_ops import CPU
from hypothesis import given
from hypothesis import strategies as st
from mock_device import MockDevice
from oracle import EXTREME_IDS, WORD, canonical_order, mix64, signed, unmix64, unmixed
from raw_maps import a_map
from table_cases import hard_ids, ids_of

from torchrec_dyn import ops

HARDEST_IDS = [*EXTREME_IDS, *(unmix64(word) for word in (0, 1, 2**63, WORD - 2, WORD - 1))]
some_ids = hard_ids | st.sampled_from(HARDEST_IDS)
words = st.sampled_from([0, 1, 2**63 - 1, 2**63, WORD - 1]) | st.integers(0, WORD - 1)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64]
UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint32}


def bit_columns(values):
    """Returns the bits of the numbers, [M, D]; of int64 the low and the high half, [M, 2D]."""
    size = values.element_size()
    numbers = values.flatten().view(torch.uint8).numpy().view(UNSIGNED[size])
    return numbers.reshape(len(values), max(1, size // 4) * values.shape[1]).tolist()


def summed(ids, values, first_column, key):
    """Returns the content sum by the formula of csrc/storage/content_sum.h, in Python's integers."""
    first = first_column * (2 if values.dtype == torch.int64 else 1)
    total = 0
    for number, columns in zip(ids.tolist(), bit_columns(values), strict=True):
        row_key = mix64((number ^ key) % WORD) | 1
        total += row_key * sum(
            bits * (mix64(key + first + c + 1) >> 32 | 1) for c, bits in enumerate(columns)
        )
    return signed(total % WORD)


def random_values(rows, columns, dtype, seed=0):
    """Returns numbers of random bits, among them NaNs, infinities, -0.0 and subnormal numbers."""
    size = torch.empty(0, dtype=dtype).element_size()
    draw = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows * columns * size,), generator=draw, dtype=torch.uint8)
    return raw.view(dtype).reshape(rows, columns)


def random_ids(count, seed=0):
    ids = torch.randint(
        -(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed)
    )
    hardest = ids_of(*HARDEST_IDS)[:count]
    ids[: len(hardest)] = hardest
    return ids


@pytest.mark.everyday(96)
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [0, 1, 2, 3, 4, 5, 16, 33, 100])
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_the_content_sum_is_the_formula(rows, columns, dtype):
    ids, values = random_ids(rows), random_values(rows, columns, dtype, rows + columns)
    for first_column, key in [(0, 0), (5, -1), (2**31 - 1, 2**63 - 1), (1, -(2**63))]:
        found = ops.content_sum(ids, values, first_column, key)
        assert found.shape == () and found.dtype == torch.int64
        assert found.item() == summed(ids, values, first_column, key)


@pytest.mark.usefixtures("device")
def test_the_content_sum_is_pinned():
    """Saved tables have content sums, so the formula must not change."""
    values = torch.tensor([[1.0, -0.0, float("nan")], [3.0, 4.5, -1e-40]])
    ids = ids_of(-1, 2**63 - 1)
    assert ops.content_sum(ids, values, 0, 7).item() == PINNED[0]
    assert ops.content_sum(ids, values.bfloat16(), 2, 7).item() == PINNED[1]
    assert ops.content_sum(ids, ids.view(2, 1), 0, -7).item() == PINNED[2]


PINNED = [9077391385525461398, 458308185774751996, -6951060773069009852]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(5, 4999), (700, 37), (513, 2)])
def test_the_sums_of_parts_add_up(rows, columns, dtype):
    """Any cut of the columns or rows, also with more columns than the op has precomputed keys for."""
    ids, values = random_ids(rows), random_values(rows, columns, dtype)
    whole = ops.content_sum(ids, values, 10, 99)
    assert whole.item() == summed(ids, values, 10, 99)
    for cut in {1, columns // 3, columns - 1}:
        left, right = values[:, :cut].contiguous(), values[:, cut:].contiguous()
        parts = ops.content_sum(ids, left, 10, 99) + ops.content_sum(ids, right, 10 + cut, 99)
        assert torch.equal(parts, whole)
    order = torch.randperm(rows)
    for cut in (1, rows // 2, rows - 1):
        pieces = [order[:cut], order[cut:]]
        parts = sum(ops.content_sum(ids[piece], values[piece], 10, 99) for piece in pieces)
        assert torch.equal(parts, whole)


@pytest.mark.everyday(4)
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_changes_the_sum(dtype):
    values = random_values(4, 5, dtype)
    ids, seen = random_ids(4), set()
    raw = values.view(torch.uint8).flatten()
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        seen.add(ops.content_sum(ids, values, 0, 3).item())
        raw[bit // 8] ^= 1 << bit % 8
    assert len(seen | {ops.content_sum(ids, values, 0, 3).item()}) == 8 * len(raw) + 1
    swapped = ids[[1, 0, 2, 3]]
    assert ops.content_sum(swapped, values, 0, 3) != ops.content_sum(ids, values, 0, 3)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(300_000, 1), (40_000, 40), (2, 600_001)])
def test_content_sums_are_the_cpus_at_all_addresses(rows, columns, dtype):
    """More rows, and more columns, than a launch has threads; memory at multiples of 16 bytes and of less."""
    ids, memory = random_ids(rows), random_values(1, rows * columns + 4, dtype)[0]
    for first in (0, 1, 2, 4):
        given = (ids, memory[first : first + rows * columns].view(rows, columns), 3, 9)
        assert torch.equal(ops.content_sum(*given), CPU.content_sum(*given))


def test_not_a_number_and_minus_zero_are_their_bits():
    zero, minus = torch.zeros(1, 1), -torch.zeros(1, 1)
    assert ops.content_sum(ids_of(1), zero, 0, 1) != ops.content_sum(ids_of(1), minus, 0, 1)
    nan = torch.full((1, 1), float("nan"))
    assert ops.content_sum(ids_of(1), nan, 0, 1) == ops.content_sum(ids_of(1), nan.clone(), 0, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 40])
def test_content_sums_are_equal_on_any_number_of_threads(threads, columns, dtype):
    ids, values = random_ids(40_000), random_values(40_000, columns, dtype)
    sums = set()
    for number in (1, 2, 3, 4):
        threads(number)
        sums.add(ops.content_sum(ids, values, 1, 5).item())
    assert len(sums) == 1


@pytest.mark.usefixtures("device")
@given(
    ids=st.lists(some_ids, max_size=200, unique=True),
    is_growing=st.booleans(),
    bits=st.integers(0, 16),
)
def test_every_id_is_in_its_cell(ids, is_growing, bits):
    slots, moved = a_map(ids or ids_of(), torch.arange(len(ids)), is_growing)
    counts = ops.count_cells(slots, moved, bits)
    expected = torch.zeros(1 << bits, dtype=torch.int64)
    for number in ids:
        expected[mix64(number) >> (64 - bits)] += 1
    assert torch.equal(counts, expected)


@pytest.mark.usefixtures("device")
@given(
    ids=st.lists(some_ids, max_size=200, unique=True),
    is_growing=st.booleans(),
    ends=st.tuples(words, words),
)
def test_ids_of_a_range_come_in_canonical_order(ids, is_growing, ends):
    slots, moved = a_map(ids or ids_of(), torch.arange(len(ids)) + 3, is_growing)
    row_of = dict(zip(ids, itertools.count(3)))
    held = [mix64(number) for number in ids]
    for first, last in [ends, (0, WORD - 1), (min(held, default=0), max(held, default=0))]:
        found, rows = ops.ids_between(slots, moved, signed(first), signed(last))
        assert found.tolist() == canonical_order([i for i in ids if first <= mix64(i) <= last])
        assert rows.tolist() == [row_of[number] for number in found.tolist()]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("is_growing", [False, True])
def test_the_ends_of_a_range_are_included(is_growing):
    ids = [unmix64(word) for word in (0, 1, 2**63 - 1, 2**63, WORD - 2, WORD - 1)]
    slots, moved = a_map(ids, torch.arange(6), is_growing)
    for a, b in itertools.product(range(6), range(6)):
        ends = [signed(mix64(ids[a])), signed(mix64(ids[b]))]
        found, rows = ops.ids_between(slots, moved, *ends)
        assert found.tolist() == ids[a : b + 1] and rows.tolist() == list(range(a, b + 1))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("count", [0, 1, 3000, 20_000])
def test_used_slots_are_listed_in_their_order(count):
    """Fewer and more slots than the op reads at once."""
    draw = torch.Generator().manual_seed(count)
    slots = torch.randint(-(2**63), 2**63 - 1, (4 * count, 2), generator=draw)
    slots[torch.rand(4 * count, generator=draw) < 0.4, 1] = 0
    used = slots[slots[:, 1] != 0]
    ids, rows = ops.used_slots(slots)
    assert torch.equal(ids, used[:, 0]) and torch.equal(rows, used[:, 1] - 1)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("is_growing", [False, True])
def test_ids_are_listed_by_row(threads, is_growing):
    """More slots than a thread reads at once; a third of the rows has no id."""
    ids, rows = random_ids(100_000), torch.randperm(150_000)[:100_000]
    slots, moved = a_map(ids, rows, is_growing)
    expected, is_used = torch.zeros(150_000, dtype=torch.int64), torch.zeros(150_000, dtype=bool)
    expected[rows], is_used[rows] = ids, True
    for number, first in itertools.product((1, 3), (0, 999)):
        threads(number)
        found, has_id = ops.ids_of_rows(slots, moved, first, 149_000)
        assert torch.equal(found, expected[first:149_000])
        assert torch.equal(has_id, is_used[first:149_000])


@pytest.mark.usefixtures("device")
def test_an_empty_map_has_no_ids():
    for slots in (torch.empty(0, 2, dtype=torch.int64), torch.zeros(64, 2, dtype=torch.int64)):
        assert [part.numel() for part in ops.used_slots(slots)] == [0, 0]
        assert ops.count_cells([slots], ids_of(-1), 2).tolist() == [0, 0, 0, 0]
        assert ops.ids_of_rows([slots], ids_of(-1), 5, 7)[1].tolist() == [False, False]
        for part in ops.ids_between([slots], ids_of(-1), 0, -1):
            assert part.shape == (0,) and part.dtype == torch.int64


# Mixed ids that fill their range, that are in a few clusters, and that differ only in their low bits.
SPREADS = {
    "even": lambda draw, count: torch.randint(-(2**63), 2**63 - 1, (count,), generator=draw),
    "clusters": lambda draw, count: (
        (torch.randint(0, 3, (count,), generator=draw) << 62)
        + torch.randint(0, 1 << 40, (count,), generator=draw)
    ),
    "a heap and one far away": lambda draw, count: torch.cat([torch.arange(count - 1), ids_of(-1)]),
    "neighbours": lambda draw, count: torch.arange(count) - count // 2,
}


@pytest.mark.parametrize("is_growing", [False, True])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("count", [63, 64, 5000, 150_000])
def test_many_ids_are_sorted_exactly_on_any_number_of_threads(
    device, threads, count, spread, is_growing
):
    """More than one bucket, and buckets whose mixed ids are equal in all bits that the sort uses."""
    mixed = SPREADS[spread](torch.Generator().manual_seed(0), count).unique()
    ids = unmixed(mixed)[torch.randperm(len(mixed))]
    flipped = (ops.mix64(ids) ^ -(2**63)).sort()
    expected = ids[flipped.indices]
    slots, moved = a_map(ids, torch.arange(len(ids)), is_growing)
    middle = expected[len(ids) // 3], expected[len(ids) // 2]
    cells = torch.bincount(ops.mix64(ids) >> 48 & 0xFFFF, minlength=1 << 16)
    for number in (1, 2, 3) if device == "cpu" else (1,):
        threads(number)
        found, rows = ops.ids_between(slots, moved, 0, -1)
        assert torch.equal(found, expected) and torch.equal(rows, flipped.indices)
        some, _ = ops.ids_between(slots, moved, *(ops.mix64(end.view(1)).item() for end in middle))
        assert torch.equal(some, expected[len(ids) // 3 : len(ids) // 2 + 1])
        assert torch.equal(ops.count_cells(slots, moved, 16), cells)


@pytest.mark.mock_only
def test_the_host_waits_for_the_size_of_a_range_only():
    slots, moved = a_map(random_ids(100), torch.arange(100))
    values = random_values(100, 4, torch.float32)
    with MockDevice() as device:
        slots = [device.of(one) for one in slots]
        cells = ops.count_cells(slots, moved, 2)
        summed = ops.content_sum(device.of(random_ids(100)), device.of(values), 0, 0)
        assert device.reads == []
        ids, rows = ops.ids_between(slots, moved, 0, -1)
        assert [note.op for note in device.reads] == ["ids_between"]
        made = (cells, summed, ids, rows)
        assert device.mixed == [] and all(one.is_cuda for one in made)
        assert device.without_kernel == []
