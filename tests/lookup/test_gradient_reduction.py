"""`DynamicTableConfig.gradient`: the reduction of gradients that several ranks send for one row."""

import pytest
import torch
import workers
from gradient_oracle import MODES, RATE, check_trains_as_dense
from hypothesis import given
from hypothesis import strategies as st
from sharded_cases import Case, Table, usual_plan
from table_cases import make_group

import torchrec_dyn as dyn
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.lookup.gradient_reduction import Senders, asks_for_senders
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.sharding.lookups import PooledLookup
from torchrec_dyn.table.shard import TableShard

POOLED = [
    "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard",
]  # fmt: skip
SGD = {"optimizer": "EXACT_SGD", "learning_rate": RATE}


def tables_of(kind: str, world: int, local: int, pooled: bool, pooling: str = "SUM") -> list[Table]:
    """Returns one table for each reduction; the second table has two features."""
    features = [["a"], ["b", "c"], ["d"]]
    return [
        Table(
            mode, of_table, usual_plan(kind, 8, world, local, turn), pooling=pooling,
            config=DynamicTableConfig(gradient=mode, initializer=dyn.Constant(0.5)),
        )
        for turn, (mode, of_table) in enumerate(zip(MODES, features, strict=True))
    ]  # fmt: skip


def case_of(kind: str, world: int, local: int, pooled: bool = True, **options) -> Case:
    pooling = options.pop("pooling", "SUM")
    return Case(
        tables_of(kind, world, local, pooled, pooling), pooled=pooled, fused_params=SGD, **options
    )


@pytest.mark.parametrize("kind", POOLED)
def test_pooled(kind):
    workers.run(check_trains_as_dense, case_of(kind, 4, 2), world_size=4, local_size=2)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_sequences(kind):
    workers.run(check_trains_as_dense, case_of(kind, 2, 2, pooled=False), world_size=2)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_one_rank(kind):
    workers.run(check_trains_as_dense, case_of(kind, 1, 1), world_size=1)


@pytest.mark.parametrize("kind", ["table_wise", "column_wise"])
def test_ranks_whose_batches_differ_in_size(kind):
    workers.run(check_trains_as_dense, case_of(kind, 2, 2, batch_sizes=[2, 9]), world_size=2)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "table_row_wise"])
def test_batch_sizes_by_feature(kind):
    case = case_of(kind, 4, 2, variable=True)
    workers.run(check_trains_as_dense, case, world_size=4, local_size=2)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_weights_of_bags(kind):
    workers.run(check_trains_as_dense, case_of(kind, 2, 2, weighted=True), world_size=2)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_mean_pooling(kind):
    workers.run(check_trains_as_dense, case_of(kind, 2, 2, pooling="MEAN"), world_size=2)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_with_the_division_by_torchrec_switched_off(kind):
    workers.run(check_trains_as_dense, case_of(kind, 2, 2), 0.5, False, world_size=2)


def group_of(modes, columns=3, kind=OptimizerKind.EXACT_SGD):
    tables = [
        TableShard(
            name=f"t{number}", num_embeddings=100, embedding_dim=columns,
            optimizer=RowOptimizer(kind, learning_rate=1.0),
            config=DynamicTableConfig(gradient=mode, initializer=dyn.Constant(0.0)),
        )
        for number, mode in enumerate(modes)
    ]  # fmt: skip
    return make_group(*tables)


@given(
    bags=st.lists(st.lists(st.integers(-3, 3), max_size=4), min_size=6, max_size=6),
    cuts=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    divisor=st.sampled_from([1, 2]),
)
def test_sums_of_any_batch(bags, cuts, divisor):
    """Two tables, three bags each, cut anywhere between two ranks; the gradient of bag b is b + 1."""
    group = group_of(["mean_over_senders", "sum"])
    offsets = torch.tensor([0, *[len(bag) for bag in bags]]).cumsum(0)
    ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
    sent = Senders([[cut, 3 - cut] for cut in cuts], divisor)
    output = group(ids, offsets, training=True, senders=sent)
    grads = torch.tensor([[1.0] * 3 + [4.0] * 3, [2.0] * 3 + [5.0] * 3, [3.0] * 3 + [6.0] * 3])
    output.backward(grads / divisor)
    for t, table in enumerate(group.tables):
        for i in range(-3, 4):
            in_bags = [b for b in range(3) for j in bags[3 * t + b] if j == i]
            total = float(sum(3 * t + b + 1 for b in in_bags))
            if t == 0:
                total /= max(1, len({b < cuts[0] for b in in_bags}))
            rows, found = table.lookup(torch.tensor([i]))
            assert bool(found) == bool(in_bags)
            torch.testing.assert_close(rows, torch.full((1, 3), -total))


def test_adaptive_rules_see_the_reduced_gradient():
    """With row-wise Adagrad the moment is the mean square of sum / 2, not of the sum."""
    group = group_of(["mean_over_senders"], kind=OptimizerKind.EXACT_ROWWISE_ADAGRAD)
    ids = torch.tensor([7, 7])
    output = group(ids, torch.tensor([0, 1, 2]), training=True, senders=Senders([[1, 1]], 1))
    output.backward(torch.tensor([[2.0] * 3, [4.0] * 3]))
    (moment,) = group.tables[0].states
    assert moment.read(group.tables[0].id_map.lookup(ids[:1])).item() == 9.0


def test_the_default_needs_no_senders():
    assert not asks_for_senders([DynamicTableConfig()])
    assert asks_for_senders([DynamicTableConfig(), DynamicTableConfig(gradient="sum")])


def test_another_word_is_refused():
    with pytest.raises(
        ValueError, match=r'gradient: expected "mean_over_ranks".*got "mean"|got \'mean\''
    ):
        DynamicTableConfig(gradient="mean")


def test_node_row_wise_batches_lie_by_place_in_the_node():
    """TorchRec's staggered recat orders the ranks of nodes {0, 1} and {2, 3} as 0, 2, 1, 3."""
    lookup = PooledLookup.__new__(PooledLookup)  # its constructor needs a process group
    torch.nn.Module.__init__(lookup)
    lookup._emb_modules = [lambda features, bags_of_ranks, ahead: bags_of_ranks]
    for node_size, arrived in ((2, [10, 12, 11, 13]), (1, [10, 11, 12, 13])):
        lookup.node_size = node_size
        assert lookup._outputs([None], [10, 11, 12, 13], {}) == [arrived]
