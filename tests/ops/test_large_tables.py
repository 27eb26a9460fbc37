"""Tables and optimizer states of more than 2^32 numbers: an index of 32 bits reads or writes other rows.

Their memory is a file without contents, of which few pages are ever used.
"""

import math

import pytest
import torch
from table_cases import bits, ids_of, weights_grad
from update_rules import hyper_of

from torchrec_dyn import ops

COLUMNS, SHIFT = 64, 27
FIRST = 1 << 26  # its numbers begin at 2^32: cut to 32 bits, it is row 0
ROWS = ids_of(3, FIRST + 3, FIRST + 5, 5, FIRST)
TWINS = ids_of(3, 11, 13, 5, 8)  # the same rows in a small table
LAYOUT = torch.tensor([[0, 1, SHIFT, COLUMNS]])
ROWWISE_ADAGRAD, ADAM = 2, 3

pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.parametrize("device", ["cpu", "simt"], indirect=True),
]


@pytest.fixture
def large(tmp_path):
    """Makes zeros of any shape."""

    def zeros(*shape):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        return torch.from_file(str(path), shared=True, size=torch.Size(shape).numel()).view(shape)

    return zeros


def assert_twins(large, small):
    """The rows of both tables are equal, and no other row has changed."""
    assert torch.equal(bits(large[ROWS]), bits(small[TWINS]))
    others = [row for row in range(8) if row not in ROWS.tolist()]
    assert not large[others].any() and not large[FIRST + ids_of(1, 2, 4, 6, 7)].any()


def test_rows_are_written_and_read(large):
    table, twin = large(FIRST + 8, COLUMNS), torch.zeros(16, COLUMNS)
    ids, values = ids_of(7, 8, 9, 10, 11), torch.randn(5, COLUMNS)
    for block, rows in ((table, ROWS), (twin, TWINS)):
        ops.init_rows_(ids, rows, [block], SHIFT, COLUMNS, 0, 1, [-1.0, 1.0, 0, 0, 0, 0], 7)
    assert_twins(table, twin)
    for block, rows in ((table, ROWS), (twin, TWINS)):
        ops.scatter_rows_(rows, values, [block], SHIFT, COLUMNS)
        assert torch.equal(ops.gather_rows(rows, [block], SHIFT, COLUMNS, torch.float32), values)
    assert_twins(table, twin)


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_pooled(large, weighted):
    """Bags of one id and of several."""
    table, twin = large(FIRST + 8, COLUMNS), torch.zeros(16, COLUMNS)
    values, grad = torch.randn(5, COLUMNS), torch.randn(3 * COLUMNS)
    offsets, factors = ids_of(0, 1, 10, 15), torch.randn(15) if weighted else None
    segment = torch.tensor([[0, 0, 3, 0, COLUMNS]])
    results = []
    for block, rows in ((table, ROWS), (twin, TWINS)):
        block[rows] = values
        given = (rows.repeat(3), offsets, factors, [block], LAYOUT, segment, False)
        results.append(ops.gather_pool(*given, 3 * COLUMNS, torch.float32))
        given = (grad, rows.repeat(3), offsets, [block], LAYOUT, segment, False)
        results.append(weights_grad(ops, *given))
    assert torch.equal(results[0], results[2]) and results[0].all()
    assert torch.equal(results[1], results[3]) and results[1].all()


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("optimizer", [ROWWISE_ADAGRAD, ADAM])
def test_rows_are_updated(large, optimizer, refuses):
    """`refuses`: a row is infinite, and stays as it was."""
    grad, results = torch.randn(3 * COLUMNS), []
    for rows, new in ((ROWS, large), (TWINS, torch.zeros)):
        limit = FIRST + 8 if new is large else 16
        width = 1 if optimizer == ROWWISE_ADAGRAD else COLUMNS
        states = [new(limit, COLUMNS), new(limit, width)]
        states += [new(limit, COLUMNS)] if optimizer == ADAM else []
        refused = ids_of(0)
        if refuses:
            states[0][rows[2]] = math.inf
        ops.update_rows_(
            grad=grad,
            ids=torch.arange(15),
            rows=rows.repeat(3),
            offsets=ids_of(0, 1, 10, 15),
            bag_weights=None,
            weights=states[:1],
            states=states[1:],
            layout=LAYOUT,
            segments=torch.tensor([[0, 0, 3, 0, COLUMNS]]),
            streams=torch.tensor([[5, 0, 1]]),
            mean=False,
            optimizer=optimizer,
            hyper=hyper_of(optimizer, 0.5),
            grad_scales=[1.0],
            senders=None,
            marks=[],
            mark_layout=None,
            on_nonfinite=[1] if refuses else [],
            nonfinite=[refused] if refuses else [],
        )
        assert refused.item() == refuses
        results.append(states)
    for got, expected in zip(*results, strict=True):
        assert expected[TWINS].any(1).sum() >= len(TWINS) - refuses
        assert_twins(got, expected)
