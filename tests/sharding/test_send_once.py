"""SendOnce: distinct ids sent in place of a batch, and the way back of rows and gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_cases import hard_ids, ids_of, make_group
from torchrec import KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer
from torchrec_dyn.sharding.batches import Expansion, SendOnce
from torchrec_dyn.sharding.sent_batch import as_weights, counts_of
from torchrec_dyn.table.shard import TableShard

# Column shards as (table, features): tables alone, tables of several shards, and one of no ids.
LAYOUTS = [
    [("t", 1)],
    [("t", 1), ("u", 2), ("v", 1)],
    [("t", 2), ("u", 1), ("t", 2)],
    [("t", 1), ("t", 1), ("u", 3), ("t", 1), ("u", 3)],
]


@st.composite
def batches(draw):
    """A layout, and a batch in which the shards of a table have the same bags."""
    layout = draw(st.sampled_from(LAYOUTS))
    bags = draw(st.integers(1, 4))
    some = st.lists(
        draw(st.sampled_from([hard_ids, st.sampled_from([0, 1, -1, 2**63 - 1])])), max_size=6
    )
    of_table = {
        name: [[draw(some) for _ in range(bags)] for _ in range(features)]
        for name, features in layout
    }
    return layout, [bag for name, _ in layout for feature in of_table[name] for bag in feature]


def features_of(layout, bags) -> KeyedJaggedTensor:
    count = sum(features for _, features in layout)
    return KeyedJaggedTensor(
        [f"f{i}" for i in range(count)],
        ids_of(*(one for bag in bags for one in bag)),
        lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int32),
        stride=len(bags) // count,
    )


@given(batches(), st.booleans())
def test_each_shard_sends_its_distinct_ids_in_order_of_first_sight(case, counted):
    layout, bags = case
    features = features_of(layout, bags)
    once, expansion = SendOnce(layout, counted, "where")(features)
    assert once.keys() == features.keys() and once.stride() == features.stride()
    assert once.lengths().dtype == features.lengths().dtype
    # All under the first feature of the shard: the owner then has them rank after rank.
    per_feature = once.length_per_key()
    stride, feature = features.stride(), 0
    sent = once.values().split(per_feature)
    counts = [None] * len(sent)
    if counted:
        counts = counts_of(once.weights()).split(per_feature)
    else:
        assert once.weights_or_none() is None
    for _, width in layout:
        ids = [one for bag in bags[feature * stride : (feature + width) * stride] for one in bag]
        distinct = dict.fromkeys(ids)
        assert sent[feature].tolist() == list(distinct)
        assert not any(per_feature[feature + 1 : feature + width])
        lengths = once.lengths()[feature * stride : (feature + 1) * stride]
        assert int(lengths.max() - lengths.min()) <= 1 and int(lengths.sum()) == len(distinct)
        if counted:
            assert counts[feature].tolist() == [ids.count(one) for one in distinct]
        feature += width
    # The way back, with rows that are the ids themselves (as two exact halves).
    rows = torch.stack([once.values() >> 32, once.values() & 0xFFFFFFFF], 1).double()
    found = Expansion(expansion.places)(rows)
    expected = torch.stack([features.values() >> 32, features.values() & 0xFFFFFFFF], 1).double()
    assert torch.equal(found, expected)


# Denormal floats, integers that float32 does not have, infinities, quiet and signalling NaNs.
HARD_COUNTS = [1, 2, 2**23 - 1, 2**24 + 1, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FA00000,
               0x7FC00001, 2**31 - 1]  # fmt: skip


@given(st.lists(st.sampled_from(HARD_COUNTS) | st.integers(1, 2**31 - 1), max_size=20))
def test_counts_come_out_of_weights_as_they_went_in(counts):
    weights = as_weights(ids_of(*counts))
    assert weights.dtype == torch.float32
    assert counts_of(weights).tolist() == counts


def test_more_ids_than_a_count_can_tell():
    values = torch.zeros(1, dtype=torch.int64).expand(2**31)  # takes no memory
    features = KeyedJaggedTensor(["f0"], values, lengths=torch.tensor([2**31]))
    with pytest.raises(
        ValueError, match=r"EC: expected at most 2\*\*31 - 1 ids in a batch, got 2147483648"
    ):
        SendOnce([("t", 1)], True, "EC")(features)


@pytest.mark.everyday(4)
@pytest.mark.parametrize("sent, columns", [(1, 8), (7, 64), (3000, 8), (3000, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_summed_in_the_order_of_the_batch(threads, sent, columns, dtype):
    draw = torch.Generator().manual_seed(sent)
    places = (torch.rand(6000, generator=draw) ** 3 * sent).long()
    grad = (torch.rand(6000, columns, generator=draw) - 0.5).to(dtype)
    expected = torch.zeros(sent, columns)
    for place, one in zip(places.tolist(), grad.float(), strict=True):
        expected[place] += one
    for number in (1, 2, 4):
        threads(number)
        rows = torch.zeros(sent, columns, dtype=dtype, requires_grad=True)
        Expansion(places)(rows).backward(grad)
        assert torch.equal(rows.grad, expected.to(dtype))


def scored_table(**options):
    return TableShard(
        name="t", num_embeddings=50, embedding_dim=4,
        optimizer=RowOptimizer(kind=OptimizerKind.EXACT_SGD, learning_rate=0.1),
        config=DynamicTableConfig(**options),
    )  # fmt: skip


@given(
    st.lists(st.lists(st.tuples(hard_ids, st.integers(1, 5)), max_size=8), min_size=1, max_size=6),
    st.sampled_from([
        {"eviction": dyn.LeastFrequentlyUsed()},
        {"admission": dyn.AdmitAfter(4), "eviction": dyn.LeastRecentlyUsed()},
        {"admission": dyn.AdmitWithProbability(0.3)},
    ]),
)  # fmt: skip
def test_a_table_with_a_life_counts_times_as_it_counts_repeats(steps, config):
    tables = [scored_table(**config) for _ in range(2)]
    once, each = (make_group(table, pooling="none") for table in tables)
    for batch in steps:
        ids, times = ids_of(*(one for one, _ in batch)), ids_of(*(n for _, n in batch))
        repeated = ids.repeat_interleave(times)
        rows = once(ids, ids_of(0, len(ids)), training=True, times=times)
        expected = each(repeated, ids_of(0, len(repeated)), training=True)
        assert torch.equal(rows.repeat_interleave(times, 0), expected)
    states = [table.export_state() for table in tables]
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name
    counts = [table.stats() for table in tables]
    for name in ("ids_seen", "hits", "unseen", "refused", "inserted", "waiting"):
        assert counts[0][name] == counts[1][name], name


WRONG_TIMES = [
    (ids_of(1), "expected \\[2\\] int64 times, one for each id, got \\[1\\] of torch.int64"),
    (torch.ones(2), "expected \\[2\\] int64 times, one for each id, got \\[2\\] of torch.float32"),
    (ids_of(1, 0), r"expected times in \[1, 2\^32\), got 0 to 1"),
    (ids_of(2**32, 1), r"expected times in \[1, 2\^32\), got 1 to 4294967296"),
]


@pytest.mark.parametrize("times, message", WRONG_TIMES)
def test_times_that_are_none_change_nothing(times, message):
    table = scored_table(eviction=dyn.LeastFrequentlyUsed())
    group = make_group(table, pooling="none")
    group(ids_of(1, 2), ids_of(0, 2), training=True)
    before, counted = table.export_state(), table.stats()
    with pytest.raises(ValueError, match=message):
        group(ids_of(1, 3), ids_of(0, 2), training=True, times=times)
    assert table.stats() == counted
    for name, value in table.export_state().items():
        assert torch.equal(value, before[name])
