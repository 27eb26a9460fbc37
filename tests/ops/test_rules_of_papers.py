"""The rules of papers against other sources than their formulas: torch's classes, and what is minimised."""

import pytest
import torch
from table_cases import ids_of, make_group, make_table
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_dyn.initializers import Constant, Normal
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

pytestmark = pytest.mark.usefixtures("device")

IDS = torch.arange(6) * 7919 - 1000
COLUMNS = [5, 16, 70]
columns = pytest.mark.parametrize("columns", COLUMNS)
LAMBS = [OptimizerKind.LAMB, OptimizerKind.PARTIAL_ROWWISE_LAMB]


def learning_table(optimizer, columns, start=None):
    table = make_table(
        optimizer=optimizer, embedding_dim=columns, initializer=start or Normal(0.0, 0.5)
    )
    table.find_or_insert(IDS)
    return table


def rows_of(table):
    return table.lookup(IDS)[0]


def train(table, grad):
    """Runs a step in which the ids get the gradients [6, D]."""
    output = make_group(table, pooling="none")(IDS, ids_of(0, len(IDS)), training=True)
    output.backward(grad)


def gradients(columns, steps):
    draw = torch.Generator().manual_seed(columns)
    return torch.randn(steps, len(IDS), columns, generator=draw)


@columns
@pytest.mark.parametrize("make", [torch.optim.Adagrad, RowWiseAdagrad])
def test_adagrad_begins_at_the_value_of_torchs_classes(make, columns):
    kind = OptimizerKind.EXACT_ADAGRAD
    if make is RowWiseAdagrad:
        kind = OptimizerKind.EXACT_ROWWISE_ADAGRAD
    table = learning_table(RowOptimizer(kind, 0.1, initial_accumulator_value=0.25), columns)
    weight = torch.nn.Parameter(rows_of(table))
    optimizer = make([weight], lr=0.1, eps=1e-8, initial_accumulator_value=0.25)
    for grad in gradients(columns, 4):
        train(table, grad)
        weight.grad = grad
        optimizer.step()
    torch.testing.assert_close(rows_of(table), weight.detach(), rtol=1e-5, atol=1e-6)


@columns
def test_a_row_of_ftrl_is_the_least_of_all_gradients_so_far(columns):
    """FTRL-Proximal: w has subgradient 0 of g w + s (w - w_s)^2 / 2 + ..., summed (McMahan, 2013)."""
    rate, l1, l2, start = 0.3, 0.4, 0.05, 0.1
    rule = RowOptimizer(OptimizerKind.FTRL, rate, l1=l1, l2=l2, initial_accumulator_value=start)
    table = learning_table(rule, columns)
    root = torch.full((len(IDS), columns), start, dtype=torch.float64).sqrt()
    total = torch.zeros_like(root)  # of the gradients
    strength, pull = root / rate, torch.zeros_like(root)  # sum of s, of s w_s; the first is at 0
    zeros = 0
    for grad in gradients(columns, 8).double():
        before = rows_of(table).double()
        train(table, grad.float())
        new_root = (root**2 + grad**2).sqrt()
        step, root, total = (new_root - root) / rate, new_root, total + grad
        strength, pull = strength + step, pull + step * before
        row = rows_of(table).double()
        slope = total + strength * row - pull + 2 * l2 * row
        moves = row != 0
        at_zero = slope + l1 * row.sign()
        assert at_zero[moves].abs().max() < 2e-5
        assert slope[~moves].abs().max() <= l1 + 2e-5
        zeros += int((~moves).sum())
    assert 0 < zeros < 8 * row.numel() / 2


def test_ftrl_begins_a_row_of_zeros_as_adagrad():
    """Without regularization and from 0, the first update is that of Adagrad."""
    rules = [
        RowOptimizer(kind, 0.1, initial_accumulator_value=0.1)
        for kind in (OptimizerKind.FTRL, OptimizerKind.EXACT_ADAGRAD)
    ]
    tables = [learning_table(rule, 5, Constant(0.0)) for rule in rules]
    for table in tables:
        train(table, gradients(5, 1)[0])
    torch.testing.assert_close(rows_of(tables[0]), rows_of(tables[1]), rtol=1e-5, atol=1e-6)


def test_ftrl_of_gradients_whose_squares_are_0():
    table = learning_table(RowOptimizer(OptimizerKind.FTRL, 0.1), 5)
    train(table, torch.full((6, 5), 1e-30))
    assert not rows_of(table).any()
    train(table, torch.full((6, 5), float("nan")))
    assert rows_of(table).isnan().all()


def lamb_rows(kind, weight, grads, rate, decay):
    """Algorithm 2 of You et al. in float64, on the direction of torch's own Adam at a learning rate of 1."""
    weight = weight.double()
    free = torch.nn.Parameter(torch.zeros_like(weight))
    adam = torch.optim.Adam([free], lr=1.0, betas=(0.8, 0.95), eps=1e-3)
    for step, grad in enumerate(grads.double(), 1):
        free.data.zero_()
        free.grad = grad
        adam.step()
        direction = -free.detach()
        if kind == OptimizerKind.PARTIAL_ROWWISE_LAMB:
            state = adam.state[free]
            squares = (
                0.05 * 0.95 ** (step - i - 1) * g.double() ** 2 for i, g in enumerate(grads[:step])
            )
            of_row = sum(squares).mean(1, keepdim=True) / (1 - 0.95**step)
            direction = state["exp_avg"] / (1 - 0.8**step) / (of_row.sqrt() + 1e-3)
        direction = direction + decay * weight
        ratio = weight.norm(dim=1, keepdim=True) / direction.norm(dim=1, keepdim=True)
        weight = weight - rate * ratio * direction
    return weight


@columns
@pytest.mark.parametrize("kind", LAMBS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lamb_scales_the_direction_of_adam(kind, columns, decay):
    rule = RowOptimizer(kind, 0.05, eps=1e-3, beta1=0.8, beta2=0.95, weight_decay=decay)
    table, grads = learning_table(rule, columns), gradients(columns, 6)
    expected = lamb_rows(kind, rows_of(table), grads, 0.05, decay)
    for grad in grads:
        train(table, grad)
    torch.testing.assert_close(rows_of(table).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LAMBS, ids=lambda kind: kind.name)
def test_a_norm_of_0_takes_no_part(kind):
    """Rows of zeros learn as by Adam, and a gradient of zeros without decay changes nothing."""
    adam = {
        OptimizerKind.LAMB: OptimizerKind.ADAM,
        OptimizerKind.PARTIAL_ROWWISE_LAMB: OptimizerKind.PARTIAL_ROWWISE_ADAM,
    }
    zeros = [learning_table(RowOptimizer(one, 0.1), 5, Constant(0.0)) for one in (kind, adam[kind])]
    for table in zeros:
        train(table, gradients(5, 1)[0])
    torch.testing.assert_close(rows_of(zeros[0]), rows_of(zeros[1]))
    table = learning_table(RowOptimizer(kind, 0.1), 5)
    before = rows_of(table)
    train(table, torch.zeros(6, 5))
    assert torch.equal(rows_of(table), before)


@columns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_max_norm_is_torchs_renorm_after_the_update(dtype, columns):
    most = 0.5 * columns**0.5
    rules = [
        RowOptimizer(OptimizerKind.EXACT_ROWWISE_ADAGRAD, 0.1, max_norm=norm)
        for norm in (0.0, most)
    ]
    tables = [
        make_table(optimizer=rule, embedding_dim=columns, initializer=Normal(0.0, 0.5), dtype=dtype)
        for rule in rules
    ]
    grad = gradients(columns, 1)[0]
    for table in tables:
        table.find_or_insert(IDS)
        train(table, grad)
    free, bounded = (rows_of(table).float() for table in tables)
    assert 0 < (free.norm(dim=1) > most).sum() < len(IDS)
    expected = torch.renorm(free, 2, 0, most)
    # bfloat16 rows are rounded once, by chance: two rows of one table differ by a unit, as many times
    torch.testing.assert_close(
        bounded, expected, **({} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.01})
    )


@pytest.mark.parametrize(
    "rule",
    [
        *(RowOptimizer(kind, 0.1, weight_decay=0.1) for kind in LAMBS),
        RowOptimizer(OptimizerKind.EXACT_ROWWISE_ADAGRAD, 0.1, max_norm=0.3),
    ],
    ids=lambda rule: rule.kind.name,
)
def test_norms_are_those_of_the_columns_of_a_shard(rule):
    """The last 5 of 12 columns train as a table of 5 columns, not as a part of a table of 12."""
    options = {"optimizer": rule, "initializer": Constant(0.5)}
    shard = make_table(embedding_dim=12, first_column=7, columns=5, **options)
    alone, whole = (make_table(embedding_dim=columns, **options) for columns in (5, 12))
    for grad in gradients(12, 3):
        train(shard, grad[:, 7:]), train(alone, grad[:, 7:]), train(whole, grad)
    assert torch.equal(rows_of(shard), rows_of(alone))
    assert not torch.allclose(rows_of(shard), rows_of(whole)[:, 7:], rtol=1e-3)
