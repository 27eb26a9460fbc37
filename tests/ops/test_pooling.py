"""Gather and pool against torch's embedding_bag, and the gradient of the bag weights."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_cases import bags_of, bits, ids_of, make_group, make_table, random_bags
from torch.nn.functional import embedding_bag

from torchrec_dyn import ops
from torchrec_dyn.initializers import Normal

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Below, at and above each width that the kernel unrolls, and every kind of remainder.
COLUMNS = [1, 3, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 127, 128, 130]


def dense(table, ids):
    """Returns the rows of the distinct ids, [R, D], and the index of each id in them, [N]."""
    distinct, index = torch.unique(ids, return_inverse=True)
    return table.lookup(distinct)[0].double(), index


def expected_bags(table, ids, offsets, mode, weights=None):
    rows, index = dense(table, ids)
    if len(rows) == 0:
        return torch.zeros(offsets.numel() - 1, table.columns, dtype=torch.float64)
    given = None if weights is None else weights.double()
    if mode == "mean" and given is not None:
        summed = embedding_bag(
            index, rows, offsets, mode="sum", per_sample_weights=given, include_last_offset=True
        )
        return summed / offsets.diff().clamp(min=1)[:, None]
    return embedding_bag(
        index, rows, offsets, mode=mode, per_sample_weights=given, include_last_offset=True
    )


def normal_table(columns, name="t", dtype=torch.float32, **options):
    return make_table(
        name=name, embedding_dim=columns, dtype=dtype, initializer=Normal(0.0, 1.0), **options
    )


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_bags_are_torchs(columns, mode):
    table = normal_table(columns)
    ids, offsets = random_bags(columns, bags=70, longest=40, pool=60)
    got = make_group(table, pooling=mode)(ids, offsets, training=True)
    assert got.shape == (70, columns) and got.dtype == torch.float32
    expected = expected_bags(table, ids, offsets, mode)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    assert (got[offsets.diff() == 0] == 0).all()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5, 16, 96])
def test_weighted_bags_and_row_dtypes(columns, dtype, mode):
    table = normal_table(columns, dtype=dtype)
    ids, offsets = random_bags(3, bags=50, longest=12, pool=40)
    weights = torch.randn(ids.numel())
    got = make_group(table, pooling=mode)(ids, offsets, weights, training=True)
    expected = expected_bags(table, ids, offsets, mode, weights)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("output_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_dtypes_round_the_float_result(dtype, output_dtype):
    table = normal_table(33, dtype=dtype)
    ids, offsets = random_bags(4, bags=90, longest=6, pool=30)
    exact = make_group(table)(ids, offsets, training=True).detach()
    got = make_group(table, output_dtype=output_dtype)(ids, offsets, training=False)
    assert torch.equal(got, exact.to(output_dtype))
    sequences = make_group(table, pooling="none", output_dtype=output_dtype)
    assert torch.equal(
        sequences(ids, offsets, training=False), table.lookup(ids)[0].to(output_dtype)
    )


@pytest.mark.usefixtures("device")
def test_every_half_is_read_exactly():
    """All 65536 float16 and bfloat16 patterns, subnormals, infinities and NaN included."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    rows = torch.arange(1 << 16)
    layout = torch.tensor([[0, 1, 16, 1]])
    segments = torch.tensor([[0, 0, 1 << 16, 0, 1]])
    for dtype in (torch.float16, torch.bfloat16):
        block = patterns.view(dtype).reshape(-1, 1)
        for out in DTYPES:
            got = ops.gather_pool(rows, None, None, [block], layout, segments, False, 1 << 16, out)
            expected = block.flatten().float().to(out)
            same = (got == expected) | (got.isnan() & expected.isnan())
            assert same.all(), (dtype, out, patterns[~same][:5])


@pytest.mark.usefixtures("device")
def test_floats_of_every_kind_are_rounded_as_torch_does():
    """Also NaN of all bits, as in memory of 0xFF bytes: no sum of a conversion overflows (make sanitize)."""
    edges = [0, 0x800000, 0x33000000, 0x387FE000, 0x38800000, 0x477FEFFF, 0x477FF000, 0x7F800000]
    near = [edge + step for edge in edges for step in (-1, 0, 1)][1:]
    bits = torch.tensor([*near, 0x7FC00000, 0x7FFFEFFF, 0x7FFFF000, 0x7FFFFFFF])
    floats = torch.cat([bits, bits - 2**31]).int().view(torch.float32)
    count = len(floats)
    layout, segments = torch.tensor([[0, 1, 6, 1]]), torch.tensor([[0, 0, count, 0, 1]])
    block = torch.zeros(64, 1)
    block[:count, 0] = floats
    rows = torch.arange(count)
    for out in DTYPES:
        got = ops.gather_pool(rows, None, None, [block], layout, segments, False, count, out)
        expected = floats.to(out)
        same = (got == expected) | (got.isnan() & expected.isnan())
        assert same.all(), (out, floats[~same], got[~same])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("columns", [5, 16, 48, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bags_of_one_id_are_rows(columns, dtype):
    """With offsets or without; -0 reads as 0, and an absent row as zeros."""
    block = torch.randn(64, columns).to(dtype)
    block[:, 1], block[7, 2], block[9, 3] = -0.0, float("inf"), float("nan")
    rows = torch.randint(-1, 64, (300,))
    layout, segments = torch.tensor([[0, 1, 6, columns]]), torch.tensor([[0, 0, 300, 0, columns]])
    expected = torch.where((rows < 0)[:, None], 0.0, block.float()[rows] + 0.0).flatten()
    for offsets in (None, torch.arange(301)):
        for mean in (False, True):
            size = 300 * columns
            got = ops.gather_pool(
                rows, offsets, None, [block], layout, segments, mean, size, torch.float32
            )
            assert torch.equal(got.view(300, columns)[:, 3].isnan(), rows == 9)
            plain = ~expected.isnan()  # the bits of a NaN are the processor's
            assert torch.equal(bits(got[plain]), bits(expected[plain]))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("offsets", [[0, 1, 2, 2], [0, 0, 1, 3], [0, 0, 0, 0], [1, 2, 3, 3]])
def test_as_many_bags_as_ids_are_not_always_one_id_each(offsets):
    block, rows = torch.arange(1.0, 65.0).view(4, 16), torch.tensor([2, 0, 3])
    layout, segments = torch.tensor([[0, 1, 2, 16]]), torch.tensor([[0, 0, 3, 0, 16]])
    got = ops.gather_pool(
        rows, torch.tensor(offsets), None, [block], layout, segments, False, 48, torch.float32
    )
    expected = torch.stack([block[rows[begin:end]].sum(0) for begin, end in pairwise(offsets)])
    assert torch.equal(got.view(3, 16), expected)
    no_ids = ops.gather_pool(
        rows[:0], torch.zeros(4).long(), None, [block], layout, segments, False, 48, torch.float32
    )
    assert torch.equal(no_ids, torch.zeros(48))


@pytest.mark.usefixtures("device")
def test_tables_features_and_widths_side_by_side():
    """Three tables, five features: each feature has its own columns in the output of a bag."""
    tables = [normal_table(4, "a"), normal_table(17, "b"), normal_table(32, "c")]
    features, bags = [2, 1, 2], 11
    for mode in ("sum", "mean"):
        group = make_group(*tables, features=features, pooling=mode)
        ids, offsets = random_bags(5, bags=5 * bags, longest=7, pool=25)
        got = group(ids, offsets, training=True)
        of_feature = [tables[0], tables[0], tables[1], tables[2], tables[2]]
        expected = []
        for f, table in enumerate(of_feature):
            bounds = offsets[f * bags : (f + 1) * bags + 1]
            part = ids[bounds[0] : bounds[-1]]
            expected.append(expected_bags(table, part, bounds - bounds[0], mode))
        torch.testing.assert_close(got.double(), torch.cat(expected, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("device")
@given(
    sizes=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=3, max_size=3),
    seed=st.integers(0, 100),
)
def test_variable_batches_come_rank_by_rank(sizes, seed):
    """Bags are given as [F][ranks]; the output has, for each rank, the bags of each feature."""
    tables = [normal_table(3, "a"), normal_table(5, "b")]
    of_feature = [tables[0], tables[0], tables[1]]
    group = make_group(*tables, features=[2, 1])
    ids, offsets = random_bags(seed, bags=sum(map(sum, sizes)), longest=4, pool=9)
    got = group(ids, offsets, training=True, batch_sizes=sizes)
    first, pieces = 0, {}
    for feature, per_rank in enumerate(sizes):
        for rank, bags in enumerate(per_rank):
            bounds = offsets[first : first + bags + 1]
            part = ids[bounds[0] : bounds[-1]]
            pooled = expected_bags(of_feature[feature], part, bounds - bounds[0], "sum")
            pieces[rank, feature] = pooled.flatten()
            first += bags
    expected = torch.cat([pieces[rank, f] for rank in range(2) for f in range(3)])
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("device")
def test_sequences_are_the_rows_of_the_ids():
    tables = [normal_table(20, "a"), normal_table(20, "b")]
    group = make_group(*tables, features=[1, 2], pooling="none")
    ids, offsets = random_bags(6, bags=3 * 5, longest=4, pool=12)
    got = group(ids, offsets, training=True)
    cut = int(offsets[5])
    rows = [tables[0].lookup(ids[:cut])[0], tables[1].lookup(ids[cut:])[0]]
    assert torch.equal(got, torch.cat(rows))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("training", [True, False])
def test_empty_batches(pooling, training):
    group = make_group(normal_table(6, "a"), normal_table(6, "b"), features=[1, 2], pooling=pooling)
    width = 18 if pooling != "none" else 6
    nothing = ids_of()
    no_bags = group(nothing, torch.tensor([0]), training=training)
    assert no_bags.shape == (0, width)
    empty_bags = group(nothing, torch.zeros(7, dtype=torch.int64), training=training)
    assert empty_bags.shape == ((2, width) if pooling != "none" else (0, width))
    assert (empty_bags == 0).all()
    if training:
        (no_bags.sum() + empty_bags.sum()).backward()


@pytest.mark.xfail(strict=True, reason="find_and_pool takes no strided ids, lengths or offsets")
def test_offsets_of_int32_and_strided_ids_serve():
    table = normal_table(4)
    ids = torch.arange(20)[::2]
    group = make_group(table)
    expected = group(ids.contiguous(), torch.tensor([0, 4, 10]), training=True)
    got = group(ids, torch.tensor([0, 4, 10], dtype=torch.int32), training=True)
    assert torch.equal(got, expected)


def test_threads_do_not_change_the_bits(threads):
    table = normal_table(37)
    ids, offsets = random_bags(8, bags=3000, longest=6, pool=500)
    outputs = []
    for count in (1, 2, 4):
        threads(count)
        outputs.append(make_group(table)(ids, offsets, training=count == 1).detach())
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.usefixtures("device")
def test_a_row_that_is_not_there_counts_in_the_mean():
    """In evaluation an unseen id reads as a row of zeros; it does not make the bag shorter."""
    table = normal_table(4)
    group = make_group(table, pooling="mean")
    group(*bags_of([1]), training=True)
    row = table.lookup(ids_of(1))[0]
    got = group(*bags_of([1, 2, 3, 4], [2, 1], [2, 3], []), training=False)
    torch.testing.assert_close(got, torch.cat([row / 4, row / 2, 0 * row, 0 * row]))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_gradient_of_bag_weights(mode, dtype, training):
    tables = [normal_table(5, "a"), normal_table(19, "b")]
    group = make_group(*tables, features=[2, 1], pooling=mode)
    bags = 8
    ids, offsets = random_bags(9, bags=3 * bags, longest=5, pool=15)
    make_group(*tables, features=[2, 1])(ids, offsets, training=True)
    weights = torch.randn(ids.numel()).to(dtype).requires_grad_()
    plain = weights.detach().double().requires_grad_()
    expected = []
    for feature, table in enumerate([tables[0], tables[0], tables[1]]):
        bounds = offsets[feature * bags : (feature + 1) * bags + 1]
        part = slice(int(bounds[0]), int(bounds[-1]))
        args = (table, ids[part], bounds - bounds[0], mode, plain[part])
        expected.append(expected_bags(*args))
    upstream = torch.randn(bags, 29)
    (torch.cat(expected, 1) * upstream).sum().backward()
    (group(ids, offsets, weights, training=training) * upstream).sum().backward()
    assert weights.grad.dtype == dtype
    tolerance = 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(weights.grad.double(), plain.grad, rtol=tolerance, atol=tolerance)


# Outputs larger than the caches are stored past them: bit-equal to the outputs of small batches

LARGE = 8 << 20  # bytes; a larger float32 output is stored past the caches


def tables_of(widths, dtype=torch.float32):
    return [
        make_table(name=f"t{i}", embedding_dim=width, dtype=dtype, initializer=Normal(0.0, 1.0))
        for i, width in enumerate(widths)
    ]


def batch_of(bags, features):
    """Returns ids below 700 in bags of 0 to 3 ids, feature by feature; lengths [F, bags]; weights."""
    draw = torch.Generator().manual_seed(bags)
    lengths = torch.randint(0, 4, (features, bags), generator=draw)
    ids = torch.randint(0, 700, (int(lengths.sum()),), generator=draw)
    return ids, lengths, torch.randn(ids.numel(), generator=draw)


def forward(group, ids, lengths, weights, first, last):
    """Returns the output for the bags [first, last) of every feature."""
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    bags = lengths.shape[1]
    parts = [
        slice(int(bounds[f * bags + first]), int(bounds[f * bags + last]))
        for f in range(len(lengths))
    ]
    offsets = torch.cat([torch.zeros(1), lengths[:, first:last].flatten().cumsum(0)]).long()
    chosen = torch.cat([ids[part] for part in parts])
    given = None if weights is None else torch.cat([weights[part] for part in parts])
    return group(chosen, offsets, given, training=False)


def check_against_small_batches(threads, widths, pooling, is_weighted=False, dtype=torch.float32):
    tables = tables_of(widths, dtype)
    for table in tables:
        table.find_or_insert(torch.arange(600))  # ids from 600 on are absent
    group = make_group(*tables, pooling=pooling)
    bags = LARGE // 4 // sum(widths) + 37
    ids, lengths, weights = batch_of(bags, len(widths))
    weights = weights if is_weighted else None
    cut = bags // 9 + 1
    threads(1)
    small = [
        forward(group, ids, lengths, weights, first, min(first + cut, bags))
        for first in range(0, bags, cut)
    ]
    expected = torch.cat(small)
    assert expected.numel() * 4 > LARGE > 2 * small[0].numel() * 4
    for count in (1, 2, 4):
        threads(count)
        got = forward(group, ids, lengths, weights, 0, bags)
        assert got.shape == expected.shape
        assert torch.equal(bits(got), bits(expected)), count


@pytest.mark.parametrize("width", [16, 20, 24, 64, 100])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_large_outputs_are_those_of_small_batches(width, pooling, threads):
    check_against_small_batches(threads, [width], pooling)


@pytest.mark.parametrize("widths", [[17], [66], [18, 18], [16, 33, 15], [2, 64, 34], [6, 16, 18]])
def test_outputs_off_the_bounds_of_16_bytes(widths, threads):
    """A stride, or only the first column of a table, is not a multiple of 4."""
    check_against_small_batches(threads, widths, "sum")


@pytest.mark.parametrize("widths", [[20, 100], [16, 4, 64, 36]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_bags_of_several_tables(widths, dtype, threads):
    check_against_small_batches(threads, widths, "mean", is_weighted=True, dtype=dtype)


@pytest.mark.parametrize("width", [16, 20, 24, 64, 100, 17])
def test_large_sequences_are_their_rows(width, threads):
    (table,) = tables_of([width])
    group = make_group(table, pooling="none")
    ids = torch.arange(LARGE // 4 // width + 37) % 700
    offsets = torch.tensor([0, ids.numel()])
    group(ids, offsets, training=True)
    expected = table.lookup(torch.arange(700))[0][ids]
    for count in (1, 2, 4):
        threads(count)
        assert torch.equal(bits(group(ids, offsets, training=False)), bits(expected))
