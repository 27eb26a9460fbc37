"""Quotient-remainder embeddings against plain torch over Python's divmod."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from hypothesis import given
from hypothesis import strategies as st
from mixed_cases import (
    SGD,
    batch,
    leaf_rows,
    options_of,
    pooled_by_hand,
    some_grad,
    tables,
)
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

import torchrec_dyn as dyn
from torchrec_dyn.layers.quotient_remainder import PAIR_OPS, quotient_and_remainder

every_op = pytest.mark.parametrize("op", PAIR_OPS)


def collection(op="mult", pooling="SUM", **options):
    options = {**options_of(pooling), "fused_params": SGD, **options}
    buckets = {"a": 7, "b": 2**32, "c": 2}
    return dyn.QuotientRemainderEmbeddingBagCollection(tables(pooling), buckets, op, **options)


DIVISOR = {"a": 7, "b": 2**32, "c": 2}


def handle(ours, table):
    return next(one for one in ours.rows.values() if table in one.dynamic_configs()).table(table)


def parts_of(ids, table) -> dict[str, torch.Tensor]:
    """Returns the ids that each of the two inner tables looks up, computed in Python."""
    pairs = [divmod(id % 2**64, DIVISOR[table]) for id in ids.tolist()]
    signed = [[q - 2**64 if q >= 2**63 else q for q, _ in pairs], [r for _, r in pairs]]
    names = (f"{table}_quotient", f"{table}_remainder")
    return {
        name: torch.tensor(of, dtype=torch.int64) for name, of in zip(names, signed, strict=True)
    }


@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [("SUM", False), ("SUM", True), ("MEAN", False), ("MEAN", True), ("MAX", False)],
)
@every_op
def test_pairs_are_put_together_before_pooling_forward_and_backward(op, pooling, weighted):
    ours = collection(op, pooling, is_weighted=weighted)
    features = batch(weighted=weighted)
    output = ours(features)
    weights = features.weights().detach().clone().requires_grad_() if weighted else None
    theirs = KeyedJaggedTensor(
        features.keys(), features.values(), weights=weights, lengths=features.lengths()
    )
    known = {
        inner: torch.unique(numbers)
        for table, names in (("a", "fg"), ("b", "g"), ("c", "h"))
        for inner, numbers in parts_of(
            torch.cat([theirs[name].values() for name in names]), table
        ).items()
    }
    rows = {inner: leaf_rows(handle(ours, inner), of) for inner, of in known.items()}

    def row_of(table, feature):
        quotients, remainders = (
            rows[inner][torch.searchsorted(known[inner], of)]
            for inner, of in parts_of(theirs[feature].values(), table).items()
        )
        return {
            "mult": lambda: quotients * remainders,
            "add": lambda: quotients + remainders,
            "concat": lambda: torch.cat([quotients, remainders], 1),
        }[op]()

    expected = torch.cat(pooled_by_hand(theirs, pooling, row_of), dim=1)
    torch.testing.assert_close(output.values(), expected)

    gradient = some_grad(expected)
    output.values().backward(gradient)
    expected.backward(gradient)
    for inner, before in rows.items():
        learnt, _ = handle(ours, inner).lookup(known[inner])
        torch.testing.assert_close(learnt, before.detach() - 0.5 * before.grad)
    if weighted:
        torch.testing.assert_close(features.weights().grad, weights.grad)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_sums_of_rows_in_half_precision_are_float32(pooling):
    halves = dyn.DynamicTableConfig(initializer=dyn.Constant(0.5))
    config = EmbeddingBagConfig(100, 4, "t", feature_names=["t"], pooling=pooling)
    ours = dyn.QuotientRemainderEmbeddingBagCollection(
        [config],
        10,
        "add",
        dynamic={"t_quotient": halves, "t_remainder": halves},
        fused_params={**SGD, "output_dtype": SparseType.BF16},
    )
    ones = KeyedJaggedTensor(["t"], torch.ones(512).long(), lengths=torch.tensor([512]))
    output = ours(ones).values()
    assert output.dtype == torch.bfloat16  # where a sum of ones stops at 256
    assert output.tolist() == [[512.0 if pooling == PoolingType.SUM else 1.0] * 4]


def test_tables_have_as_many_rows_as_ids_have_parts():
    ours = collection()
    ids = torch.arange(100)
    ours(KeyedJaggedTensor(["f", "g", "h"], ids, lengths=torch.tensor([100, 0, 0])))
    assert handle(ours, "a_quotient").num_rows == 15
    assert handle(ours, "a_remainder").num_rows == 7


@pytest.mark.parametrize(
    ("buckets", "most", "limits"),
    [
        (7, None, (1000, 7)),
        (2**40, None, (1000, 1000)),
        (2**63 - 1, None, (3, 1000)),
        (10, 100, (100, 10)),
    ],
)
def test_limits_of_the_two_tables(buckets, most, limits):
    config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=1000)
    ours = dyn.QuotientRemainderEmbeddingBagCollection([config], buckets, most_quotients=most)
    (inner,) = ours.rows.values()
    assert tuple(one.num_embeddings for one in inner.embedding_configs()) == limits


def starts(op, **options):
    """Returns the initial rows of the two inner tables of a table whose initial rows are in +-1/20."""
    config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=400)
    ours = dyn.QuotientRemainderEmbeddingBagCollection(
        [config], 20, op, fused_params=SGD, **options
    )
    ours(KeyedJaggedTensor(["t"], torch.arange(400), lengths=torch.ones(400).long()))
    ids = torch.arange(20)
    return handle(ours, "t_quotient").lookup(ids)[0], handle(ours, "t_remainder").lookup(ids)[0]


def test_products_start_as_rows_do_times_a_factor():
    quotients, remainders = starts("mult")
    assert 0.5 <= quotients.min() < 0.55 and 1.45 < quotients.max() <= 1.5
    assert 0.045 < remainders.abs().max() <= 0.05


@pytest.mark.parametrize("op", ["add", "concat"])
def test_terms_start_as_rows_do_each_in_its_own_way(op):
    quotients, remainders = starts(op)
    for rows in (quotients, remainders):
        assert 0.04 < rows.abs().max() <= 0.05
    assert not torch.equal(quotients, remainders)


def test_options_of_a_table_or_of_one_of_the_two():
    whole = dyn.DynamicTableConfig(initializer=dyn.Constant(0.25))
    one = dyn.DynamicTableConfig(initializer=dyn.Constant(3.0))
    quotients, remainders = starts("mult", dynamic=whole)
    assert remainders.eq(0.25).all() and not quotients.eq(0.25).any()
    quotients, remainders = starts("add", dynamic={"t": whole})
    assert remainders.eq(0.25).all() and quotients.eq(0.25).all()
    quotients, remainders = starts("mult", dynamic={"t": whole, "t_quotient": one})
    assert remainders.eq(0.25).all() and quotients.eq(3).all()
    fans = dyn.DynamicTableConfig(initializer=dyn.XavierUniform())
    bound = dyn.XavierUniform().for_dimension(4).high  # for the 4 columns of an inner row
    for rows in starts("concat", dynamic=fans):
        assert 0.9 * bound < rows.abs().max() <= bound
    quotients, remainders = starts("concat", dynamic={"t_remainder": one})
    assert remainders.eq(3).all() and quotients.abs().max() <= 0.05


@every_op
def test_features_of_other_numbers_of_bags_are_refused(op):
    ours = collection(op)
    without = KeyedJaggedTensor(
        ["f", "g", "h"],
        torch.arange(4),
        lengths=torch.ones(4).long(),
        stride_per_key_per_rank=[[2], [1], [1]],
    )
    with pytest.raises(
        ValueError, match=r"expected as many bags for each feature, got \[1, 2, 1, 1\]"
    ):
        ours(without)
    assert handle(ours, "a_quotient").num_rows == 0


def make(**changes):
    given = {"tables": tables(), "buckets": 10, **changes}
    return lambda: dyn.QuotientRemainderEmbeddingBagCollection(**given)


def odd():
    return [EmbeddingBagConfig(name="t", embedding_dim=7, num_embeddings=9)]


def named(*names):
    return [EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=9) for name in names]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (make(buckets=0), r"buckets: expected an integer in \[1, 9223372036854775807\] .*, got 0"),
        (make(buckets=2**63), r"buckets: expected .* got 9223372036854775808"),
        (make(buckets={"a": 3}), r"buckets: expected a number for each .*, got \['a'\]"),
        (make(most_quotients=1001), r"most_quotients: expected an integer in \[1, 1000\]"),
        (make(op="max"), r"expected op among \['mult', 'add', 'concat'\], got 'max'"),
        (make(tables=odd(), op="concat"), r"table='t'.*expected an even embedding_dim .*, got 7"),
        (make(tables=named("t", "t_quotient")), r"that differ from .*, got \['t_quotient'\]"),
        (make(dynamic={"d": dyn.DynamicTableConfig()}), r"dynamic: expected names among .*'d'"),
    ],
)
def test_a_wrong_option_is_named(wrong, message):
    with pytest.raises(ValueError, match=f"^QuotientRemainderEmbeddingBagCollection.*{message}"):
        wrong()


# Division of ids as unsigned numbers, against Python's divmod

EXTREMES = [-(2**63), 1 - 2**63, -2, -1, 0, 1, 2, 2**62, 2**63 - 2, 2**63 - 1]
DIVISORS = [1, 2, 3, 2**32, 2**32 + 1, 2**62, 2**62 + 1, 2**63 - 2, 2**63 - 1]


def check_division(ids: list[int], divisor: int) -> None:
    quotients, remainders = quotient_and_remainder(torch.tensor(ids), divisor)
    assert quotients.dtype == remainders.dtype == torch.int64
    got = [(q % 2**64, r) for q, r in zip(quotients.tolist(), remainders.tolist(), strict=True)]
    assert got == [divmod(id % 2**64, divisor) for id in ids]


@pytest.mark.parametrize("divisor", DIVISORS)
def test_division_is_unsigned_at_the_extremes(divisor):
    near = [k * divisor + d for k in (0, 1, 2) for d in (-1, 0, 1)]
    check_division([*EXTREMES, *(id for id in near if -(2**63) <= id < 2**63)], divisor)


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    st.integers(1, 2**63 - 1) | st.integers(1, 100),
)
def test_division_is_unsigned(ids, divisor):
    check_division(ids, divisor)
