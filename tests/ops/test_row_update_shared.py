"""Rows of one batch learn as if each were alone in it, whatever they share: bags, gradients, sums."""

import pytest
import torch
from table_cases import ids_of, make_group, make_table, same_state

from torchrec_dyn.initializers import Normal
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

KINDS = list(OptimizerKind)
WITH_DECAY = [
    RowOptimizer(OptimizerKind.EXACT_ROWWISE_ADAGRAD, 0.1, weight_decay=0.05, weight_decay_mode=1),
    RowOptimizer(OptimizerKind.EXACT_ROWWISE_ADAGRAD, 0.1, weight_decay=0.05, weight_decay_mode=2),
    RowOptimizer(OptimizerKind.PARTIAL_ROWWISE_ADAM, 0.1, weight_decay=0.05),
]
ALL_RULES = [RowOptimizer(kind, 0.1) for kind in KINDS] + WITH_DECAY
every_rule = pytest.mark.parametrize(
    "rule", ALL_RULES, ids=lambda r: f"{r.kind.name}-{r.weight_decay_mode}"
)


@pytest.fixture
def threads():
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def learning_table(rule, columns, dtype=torch.float32):
    return make_table(
        optimizer=rule, embedding_dim=columns, dtype=dtype, num_embeddings=1 << 16,
        initializer=Normal(0.0, 0.5),
    )  # fmt: skip


def shared_batch():
    """40 bags over 12 ids: id k is named 2k + 1 times, and the last two bags hold what is named once.

    So gradients are shared by rows named once, sums of more than 8 gradients stand between them, and
    the same bag is named again after others.
    """
    draw = torch.Generator().manual_seed(4)
    ids = torch.cat([torch.full((2 * k + 1,), k) for k in range(12)])
    ids = ids[torch.randperm(ids.numel(), generator=draw)]
    cuts = torch.randint(0, ids.numel(), (37,), generator=draw).sort().values
    bounds = [0, *cuts.tolist(), ids.numel(), ids.numel() + 4, ids.numel() + 9]
    ids = torch.cat([ids, ids_of(100, 101, 3, 102, 103, 104, 11, 105, 106)])
    return ids, torch.tensor(bounds), torch.randn(ids.numel(), generator=draw)


def only(number, ids, offsets, weights):
    """The batch without the ids that are not `number`; the bags stay."""
    keep = ids == number
    before = torch.cat([torch.zeros(1, dtype=torch.int64), keep.cumsum(0)])
    return ids[keep], before[offsets], None if weights is None else weights[keep]


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("columns", [5, 16, 100])
def test_each_row_learns_as_if_alone(rule, dtype, is_weighted, columns):
    """Bit for bit, two steps: from the order of a row's own gradients and nothing else."""
    ids, offsets, weights = shared_batch()
    given = weights if is_weighted else None
    upstream = torch.randn(2, offsets.numel() - 1, columns)
    together = learning_table(rule, columns, dtype)
    for grad in upstream:
        make_group(together)(ids, offsets, given, training=True).backward(grad)
    state = together.export_state()
    for number in torch.unique(ids).tolist():
        alone = learning_table(rule, columns, dtype)
        own_ids, own_offsets, own_weights = only(number, ids, offsets, given)
        for grad in upstream:
            output = make_group(alone)(own_ids, own_offsets, own_weights, training=True)
            output.backward(grad)
        here = int((state["ids"] == number).nonzero())
        row = {name: v[here : here + 1] if v.dim() else v for name, v in state.items()}
        assert same_state(row, alone.export_state()), number


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("columns", [5, 16, 100])
def test_sums_are_made_in_the_order_of_the_batch(is_weighted, columns):
    """Of 1 to 23 gradients a row, added in float32 one by one: bit for bit what torch gets."""
    ids, offsets, weights = shared_batch()
    table = learning_table(RowOptimizer(OptimizerKind.EXACT_SGD, 0.5), columns)
    table.find_or_insert(ids)
    numbers = torch.unique(ids)
    before, upstream = table.lookup(numbers)[0], torch.randn(offsets.numel() - 1, columns)
    given = weights if is_weighted else None
    make_group(table)(ids, offsets, given, training=True).backward(upstream)
    bags = torch.repeat_interleave(torch.arange(offsets.numel() - 1), offsets.diff())
    for number, row, after in zip(numbers, before, table.lookup(numbers)[0], strict=True):
        total = torch.zeros(columns)
        for position in (ids == number).nonzero().flatten():
            total = total + (weights[position] if is_weighted else 1.0) * upstream[bags[position]]
        assert torch.equal(after, row - 0.5 * total)


@pytest.mark.parametrize(
    "rule",
    [
        RowOptimizer(OptimizerKind.EXACT_ROWWISE_ADAGRAD, 0.1),
        RowOptimizer(OptimizerKind.EXACT_ROWWISE_ADAGRAD, 0.1, weight_decay=0.05),
        WITH_DECAY[1],
        RowOptimizer(OptimizerKind.PARTIAL_ROWWISE_ADAM, 0.1),
        WITH_DECAY[2],
    ],
    ids=lambda r: f"{r.kind.name}-{r.weight_decay}-{r.weight_decay_mode}",
)
@pytest.mark.parametrize("wild", [float("nan"), float("inf")])
@pytest.mark.parametrize("order", [[1, 2, 3], [2, 1, 3], [3, 2, 1]])
def test_a_wild_row_reaches_no_moment(rule, wild, order):
    """Unless decay is a part of the gradient, a row's one moment is a function of gradients alone."""
    table = learning_table(rule, 20)
    table.find_or_insert(ids_of(1, 2, 3))
    table.assign(ids_of(1), torch.full((1, 20), wild))
    upstream = torch.randn(1, 20)
    make_group(table)(ids_of(*order), ids_of(0, 3), training=True).backward(upstream)
    name = rule.state_names[rule.state_is_rowwise.index(True)]
    moment = table.export_state()[name].flatten()
    assert (moment == moment[0]).all()
    scale = 1.0 if rule.kind == OptimizerKind.EXACT_ROWWISE_ADAGRAD else 1 - rule.beta2
    torch.testing.assert_close(moment[0], scale * upstream.square().mean(), rtol=1e-4, atol=0.0)
    assert table.lookup(ids_of(2, 3))[0].isfinite().all()
    assert not table.lookup(ids_of(1))[0].isfinite().any()


@every_rule
def test_threads_do_not_change_the_bits_where_most_rows_are_named_once(rule, threads):
    """Cut into parts, a bag's gradient is squared by several threads, each for its own rows."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 60_000, (12_000,), generator=draw)
    ids[::50] = 5  # and one of many gradients
    offsets = torch.arange(0, 12_001, 10)
    upstream = torch.randn(1200, 20, generator=draw)
    states = []
    for count in (1, 2, 4):
        threads(count)
        table = learning_table(rule, 20)
        make_group(table)(ids, offsets, training=True).backward(upstream)
        states.append(table.export_state())
    assert same_state(states[0], states[1]) and same_state(states[0], states[2])
