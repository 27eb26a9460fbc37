"""Gather and pool, and the gradient of the bag weights: each device gives the CPU's bits."""

import itertools
import random
from functools import partial

import pytest
import torch
from device_ops import is_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_device import MockDevice
from op_cases import FLOATS
from op_samples import tables_in
from table_cases import assert_same, ids_of, random_bags, weights_grad

from torchrec_dyn import ops

CPU = torch.ops.torchrec_dyn


def shifted(tensor, elements):
    """Returns a copy whose memory begins `elements` elements behind a multiple of 64 bytes."""
    memory = torch.empty(tensor.numel() + elements, dtype=tensor.dtype)
    return memory[elements:].view(tensor.shape).copy_(tensor)


def tables_of(widths, dtype, offset, count=3):
    """Returns blocks of 12 rows for each table, `count` a table (1 or 3), and their layout."""
    shift = {1: 4, 3: 2}[count]
    layout = torch.tensor([[count * t, count, shift, width] for t, width in enumerate(widths)])
    rows = 12 // count
    blocks = [shifted(torch.randn(rows, w).to(dtype), offset) for w in widths for _ in range(count)]
    return blocks, layout


def pool_into(out, new_index, rows, offsets, bag_weights, weights, layout, segments, mean):
    """Pools into an output by the op of prepared tables, which have no ids here."""
    tables = {"slots": [rows.new_empty(0, 2)] * len(layout), "weights": weights, "layout": layout}
    handle = ops.prepare_tables(**tables_in(tables))
    ops.pool_prepared_(out, new_index, rows, None, offsets, bag_weights, segments, handle, mean)


def check_call(dtype, offset=0, grad_offset=0, mean=False, weighted=False, count=3):
    """Compares both ops with the CPU: a feature of 9 bags for each table, side by side."""
    widths, output = [8, 16], torch.float32
    blocks, layout = tables_of(widths, dtype, offset, count)
    blocks[0][0, 0], blocks[0][1, 0] = float("inf"), -0.0
    count, width = 9, sum(widths)
    _, offsets = random_bags(len(widths), bags=count * len(widths), longest=9, pool=2)
    rows = torch.randint(-1, 12, (int(offsets[-1]) + 2,))  # two ids in no bag
    places = [sum(widths[:t]) for t in range(len(widths))]
    segments = torch.tensor([[t, count * t, count, places[t], width] for t in range(len(widths))])
    factors = torch.randn(len(rows)) if weighted else None
    given = (rows, offsets, factors, blocks, layout, segments, mean, count * width, output)
    all_bags = CPU.gather_pool(*given)
    assert_same(ops.gather_pool(*given), all_bags)
    fresh = torch.where(torch.rand(len(rows)) < 0.1, rows, -1)
    lists = [fresh[a:b] for a, b in itertools.pairwise(offsets.tolist())]
    has_new = torch.tensor([is_on_cpu() or bool((new >= 0).any()) for new in lists])
    pooled = has_new.view(-1, count).T.repeat_interleave(torch.tensor(widths), 1).flatten()
    for new_index, expected in ((None, all_bags), (fresh, all_bags.where(pooled, 7.0))):
        out = shifted(torch.full_like(all_bags, 7.0), grad_offset)
        pool_into(out, new_index, *given[:-2])
        assert_same(out, expected)
    grad = shifted(torch.randn(count * width), grad_offset)
    given = (grad, rows, offsets, blocks, layout, segments, mean)
    assert_same(weights_grad(ops, *given), weights_grad(CPU, *given))


# Tables of one block without bag weights have a kernel of their own.
blocks_a_table = pytest.mark.parametrize("count", [1, 3])


@pytest.mark.usefixtures("device")
@blocks_a_table
@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_are_the_cpus_at_all_addresses(dtype, count):
    for offset in (1, 2, 4, 8):
        check_call(dtype, offset=offset, weighted=True, count=count)
        check_call(dtype, offset=offset, count=count)
        check_call(dtype, grad_offset=offset, mean=True, count=count)


def gather(library, rows, offsets, factors, blocks, shift, columns):
    """Pools bags of one table."""
    count = len(rows) if offsets is None else len(offsets) - 1
    layout = torch.tensor([[0, len(blocks), shift, columns]])
    segments = torch.tensor([[0, 0, count, 0, columns]])
    size = count * columns
    out = library.gather_pool(
        rows, offsets, factors, blocks, layout, segments, False, size, torch.float32
    )
    return out.view(count, columns)


@pytest.mark.usefixtures("device")
@blocks_a_table
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [3, 32])
def test_absent_rows_at_all_places_of_bags_of_all_lengths(columns, dtype, is_weighted, count):
    """Ids are read four at once. Instead of an absent row the first is read, but not added: it is NaN."""
    [*blocks], layout = tables_of([columns], dtype, 0, count)
    blocks[0][0] = float("nan")
    lists = [
        [-1 if absent >> i & 1 else random.randrange(1, 12) for i in range(length)]
        for length in range(10)
        for absent in range(1 << length)
    ]
    rows = ids_of(*(row for one in lists for row in one))
    offsets = torch.tensor([0, *(len(one) for one in lists)]).cumsum(0)
    factors = torch.randn(len(rows)) if is_weighted else None
    shift = int(layout[0, 2])
    got = gather(ops, rows, offsets, factors, blocks, shift, columns)
    assert not got.isnan().any()
    assert_same(got, gather(CPU, rows, offsets, factors, blocks, shift, columns))
    got = gather(ops, rows, None, factors, blocks, shift, columns)
    assert_same(got, gather(CPU, rows, None, factors, blocks, shift, columns))


@pytest.mark.usefixtures("device")
@blocks_a_table
@pytest.mark.parametrize("row", [12, -2, 2**32, 2**32 + 1, -(2**32), -(2**63), 2**63 - 1])
def test_a_row_outside_is_found_at_all_places_of_a_bag(row, count):
    blocks, layout = tables_of([4], torch.float32, 0, count)
    for length in (1, 2, 4, 7, 8):
        for place in range(length):
            rows = torch.ones(2 * length, dtype=torch.int64)
            rows[length + place] = row
            bags = ids_of(0, length, 2 * length)
            with pytest.raises(RuntimeError, match=r"expected rows in \[-1, 12\), got one outside"):
                gather(ops, rows, bags, None, blocks, int(layout[0, 2]), 4)


@pytest.mark.usefixtures("device")
def test_a_table_without_rows_has_absent_ones():
    got = gather(ops, ids_of(-1, -1, -1), ids_of(0, 1, 3), None, [], 2, 5)
    assert torch.equal(got, torch.zeros(2, 5))
    with pytest.raises(RuntimeError, match=r"expected rows in \[-1, 0\), got one outside"):
        gather(ops, ids_of(-1, 0), ids_of(0, 2), None, [], 2, 5)


@pytest.mark.usefixtures("device")
def test_no_bags_and_one_offset():
    """No thread reads the offset: the host does."""
    blocks, layout = tables_of([4], torch.float32, 0)
    nothing, rows = torch.empty(0, 5, dtype=torch.int64), ids_of(0, 99)
    given = (None, blocks, layout, nothing, False, 0, torch.float32)
    assert ops.gather_pool(rows, ids_of(2), *given).shape == (0,)
    grads = weights_grad(ops, torch.empty(0), rows, ids_of(1), blocks, layout, nothing, False)
    assert grads.tolist() == [0.0, 0.0]
    for wrong in (-1, 3):
        with pytest.raises(RuntimeError, match=rf"inside the ids \[0, 2\], got {wrong} to {wrong}"):
            ops.gather_pool(rows, ids_of(wrong), *given)


def second_of_two(**change):
    """Returns valid arguments of two tables, with 12 and 8 rows, two bags of two ids each."""
    weights = [torch.ones(4, 3) for _ in range(5)]
    return {
        "rows": ids_of(11, 0, -1, 3, 7, 0, -1, 2),
        "offsets": ids_of(0, 2, 4, 6, 8),
        "weights": weights,
        "layout": torch.tensor([[0, 3, 2, 3], [3, 2, 2, 3]]),
        "segments": torch.tensor([[0, 0, 2, 0, 6], [1, 2, 2, 3, 6], [0, 4, 0, 0, 3]]),
        "mean": False,
    } | change


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"rows": ids_of(11, 0, -1, 3, 8, 0, 90, 2)}, r"rows in \[-1, 8\), got one outside"),
        ({"rows": ids_of(11, 0, -1, 12, 8, 0, -9, 2)}, r"rows in \[-1, 12\), got one outside"),
        ({"rows": ids_of(11, 0, -1, 3, 7, 0, -1, -(2**63))}, r"rows in \[-1, 8\)"),
        ({"rows": ids_of(2**63 - 1, 0, -1, 3, 7, 0, -1, 0)}, r"rows in \[-1, 12\)"),
        ({"offsets": ids_of(0, 2, 2**62, 6, 8)}, "ascending offsets, got 4611686018427387904 before 6"),
        ({"offsets": ids_of(0, 2, -5, 6, 8)}, "ascending offsets, got 2 before -5"),
        ({"offsets": ids_of(0, 2, 4, 6, 9)}, r"offsets inside the ids \[0, 8\], got 0 to 9"),
        ({"offsets": ids_of(-3, 9, 4, 6, 8)}, r"offsets inside the ids \[0, 8\], got -3 to 8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("op", ["gather_pool", "weights_grad_prepared"])
def test_the_first_fault_is_named(op, change, rule):
    """Of two faults the error names the first, with the capacity of its own table."""
    more = {"gather_pool": {"bag_weights": None, "elements": 12, "dtype": torch.float32}}
    own = more.get(op, {"grad": torch.ones(12)})
    call = ops.gather_pool if op in more else partial(weights_grad, ops)
    call(**second_of_two(), **own)
    with pytest.raises(RuntimeError, match=f"{op}: expected {rule}"):
        call(**second_of_two(**change), **own)


wild = st.sampled_from([-(2**63), -2, -1, 0, 1, 4, 5, 8, 9, 12, 2**32, 2**62, 2**63 - 1])


@pytest.mark.usefixtures("device")
@settings(max_examples=60)
@given(offsets=st.lists(wild, min_size=5, max_size=5), rows=st.lists(wild, min_size=8, max_size=8))
def test_wild_offsets_and_rows_raise_the_cpus_error(offsets, rows):
    given = second_of_two(rows=ids_of(*rows), offsets=ids_of(*offsets))
    own = {"bag_weights": None, "elements": 12, "dtype": torch.float32}

    def outcome(call, more):
        try:
            return call(**given, **more).tolist()
        except RuntimeError as error:
            return str(error).split("\n")[0]

    assert outcome(ops.gather_pool, own) == outcome(CPU.gather_pool, own)
    grad = {"grad": torch.ones(12)}
    here, there = (partial(weights_grad, library) for library in (CPU, ops))
    assert outcome(there, grad) == outcome(here, grad)


@pytest.mark.usefixtures("device")
def test_bags_of_new_ids_are_pooled_into_an_output():
    """An id that is new makes its bag new, whatever its number. On a GPU the outputs of other bags stay."""
    given = second_of_two() | {"bag_weights": None}
    alone = ops.gather_pool(**given, elements=12, dtype=torch.float32)
    for new in range(8):
        out, new_index = torch.full((12,), 5.0), torch.full((8,), -1)
        new_index[new] = 2**40 * (new % 2)
        pool_into(out=out, new_index=new_index, **given)
        first = [0, 6, 3, 9][new // 2]  # of the output of bag new // 2
        expected = torch.full((12,), 5.0)
        expected[first : first + 3] = alone[first : first + 3]
        assert torch.equal(out, alone if is_on_cpu() else expected), new
    given |= {"rows": ids_of(), "offsets": ids_of(0, 0, 0, 0, 0)}
    for new_index, number in ((ids_of(), 0.0 if is_on_cpu() else 5.0), (None, 0.0)):
        pool_into(out=out.fill_(5.0), new_index=new_index, **given)
        assert (out == number).all()


OFFSETS = [(0, 2, 2**62, 6, 8), (0, 2, -5, 6, 8), (0, 2, 4, 6, 9), (-3, 9, 4, 6, 8)]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("offsets", OFFSETS)
def test_offsets_that_the_caller_checks_are_not_reported_by_a_gpu(device, offsets):
    """Their bags count as empty. A row outside its table is reported if the offsets are right."""
    own = {"out": torch.zeros(12), "new_index": None, "bag_weights": None}
    wrong = second_of_two(rows=ids_of(11, 0, -1, 3, 8, 0, 90, 2))
    with pytest.raises(RuntimeError, match=r"pool_prepared_: expected rows in \[-1, 8\)"):
        pool_into(**wrong, **own)
    wrong["offsets"] = ids_of(*offsets)
    if device == "cpu":
        with pytest.raises(
            RuntimeError, match=r"pool_prepared_: expected (ascending offsets|offsets in)"
        ):
            pool_into(**wrong, **own)
    else:
        pool_into(**wrong, **own)


def test_where_the_host_waits_for_pooling():
    """Nowhere: errors wait for the next read (test_device_errors.py)."""
    with MockDevice() as device:
        given = second_of_two()
        for name in ("rows", "offsets"):
            given[name] = device.of(given[name])
        given["weights"] = [device.of(block) for block in given["weights"]]
        own = {"bag_weights": None, "elements": 12, "dtype": torch.float32}
        out = ops.gather_pool(**given, **own)
        weights_grad(ops, grad=out, **given)
        pool_into(out=out, new_index=None, bag_weights=None, **given)
        assert device.reads == []
        assert device.mixed == [] and device.without_kernel == []
