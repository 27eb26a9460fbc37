"""Updates that would make a row NaN or infinite: `on_nonfinite` of `ops.update_rows_`.

The oracle is the update without it, row by row.
"""

import math

import pytest
import torch
from device_ops import CPU
from fuzz_ops import copies
from op_samples import update_with_refusals
from table_cases import bits, ids_of
from update_cases import WRITTEN, drawn_update
from update_rules import KINDS

from torchrec_dyn import ops

WRITE, SKIP, ERROR = range(3)
WIDTHS = [17, 64, 130]
ROWS = 40
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
RULES = range(len(KINDS))
rules = pytest.mark.parametrize("optimizer", RULES)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def spoiled_update(seed, optimizer, dtype, *on_nonfinite):
    """Returns an update with some gradients that are NaN, infinite, or so large that a number overflows."""
    given = drawn_update(seed, optimizer, dtype, WIDTHS, ids=300)
    draw = torch.Generator().manual_seed(seed)
    grad = given["grad"].view(-1, sum(WIDTHS))
    for number in (math.nan, math.inf, -math.inf, 3e38, 1e20, 65504.0 / 0.3):
        for of_table in grad.split(WIDTHS, dim=1):
            bag, column = (
                int(torch.randint(0, size, (), generator=draw)) for size in of_table.shape
            )
            of_table[bag, column] = number
    counts = [torch.tensor([7]) for _ in WIDTHS]
    return given | {"on_nonfinite": list(on_nonfinite), "nonfinite": counts}


def rows_of(given, table):
    """Returns the weights and the states of a table by row, [40, columns] each."""
    blocks, every = len(given["weights"]), given["weights"] + given["states"]
    begins = range(5 * table, len(every), blocks)
    return [torch.cat(every[begin : begin + 5]) for begin in begins]


def marks_of(given, table):
    """Returns the bits of the marks of a table by row."""
    rows = torch.arange(ROWS)
    return given["marks"][table][rows & 63] & 1  # 64 stripes, one row of each


def refused_rows(written, table):
    """Returns which rows of a table have a number that is not finite, after an update that writes all."""
    parts = rows_of(written, table)
    return torch.stack([~part.float().isfinite().all(1) for part in parts]).any(0)


def outcome(library, given):
    try:
        library.update_rows_(**given)
    except RuntimeError as error:
        return str(error)
    return None


def same(got, expected):
    """Returns True for equal bits; a NaN of one device is not that of another."""
    both_nan = got.isnan() & expected.isnan()
    return torch.equal(bits(got.masked_fill(both_nan, 0)), bits(expected.masked_fill(both_nan, 0)))


def check_same(got, expected):
    for name in (*WRITTEN, "nonfinite"):
        for one, other in zip(got[name], expected[name], strict=True):
            assert same(one, other), name


@pytest.mark.usefixtures("device")
@dtypes
@rules
def test_skip_leaves_the_rows_that_would_not_be_finite(optimizer, dtype):
    refused = 0
    for seed in range(3):
        given = spoiled_update(seed, optimizer, dtype, SKIP, WRITE, SKIP)
        before, written = copies(given), copies(given) | {"on_nonfinite": [], "nonfinite": []}
        CPU.update_rows_.default(**written)
        ops.update_rows_(**given)
        for table, what in enumerate(given["on_nonfinite"]):
            stays = refused_rows(written, table) if what == SKIP else torch.zeros(ROWS).bool()
            refused += int(stays.sum())
            assert given["nonfinite"][table].item() == 7 + stays.sum(), table
            parts = (rows_of(one, table) for one in (given, written, before))
            for got, expected, former in zip(*parts, strict=True):
                expected[stays] = former[stays]
                assert same(got, expected), table
            marked = torch.where(stays, marks_of(before, table), marks_of(written, table))
            assert torch.equal(marks_of(given, table), marked)
    assert refused > 6


@pytest.mark.usefixtures("device")
@dtypes
@rules
def test_error_changes_nothing(optimizer, dtype, monkeypatch):
    monkeypatch.setenv("TORCHREC_DYN_SYNC_ERRORS", "1")
    given = spoiled_update(1, optimizer, dtype, ERROR, SKIP, WRITE)
    before, written = copies(given), copies(given) | {"on_nonfinite": [], "nonfinite": []}
    CPU.update_rows_.default(**written)
    with pytest.raises(RuntimeError) as error:
        ops.update_rows_(**given)
    refused = [int(refused_rows(written, table).sum()) for table in (0, 1)]
    assert refused[0] > 0 < refused[1]
    text = "update_rows_: expected finite weights and optimizer states after the update, got NaN or"
    assert f"{text} infinity in {refused[0]} rows" in str(error.value)
    for name in WRITTEN:
        for got, expected in zip(given[name], before[name], strict=True):
            assert torch.equal(bits(got), bits(expected)), name
    assert [count.item() for count in given["nonfinite"]] == [7 + refused[0], 7 + refused[1], 7]


@pytest.mark.usefixtures("device")
@rules
def test_a_finite_update_is_the_same_under_every_choice(optimizer):
    for dtype in FLOATS:
        given = drawn_update(3, optimizer, dtype, WIDTHS, ids=300)
        counts = [ids_of(0) for _ in WIDTHS]
        guarded = copies(given) | {"on_nonfinite": [SKIP, ERROR, WRITE], "nonfinite": counts}
        CPU.update_rows_.default(**given)
        ops.update_rows_(**guarded)
        check_same(guarded, given | {"nonfinite": counts})
        assert not any(counts)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("senders", [True, False])
def test_the_device_decides_as_the_cpu(senders, monkeypatch):
    monkeypatch.setenv("TORCHREC_DYN_SYNC_ERRORS", "1")
    seen = set()
    for seed, optimizer in enumerate([*RULES] * 2):
        dtype = FLOATS[seed % 3]
        for what in ((SKIP, SKIP, SKIP), (SKIP, ERROR, ERROR), (ERROR, WRITE, SKIP)):
            given = spoiled_update(seed, optimizer, dtype, *what)
            if not senders:
                given["senders"] = None
            expected = copies(given)
            texts = outcome(CPU, expected), outcome(ops, given)
            seen.add(texts[0] is None)
            assert (texts[0] is None) == (texts[1] is None)
            check_same(given, expected)
    assert seen == {True, False}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_stored_weight_that_overflows_is_refused(dtype):
    """The sum of weight and update is finite in float32."""
    largest = torch.finfo(dtype).max
    given = update_with_refusals(0, SKIP, SKIP)
    given |= {"weights": [block.to(dtype).fill_(largest) for block in given["weights"]]}
    before = copies(given)
    given |= {"grad": torch.full((10,), -largest / 128), "hyper": [1.0], "grad_scales": [1.0, 1.0]}
    ops.update_rows_(**given)
    assert [count.item() for count in given["nonfinite"]] == [2, 1]  # all rows of the batch
    for got, expected in zip(given["weights"], before["weights"], strict=True):
        assert torch.equal(got, expected)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("columns", [1, 6])
def test_a_weight_that_overflows_by_its_draw_is_refused_by_this_draw(columns):
    """About a twelfth of the columns become infinite; a tile has lanes without columns, with draws, too.

    A float16 overflows at 65520 whatever is drawn, so the rows are of bfloat16.
    """
    largest = torch.finfo(torch.bfloat16).max
    rows = torch.arange(64)
    given = drawn_update(4, 0, torch.bfloat16, [columns], ids=30)
    given |= {
        "ids": 1000 * rows, "rows": rows, "offsets": None, "senders": None, "bag_weights": None,
        "mean": False, "marks": [], "mark_layout": None, "grad_scales": [1.0], "hyper": [1.0],
        "grad": torch.full((64 * columns,), -(2.0**120) / 12),
        "weights": [torch.full((64, columns), largest).bfloat16()],
        "layout": torch.tensor([[0, 1, 6, columns]]), "segments": torch.tensor([[0, 0, 64, 0, columns]]),
        "on_nonfinite": [SKIP], "nonfinite": [ids_of(0)],
    }  # fmt: skip
    written = copies(given) | {"on_nonfinite": [], "nonfinite": []}
    CPU.update_rows_.default(**written)
    ops.update_rows_(**given)
    refused = written["weights"][0].isinf().any(1)
    assert 0 < refused.sum() < 64 and given["nonfinite"][0].item() == refused.sum()


@pytest.mark.usefixtures("device")
def test_the_last_column_and_the_state_of_the_row_count():
    for column in (0, 63, 64, 129):
        given = drawn_update(5, 2, torch.float32, [130], ids=30)
        given |= {"on_nonfinite": [SKIP], "nonfinite": [ids_of(0)], "bag_weights": None}
        given |= {"hyper": [0.0, 1e-8, 0.0, 0.0, 0.0], "senders": None, "mean": False}
        given["grad"].view(-1, 130)[:, column] = 1e30  # its square overflows; the rate is 0
        before = copies(given)
        ops.update_rows_(**given)
        updated = set(given["rows"].tolist()) - {-1}
        in_bags = given["nonfinite"][0].item()
        assert 0 < in_bags <= len(updated)
        for name in ("weights", "states"):
            for got, expected in zip(given[name], before[name], strict=True):
                assert torch.equal(got, expected)


@pytest.mark.usefixtures("device")
def test_many_rows_on_several_threads():
    """More rows than one thread takes, one in seven of them refused."""
    ids = 20_000
    given = drawn_update(9, 1, torch.float32, [8], ids=30)
    given |= {
        "ids": torch.arange(ids), "rows": torch.arange(ids), "offsets": None, "senders": None,
        "bag_weights": None, "mean": False, "marks": [], "mark_layout": None,
        "grad": torch.where((torch.arange(ids) % 7 == 3)[:, None], math.inf, 1.0).expand(ids, 8).flatten(),
        "weights": [torch.zeros(1 << 15, 8)], "states": [torch.zeros(1 << 15, 8)],
        "layout": torch.tensor([[0, 1, 15, 8]]), "segments": torch.tensor([[0, 0, ids, 0, 8]]),
        "on_nonfinite": [SKIP], "nonfinite": [ids_of(0)],
    }  # fmt: skip
    ops.update_rows_(**given)
    stays = torch.arange(ids) % 7 == 3
    assert given["nonfinite"][0].item() == stays.sum()
    assert torch.equal((given["weights"][0][:ids] == 0).all(1), stays)
    assert torch.equal((given["states"][0][:ids] == 0).all(1), stays)
