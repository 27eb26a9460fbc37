"""Updates by tiles of a GPU: widths of rows, places in memory and numbers of rows choose among kernels.

Each kernel must give the CPU's bits.
"""

import mmap

import pytest
import torch
from fuzz_ops import copies
from op_cases import FLOATS
from table_cases import bits, ids_of
from update_cases import WRITTEN, drawn_update
from update_rules import hyper_of

from torchrec_dyn import ops

CPU = torch.ops.torchrec_dyn
ROWWISE_ADAGRAD, ADAM, PARTIAL_ROWWISE_ADAM, FTRL, LAMB, PARTIAL_ROWWISE_LAMB = range(2, 8)
# Of tiles, of units, of slices.
EDGES = (63, 64, 65, 124, 127, 128, 129, 132, 192, 252, 255, 256, 257, 260, 384, 388)


def assert_bits_are_the_cpus(given):
    expected = copies(given)
    CPU.update_rows_.default(**expected)
    ops.update_rows_(**given)
    for name in WRITTEN:
        for got, want in zip(given[name], expected[name], strict=True):
            assert torch.equal(bits(got), bits(want)), name


def drawn_common_update(seed, optimizer, dtype, widths, ids):
    """Rules that limit norms, as drawn_update may draw, have one kernel for rows of all widths."""
    given = drawn_update(seed, optimizer, dtype, widths, ids)
    decay = {"weight_decay": 0.01 * (seed % 2), "weight_decay_mode": seed % 3}
    return given | {"hyper": hyper_of(optimizer, **decay, l1=0.1, l2=0.01)}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("columns", [*range(1, 34), *EDGES])
def test_rows_of_each_width(columns):
    for drawn in (drawn_common_update, drawn_update):
        assert_bits_are_the_cpus(drawn(columns, ROWWISE_ADAGRAD, torch.float32, [columns], ids=120))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "widths", [[16], [32, 4], [64, 20, 8], [128], [132, 192, 252], [256, 16], [260, 16]]
)
@pytest.mark.parametrize(
    "optimizer",
    [ROWWISE_ADAGRAD, ADAM, PARTIAL_ROWWISE_ADAM, FTRL, LAMB, PARTIAL_ROWWISE_LAMB],
)
def test_each_tile_has_each_rule_and_pieces(optimizer, widths, dtype):
    """Two rows of a table have a fifth of its ids each: two pieces."""
    assert_bits_are_the_cpus(drawn_common_update(7, optimizer, dtype, widths, ids=1600))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("columns", [64, 252])
def test_a_row_of_more_pieces_than_lanes(columns):
    """Two rows of 4,800 ids each: 18 pieces behind the first, for 8 and 16 lanes."""
    assert_bits_are_the_cpus(
        drawn_common_update(1, ROWWISE_ADAGRAD, torch.float32, [columns], ids=24_000)
    )


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("tables", [3, 4, 5, 16, 17, 40])
def test_many_tables(tables):
    """As many tables as lanes of a tile, and more: a row must find its own."""
    assert_bits_are_the_cpus(
        drawn_update(tables, ROWWISE_ADAGRAD, torch.float32, [4] * tables, ids=30)
    )


def moved(tensor, past):
    """Returns a copy that begins `past` elements behind a place that torch chooses."""
    memory = torch.empty(tensor.numel() + past, dtype=tensor.dtype)
    memory[past:] = tensor.flatten()
    return memory[past:].view(tensor.shape)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("past", [1, 2, 3])
@pytest.mark.parametrize("name", ["grad", "weights", "states"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_memory_that_begins_anywhere(dtype, name, past):
    """A GPU reads 16 bytes from multiples of 16 only."""
    given = drawn_update(5, ADAM, dtype, [16], ids=60)
    whole = given[name]
    given[name] = moved(whole, past) if name == "grad" else [moved(one, past) for one in whole]
    expected = copies(given)
    CPU.update_rows_.default(**expected)
    ops.update_rows_(**given)  # in its place: copies begin where torch chooses
    for written in WRITTEN:
        for got, want in zip(given[written], expected[written], strict=True):
            assert torch.equal(bits(got), bits(want)), written


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("rows_in_a_block", [8, 64])
def test_tables_of_one_block_and_of_several(rows_in_a_block):
    given = drawn_update(3, PARTIAL_ROWWISE_ADAM, torch.float32, [20, 12], ids=200)
    if rows_in_a_block > 40:  # one block that grows in place
        for name, tables in (("weights", 2), ("states", 4)):
            given[name] = [torch.cat(given[name][5 * t : 5 * t + 5]) for t in range(tables)]
        given["layout"] = torch.tensor([[0, 1, 6, 20], [1, 1, 6, 12]])
    assert_bits_are_the_cpus(given)


@pytest.mark.usefixtures("device")
def test_ids_without_tables():
    """All ids lie outside of the bags; there is no first table to look at."""
    given = {name: [] for name in (*WRITTEN, "grad_scales")}
    ops.update_rows_(
        **given,
        grad=torch.zeros(0),
        ids=torch.arange(5),
        rows=torch.arange(5),
        offsets=ids_of(0),
        bag_weights=None,
        layout=ids_of().view(0, 4),
        segments=ids_of().view(0, 5),
        streams=ids_of().view(0, 3),
        mean=False,
        optimizer=ROWWISE_ADAGRAD,
        hyper=hyper_of(ROWWISE_ADAGRAD),
        senders=torch.zeros(5, dtype=torch.int32),
        mark_layout=None,
        on_nonfinite=[],
        nonfinite=[],
    )


def unwritten(rows):
    """Rows of one half each, in memory that nothing has touched: it takes none."""
    memory = mmap.mmap(-1, 2 * rows, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    return torch.frombuffer(memory, dtype=torch.float16).view(rows, 1)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "sizes",
    [
        [[2**31, 2**31 - 1]],  # the last key of 32 bits stands for ids without a row
        [[2**31, 2**31]],
        [[2**31], [2**31], [2**31]],  # keys that differ in bit 32 only
    ],
)
def test_more_rows_than_keys_of_32_bits(sizes):
    wanted = [0, 1, 2**31 - 1, 2**31, sum(sizes[0]) - 1]
    rows = [[row for row in wanted if row < sum(table)] for table in sizes]
    ids = [row for table in rows for row in (*table, table[0], -1, table[-1])]
    blocks = [size for table in sizes for size in table]
    bags = [len(table) + 3 for table in rows]
    given = {
        "grad": torch.arange(1.0, 1 + len(ids)),
        "ids": torch.arange(len(ids)),
        "rows": ids_of(*ids),
        "offsets": None,
        "bag_weights": None,
        "states": [],
        "layout": ids_of(
            *(n for t in range(len(sizes)) for n in (t * len(sizes[0]), len(sizes[0]), 31, 1))
        ).view(-1, 4),
        "segments": ids_of(
            *(n for t, k in enumerate(bags) for n in (t, sum(bags[:t]), k, sum(bags[:t]), 1))
        ).view(-1, 5),
        "streams": torch.tensor([[t + 1, 0, 1] for t in range(len(sizes))]),
        "mean": False,
        "optimizer": 0,
        "hyper": [0.5],
        "grad_scales": [1.0] * len(sizes),
        "senders": None,
        "marks": [],
        "mark_layout": None,
        "on_nonfinite": [],
        "nonfinite": [],
    }
    results = []
    for library in (CPU, ops):
        weights = [unwritten(size) for size in blocks]
        library.update_rows_(**given, weights=weights)
        results.append([weights[place][[0, 1, -2, -1]] for place in range(len(blocks))])
    for got, want in zip(*results, strict=True):
        assert torch.equal(bits(got), bits(want))
    assert all(one[0, 0] != 0 and one[-1, 0] != 0 for one in results[1])
