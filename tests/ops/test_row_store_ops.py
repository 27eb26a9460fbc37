"""Initial rows, reads and writes by row: each device follows the plain formulas, to the bit."""

import pytest
import torch
from op_cases import FLOATS
from oracle import EXTREME_IDS
from table_cases import ids_of

from torchrec_dyn import ops

pytestmark = pytest.mark.usefixtures("device")
CPU = torch.ops.torchrec_dyn


def blocks_at(offset, shift, columns, dtype, count=3):
    """Returns blocks whose first elements lie `offset` elements behind a multiple of 64 bytes."""
    elements = columns << shift
    memory = [torch.full((elements + offset,), 7.0, dtype=dtype) for _ in range(count)]
    return [one[offset:].view(1 << shift, columns) for one in memory]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("first", "columns"), [(0, 8), (4, 12), (0, 7), (2, 8), (3, 2), (1, 9)])
def test_initial_rows_are_the_cpus(dtype, first, columns):
    """Also at addresses where four columns are no multiple of their size, and in both parts of the tails."""
    ids, rows = ids_of(*EXTREME_IDS, *range(30)), torch.randperm(64)[: len(EXTREME_IDS) + 30]
    for offset in (0, 1, 2, 4):
        for kind, least in ((0, 0.0), (1, 0.0), (2, 0.0), (2, 1e-300), (2, 1e-14)):
            numbers = [-50.0, 50.0, 0.25, 2.0, least, 2 * least or 1.0]
            one, two = (blocks_at(offset, 5, columns, dtype) for _ in range(2))
            ops.init_rows_(ids, rows, one, 5, columns, first, kind, numbers, 9)
            CPU.init_rows_(ids, rows, two, 5, columns, first, kind, numbers, 9)
            assert torch.equal(torch.stack(one), torch.stack(two))
            assert (torch.cat(one)[rows] != 7).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 8, 20])
def test_rows_are_copied_in_units_that_fit(dtype, columns):
    """The widest unit depends on the bytes of a row and on the addresses of blocks and values."""
    rows = ids_of(11, -1, 0, 5, 5)
    for offset in (0, 1, 2, 4, 8):
        for values_offset in (0, 1, 2):
            blocks = blocks_at(offset, 2, columns, dtype)
            memory = torch.randn(5 * columns + values_offset).to(dtype)
            values = memory[values_offset:].view(5, columns)
            ops.scatter_rows_(ids_of(11, 7, 0, 6, 5), values, blocks, 2, columns)
            expected = torch.full((12, columns), 7.0, dtype=dtype)
            expected[ids_of(11, 7, 0, 6, 5)] = values
            assert torch.equal(torch.cat(blocks), expected)
            got = ops.gather_rows(rows, blocks, 2, columns, dtype)
            assert torch.equal(got, expected[rows] * (rows >= 0)[:, None])


@pytest.mark.parametrize("distinct", [1, 2, 50])
def test_the_last_values_of_a_repeated_row_stay(distinct):
    """Turns that raise the position of one row at the same time."""
    for seed in range(10):
        draw = torch.Generator().manual_seed(seed)
        rows = torch.randint(distinct, (3000,), generator=draw)
        values = torch.arange(6000.0).view(3000, 2)
        block = torch.full((64, 2), -1.0)
        ops.scatter_rows_(rows, values, [block], 6, 2)
        expected = torch.full((64, 2), -1.0)
        for row, value in zip(rows.tolist(), values, strict=True):
            expected[row] = value
        assert torch.equal(block, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_many_rows_are_written_past_the_caches(dtype):
    """512 KiB and more: whole cache lines, lines cut by a row's end, rows across two lines; rows twice."""
    for columns, offset in ((32, 0), (33, 0), (32, 1)):
        count = 2**19 // (columns * dtype.itemsize) + 5
        blocks = blocks_at(offset, 12, columns, dtype, count=5)
        rows = torch.randperm(5 << 12)[:count]
        rows[-3:] = rows[:3]
        values = torch.randn(count, columns).to(dtype)
        ops.scatter_rows_(rows, values, blocks, 12, columns)
        expected = torch.full((5 << 12, columns), 7.0, dtype=dtype)
        expected[rows[3:]] = values[3:]  # with rows[:3], whose last values these are
        assert torch.equal(torch.cat(blocks), expected)


def test_positions_of_rows_that_share_places():
    """Homes are secret; in some of the calls, searches in the 80 places for 40 positions pass their end."""
    for first in range(0, 40 * 100, 40):
        chosen = [*range(first, first + 38), *range(2)]
        rows = ids_of(*chosen)
        block = torch.zeros(4096, 1)
        ops.scatter_rows_(rows, torch.arange(1.0, 41), [block], 12, 1)
        expected = dict(zip(chosen, range(1, 41), strict=True))
        assert block[[*expected], 0].tolist() == [*expected.values()]
        assert int((block != 0).sum()) == len(expected)


def test_the_first_row_outside_is_named():
    blocks = [torch.zeros(4, 3)]
    rows = torch.zeros(5000, dtype=torch.int64)
    rows[1234:] = torch.arange(5000 - 1234) + 100
    with pytest.raises(RuntimeError, match=r"scatter_rows_: expected rows in \[0, 4\), got 100\."):
        ops.scatter_rows_(rows, torch.ones(5000, 3), blocks, 2, 3)
    assert not blocks[0].any()
    rows[17] = -2
    with pytest.raises(RuntimeError, match=r"gather_rows: expected rows in \[-1, 4\), got -2\."):
        ops.gather_rows(rows, blocks, 2, 3, torch.float32)


@pytest.mark.parametrize(
    "ends", [(-0.1, 1.0), (0.5, 0.4), (0.0, 1.5), (float("nan"), 1.0), (0.0, float("nan"))]
)
def test_probabilities_outside_0_and_1_are_refused(ends):
    block = torch.zeros(1, 4)
    numbers = [-1.0, 1.0, 0.0, 1.0, *ends]
    with pytest.raises(
        RuntimeError, match="init_rows_: expected probabilities 0 <= low <= high <= 1"
    ):
        ops.init_rows_(ids_of(1), ids_of(0), [block], 0, 4, 0, 2, numbers, 3)
    assert not block.any()
