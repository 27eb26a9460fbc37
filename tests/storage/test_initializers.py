"""Initial rows: a pure function of (seed, table name, id, column) with the right distribution."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import EXTREME_IDS, WORD
from table_cases import hard_ids, ids_of, make_group, make_table

from torchrec_dyn import ops
from torchrec_dyn.initializers import (
    Constant,
    Normal,
    TruncatedNormal,
    Uniform,
    default_initializer,
    table_key,
)

pytestmark = pytest.mark.usefixtures("device")

# Test vectors of Random123: counter, key, result. Source: random123/tests/kat_vectors, philox4x32 10.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        0x299F31D0A4093822,
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
UNIT_NORMAL = statistics.NormalDist()
FOUR = [
    Uniform(-0.25, 0.75),
    Normal(1.0, 2.0),
    TruncatedNormal(0.5, 1.0, -0.5, 2.0),
    Constant(0.125),
]


def fresh_rows(initializer, ids, columns=8, key=11, first_column=0, dtype=torch.float32):
    kind, parameters = initializer.parameters()
    shift = (len(ids) - 1).bit_length()
    block = torch.full((1 << shift, columns), math.nan, dtype=dtype)
    rows = torch.arange(len(ids))
    ops.init_rows_(ids_of(*ids), rows, [block], shift, columns, first_column, kind, parameters, key)
    return block[: len(ids)]


def philox4x32(key: int, counter: np.ndarray) -> np.ndarray:
    """Returns Philox4x32-10 of counters [M, 4] of uint32, [M, 4].

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            product1 >> np.uint64(32) ^ c1 ^ np.uint64(k0),
            product1 & low,
            product0 >> np.uint64(32) ^ c3 ^ np.uint64(k1),
            product0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_the_oracle_gives_the_known_answers(counter, key, answer):
    assert philox4x32(key, np.array([counter], dtype=np.uint32)).tolist() == [answer]


def test_the_op_gives_the_first_known_answer():
    """Counter zero is id 0, columns 0 to 3; on [0, 2^32) each word becomes a whole number."""
    row = fresh_rows(Uniform(0.0, 2.0**32), [0], columns=4, key=0)[0]
    words = torch.tensor(KNOWN_ANSWERS[0][2], dtype=torch.float64) + 0.5
    assert torch.equal(row, words.float())


def initial_units(key: int, ids: list[int], columns: int) -> np.ndarray:
    """Returns the uniform numbers in (0, 1), [M, columns], of initial rows: four columns a Philox call."""
    calls = -(-columns // 4)
    words = [divmod(number % WORD, 1 << 32) for number in ids]
    counter = np.array([[low, high, call, 0] for high, low in words for call in range(calls)])
    drawn = philox4x32(key % WORD, counter).reshape(len(ids), 4 * calls)
    return (drawn[:, :columns].astype(np.float64) + 0.5) / 2.0**32


def test_the_op_gives_the_oracles_words():
    ids = [*EXTREME_IDS, 3, 1 << 32, -(1 << 32), 123456789012345]
    for key in (0, 5, -1, -(2**63)):
        units = torch.from_numpy(initial_units(key, ids, 150)).float()
        for first, columns in ((0, 19), (0, 150), (3, 16), (2, 71), (31, 119)):
            got = fresh_rows(Uniform(0.0, 1.0), ids, columns, key, first)
            assert torch.equal(got, units[:, first : first + columns])


def test_normal_rows_are_the_quantiles_of_the_oracles_numbers():
    ids = list(range(-40, 40))
    units = initial_units(11, ids, 8)
    expected = np.vectorize(lambda u: 1.0 + 2.0 * UNIT_NORMAL.inv_cdf(u))(units)
    torch.testing.assert_close(
        fresh_rows(Normal(1.0, 2.0), ids), torch.from_numpy(expected).float(), rtol=3e-7, atol=3e-7
    )


@pytest.mark.parametrize("probability", [1e-300, 1e-30, 1e-12, 1e-7, 0.01, 0.0749, 0.0751, 0.4])
def test_normal_quantile(probability):
    """Draws from a tiny range of probability, so that the draw hardly matters, in all three branches."""
    sliver = [-math.inf, math.inf, 0.0, 1.0, probability, probability * (1 + 1e-12)]
    block = torch.zeros(1, 1)
    ops.init_rows_(ids_of(1), ids_of(0), [block], 0, 1, 0, 2, sliver, 3)
    expected = UNIT_NORMAL.inv_cdf(probability)
    assert block.item() == pytest.approx(expected, rel=2e-7)
    sliver[4:] = [1 - probability, 1 - probability]
    if probability > 1e-8:
        ops.init_rows_(ids_of(1), ids_of(0), [block], 0, 1, 0, 2, sliver, 3)
        assert block.item() == pytest.approx(UNIT_NORMAL.inv_cdf(1 - probability), rel=2e-7)


@pytest.mark.everyday(4)
@pytest.mark.parametrize("initializer", FOUR, ids=lambda i: type(i).__name__)
@given(ids=st.lists(hard_ids, min_size=1, max_size=20, unique=True), cut=st.integers(1, 12))
def test_rows_depend_on_id_and_column_alone(initializer, ids, cut):
    whole = fresh_rows(initializer, ids, 13)
    assert not whole.isnan().any()
    assert torch.equal(fresh_rows(initializer, ids[::-1], 13).flip(0), whole)
    assert torch.equal(fresh_rows(initializer, ids[:1], 13), whole[:1])
    left = fresh_rows(initializer, ids, cut)
    right = fresh_rows(initializer, ids, 13 - cut, first_column=cut)
    assert torch.equal(torch.cat([left, right], 1), whole)


def test_rows_do_not_depend_on_how_the_table_met_the_ids():
    """One batch, many batches in another order, prefetch, a column shard, another limit or rank."""
    ids = [*EXTREME_IDS, *range(100, 300)]
    initializer = Uniform(-1.0, 1.0)
    one = make_table(embedding_dim=10, initializer=initializer)
    one.find_or_insert(ids_of(*ids))
    expected = one.lookup(ids_of(*ids))[0]
    two = make_table(embedding_dim=10, initializer=initializer, row_limit=500)
    group = make_group(two)
    for number in reversed(ids):
        batch = ids_of(number), torch.tensor([0, 1])
        (group.prefetch if number % 2 else lambda *b: group(*b, training=True))(*batch)
    assert torch.equal(two.lookup(ids_of(*ids))[0], expected)
    shard = make_table(embedding_dim=10, initializer=initializer, first_column=3, columns=5)
    shard.find_or_insert(ids_of(*ids))
    assert torch.equal(shard.lookup(ids_of(*ids))[0], expected[:, 3:8])


def test_rows_depend_on_seed_and_name():
    def rows(**options):
        table = make_table(embedding_dim=32, initializer=Uniform(-1.0, 1.0), **options)
        table.find_or_insert(torch.arange(20))
        return table.lookup(torch.arange(20))[0]

    assert torch.equal(rows(), rows(seed=0, name="t", num_embeddings=77))
    for other in (rows(seed=1), rows(name="u"), rows(seed=-1)):
        assert (other != rows()).all(1).all()


# Kind; low, high, mean, deviation, low and high probability; and the sum of the bits of 31,500 numbers,
# each number times its place, modulo 2^64.
PINNED = [
    (1, [-0.25, 0.75, 0.0, 1.0, 0.0, 1.0], 252467084026484185),
    (2, [-math.inf, math.inf, 0.0, 1.0, 0.0, 1.0], -6923907988978410),
    (2, [-math.inf, math.inf, 1.0, 2.0, 0.0, 1.0], 197321881295694981),
    (2, [-0.5, 2.0, 0.5, 1.0, 0.15, 0.95], 311596216924263675),
    (2, [-99.0, 99.0, 0.0, 1.0, 1e-19, 1e-15], -524375855472355231),
]


@pytest.mark.parametrize(("kind", "parameters", "pinned"), PINNED)
def test_initial_rows_are_pinned(kind, parameters, pinned):
    """A run on another machine, or on a GPU, starts with the same rows. Do not change the numbers."""
    block = torch.empty(512, 63)
    ids = ids_of(*EXTREME_IDS, *range(500 - len(EXTREME_IDS)))
    ops.init_rows_(ids, torch.arange(500), [block], 9, 63, 2, kind, parameters, 11)
    bits = block[:500].flatten().view(torch.int32).to(torch.int64)
    assert int((bits * torch.arange(1, len(bits) + 1)).sum()) == pinned


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_rows_are_the_float_rows_to_nearest(dtype):
    ids = list(range(500))
    exact = fresh_rows(Normal(0.0, 1.0), ids)
    assert torch.equal(fresh_rows(Normal(0.0, 1.0), ids, dtype=dtype), exact.to(dtype))
    tiny = fresh_rows(Uniform(-1e-7, 1e-7), ids)
    assert torch.equal(fresh_rows(Uniform(-1e-7, 1e-7), ids, dtype=dtype), tiny.to(dtype))


def kolmogorov_smirnov(values, cdf):
    """Returns sqrt(n) times the largest distance of the empirical distribution from `cdf`."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = len(ordered)
    expected = np.array([cdf(v) for v in ordered])
    steps = np.arange(n + 1) / n
    return math.sqrt(n) * max(
        np.abs(expected - steps[:-1]).max(), np.abs(expected - steps[1:]).max()
    )


CUMULATIVE = {
    Uniform(-0.25, 0.75): lambda v: v + 0.25,
    Normal(1.0, 2.0): statistics.NormalDist(1.0, 2.0).cdf,
    TruncatedNormal(0.5, 1.0, -0.5, 2.0): lambda v: (
        (UNIT_NORMAL.cdf(v - 0.5) - UNIT_NORMAL.cdf(-1.0))
        / (UNIT_NORMAL.cdf(1.5) - UNIT_NORMAL.cdf(-1.0))
    ),
    TruncatedNormal(0.0, 1.0, 3.0, 4.0): lambda v: (
        (UNIT_NORMAL.cdf(-3.0) - UNIT_NORMAL.cdf(-v))
        / (UNIT_NORMAL.cdf(-3.0) - UNIT_NORMAL.cdf(-4.0))
    ),
}


@pytest.mark.parametrize("initializer", CUMULATIVE, ids=repr)
@pytest.mark.parametrize("what", ["ids of one column", "columns of one id", "keys"])
def test_distribution(initializer, what):
    """Varies each argument alone. By chance 1.95 is exceeded once in 1000; the draws are fixed."""
    if what == "ids of one column":
        values = fresh_rows(initializer, list(range(20_000)), 1)
    elif what == "columns of one id":
        values = fresh_rows(initializer, [-7], 20_000)
    else:
        keys = [table_key(seed, "t", "initial row") for seed in range(1500)]
        values = torch.cat([fresh_rows(initializer, [5], 4, key) for key in keys])
    assert kolmogorov_smirnov(values.flatten(), CUMULATIVE[initializer]) < 1.95


def test_columns_and_ids_are_independent():
    rows = fresh_rows(Normal(0.0, 1.0), list(range(5000)), 16)
    by_column = torch.corrcoef(rows.T) - torch.eye(16)
    assert by_column.abs().max() < 0.06  # 4.2 standard deviations of 1 / sqrt(5000)
    assert abs(torch.corrcoef(torch.stack([rows[1:].flatten(), rows[:-1].flatten()]))[0, 1]) < 0.015


@pytest.mark.parametrize(
    "cut",
    [
        (0.0, 1.0, -0.5, 0.25),
        (0.0, 1.0, 7.0, 8.0),
        (0.0, 1.0, -8.0, -7.0),
        (0.0, 1.0, 12.0, 99.0),
        (0.0, 1.0, -99.0, -36.0),
        (5.0, 0.1, 4.0, 4.5),
        (0.0, 1.0, -100.0, 100.0),
    ],
)
def test_truncated_normal_stays_inside_its_bounds(cut):
    rows = fresh_rows(TruncatedNormal(*cut), list(range(3000)))
    low, high = cut[2:]
    assert rows.isfinite().all()
    assert (rows >= low).all() and (rows <= high).all()
    assert rows.unique().numel() > 1000


def test_the_default_is_torchrecs():
    bound = default_initializer(400).high
    assert (bound, default_initializer(400).low) == (0.05, -0.05)
    table = make_table(num_embeddings=400)
    table.find_or_insert(torch.arange(400))
    rows = table.lookup(torch.arange(400))[0]
    assert rows.abs().max() < 0.05 and rows.abs().max() > 0.049


def test_key_is_pinned():
    """Initial rows depend on the key, so a change of its formula makes a restarted run differ."""
    assert table_key(0, "user", "initial row") == -4329158366158074590
    assert table_key(0, "user", "initial row") != table_key(0, "user", "rounding")
    assert table_key(1, "1", "rounding") != table_key(11, "", "rounding")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Uniform(-1e308, 0.0),
        lambda: Uniform(-2e38, 2e38),  # both bounds are float32, their distance is not
        lambda: Normal(0.0, 1e39),
        lambda: Constant(-1e39),
    ],
)
def test_rows_that_float32_cannot_hold_are_refused(make):
    with pytest.raises(ValueError, match="expected a finite number, got"):
        make()
