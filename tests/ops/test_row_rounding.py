"""Rows of 16-bit floats round stochastically: unbiased, pure, to a neighbour. Sums repeat bit for bit."""

import numpy as np
import pytest
import torch
from oracle import EXTREME_IDS, GOLDEN, mix64
from table_cases import bags_of, ids_of, make_group, make_table, random_bags, same_state

from torchrec_dyn.initializers import Constant, Normal, table_key
from torchrec_dyn.optimizers import OptimizerKind, RowOptimizer

SHORT = [torch.float16, torch.bfloat16]
every_kind = pytest.mark.parametrize("kind", list(OptimizerKind), ids=lambda kind: kind.name)


def nudged(dtype, ids, nudge, start=1.0, columns=8, **options):
    """Returns the table and its rows, which start with `start`, after one SGD step by `nudge`."""
    table = make_table(
        dtype=dtype, embedding_dim=columns, num_embeddings=1 << 17, initializer=Constant(start),
        optimizer=RowOptimizer(learning_rate=1.0), **options,
    )  # fmt: skip
    group = make_group(table, pooling="none")
    output = group(ids, torch.tensor([0, ids.numel()]), training=True)
    output.backward(-torch.as_tensor(nudge).expand(output.shape))
    return table, table.lookup(ids)[0]


def neighbours(dtype, exact):
    """Returns the values of `dtype` just below and above each float64; both are equal to an exact value."""
    nearest = exact.to(dtype)
    up = torch.nextafter(nearest, torch.tensor(float("inf"), dtype=dtype))
    down = torch.nextafter(nearest, torch.tensor(-float("inf"), dtype=dtype))
    below = torch.where(nearest.double() <= exact, nearest, down)
    return below, torch.where(nearest.double() >= exact, nearest, up)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("start", [1.0, -1.0, 0.0, 3.0e-6, 4095.0])
def test_rounding_goes_to_a_neighbour(dtype, start):
    nudge = torch.randn(2000, 8) * max(abs(start), 1e-5) * 0.003
    _, got = nudged(dtype, torch.arange(2000), nudge, start)
    first = torch.tensor(start).to(dtype).float()
    below, above = neighbours(dtype, (first + nudge).double())
    assert ((got == below) | (got == above)).all()
    assert (got == below).any() and (got == above).any()


def rounding_draws(key: int, ids: list[int], columns: int, step: int) -> np.ndarray:
    """Returns the 16-bit draws [M, columns] of stochastic rounding: SplitMix64, four per word, low first."""
    of_step = mix64(key + step * GOLDEN)
    draws = np.empty((len(ids), columns), dtype=np.uint32)
    for row, number in enumerate(ids):
        state = mix64(of_step ^ mix64(number))
        words = [mix64(state + (word + 1) * GOLDEN) for word in range(-(-columns // 4))]
        draws[row] = [words[c // 4] >> 16 * (c % 4) & 0xFFFF for c in range(columns)]
    return draws


@pytest.mark.parametrize("dtype", SHORT)
def test_rounding_draws_are_the_oracles(dtype):
    """A draw r rounds up if and only if fraction + r / 2^16 >= 1; this pins key, id, column and step."""
    ids = [*EXTREME_IDS, *range(5, 100)]
    table, _ = nudged(dtype, ids_of(*ids), 0.0, columns=150)
    group, unit = make_group(table, pooling="none"), torch.finfo(dtype).eps
    output = group(ids_of(*ids), torch.tensor([0, len(ids)]), training=True)
    output.backward(torch.full_like(output, -0.375 * unit))
    key = table_key(0, "t", "rounding")
    draws = rounding_draws(key, ids, 150, step=2).astype(np.int64)
    expected = torch.from_numpy(draws >= 0x10000 * 5 // 8)
    assert torch.equal(table.lookup(ids_of(*ids))[0] > 1.0, expected)


# The first eight draws at step 1 with key 5, from a separate implementation of SplitMix64.
PINNED = {
    0: [25540, 5279, 52776, 39640, 45142, 61080, 20794, 43522],
    -1: [2239, 42377, 13197, 58695, 61622, 24939, 63801, 14675],
}


def test_rounding_draws_are_pinned():
    """A GPU, a later version and a resumed run must round equally."""
    for number, draws in PINNED.items():
        assert rounding_draws(5, [number], 8, step=1).tolist() == [draws]


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 30, 31, 33, 64])
def test_column_shards_draw_as_the_whole_row_does(first):
    ids, nudge = torch.arange(200), 0.4 * torch.finfo(torch.float16).eps
    _, whole = nudged(torch.float16, ids, nudge, columns=150)
    for columns in (1, 16, 31, 32, 33, 70):
        shard = make_table(
            dtype=torch.float16, embedding_dim=150, first_column=first, columns=columns,
            initializer=Constant(1.0), optimizer=RowOptimizer(learning_rate=1.0),
        )  # fmt: skip
        output = make_group(shard, pooling="none")(ids, torch.tensor([0, 200]), training=True)
        output.backward(torch.full_like(output, -nudge))
        assert torch.equal(shard.lookup(ids)[0], whole[:, first : first + columns]), columns


@pytest.mark.parametrize("dtype", SHORT)
def test_rounding_is_pure(dtype):
    """Draws depend on (seed, table, id, column, step) only, not on row number or batch."""
    ids, nudge = torch.arange(300), 0.4 * torch.finfo(dtype).eps
    _, whole = nudged(dtype, ids, nudge, columns=24)
    assert torch.equal(nudged(dtype, ids.flip(0), nudge, columns=24)[1].flip(0), whole)
    assert torch.equal(nudged(dtype, ids[100:], nudge, columns=24)[1], whole[100:])
    for other in ({"seed": 1}, {"name": "u"}):
        assert (nudged(dtype, ids, nudge, columns=24, **other)[1] != whole).any()


@pytest.mark.parametrize("columns", [8, 64])
def test_float16_overflow_is_seen_and_bfloat16_keeps_the_range(columns):
    _, got = nudged(torch.float16, torch.arange(50), 1000.0, start=65504.0, columns=columns)
    assert got.isinf().all()
    _, got = nudged(torch.float16, torch.arange(50), 10.0, start=65504.0, columns=columns)
    assert (got == 65504.0).all()
    _, got = nudged(torch.bfloat16, torch.arange(50), 1e30, start=65504.0, columns=columns)
    assert got.isfinite().all()
    for dtype in SHORT:
        _, got = nudged(dtype, torch.arange(50), float("nan"), columns=columns)
        assert got.isnan().all()
        _, got = nudged(dtype, torch.arange(50), float("-inf"), columns=columns)
        assert (got == -float("inf")).all()


def boundaries():
    """Returns float32 numbers: near every float16, near every middle of two, and with random bits."""
    draw = np.random.default_rng(4)
    halves = np.arange(0x10000, dtype=np.uint16).view(np.float16).astype(np.float32)
    centres = np.concatenate([halves, np.float32([65520, 65536, 3e38, 2**-24, 2**-25])])
    near = centres.view(np.uint32)[:, None] + np.arange(-3, 4, dtype=np.int64)[None, :]
    ties = halves.view(np.uint32)[:, None] + np.arange(4095, 4098, dtype=np.int64)[None, :]
    any_bits = draw.integers(0, 2**32, 1 << 18)
    close = draw.integers(0x30000000, 0x48000000, 1 << 18)
    every = np.concatenate([near.ravel(), ties.ravel(), any_bits, close]) % 2**32
    return every.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("dtype", SHORT)
def test_every_short_number_is_read_as_torch_reads_it(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    table = make_table(dtype=dtype, embedding_dim=64, num_embeddings=1 << 10)
    table.find_or_insert(torch.arange(1024))
    table.assign(torch.arange(1024), every.view(1024, 64))
    group = make_group(table, pooling="none")
    output = group(torch.arange(1024), torch.tensor([0, 1024]), training=False)
    assert torch.equal(output.nan_to_num(7e5), every.float().view(1024, 64).nan_to_num(7e5))


def test_float16_rounds_as_numbers_do():
    """Constant updates of a zero row: floor(magnitude / step + draw / 2^16) steps.

    Computed in float64 with the 13 high bits of the draw.
    """
    values = boundaries()
    values = np.concatenate([values, np.zeros(-len(values) % 64, np.float32)]).reshape(-1, 64)
    ids = np.arange(len(values))
    _, got = nudged(torch.float16, torch.from_numpy(ids), torch.from_numpy(values), 0.0, columns=64)
    draws = rounding_draws(table_key(0, "t", "rounding"), ids.tolist(), 64, step=1).astype(
        np.float64
    )
    magnitude = np.abs(values.astype(np.float64))
    inside = magnitude < 65504.0
    exponent = np.maximum(np.frexp(np.where(inside, magnitude, 1.0))[1] - 1, -14)
    step = np.ldexp(1.0, exponent - 10)
    small = np.rint(np.ldexp(np.where(inside, magnitude, 0.0), 37)) * 2.0**-37  # as a float
    magnitude = np.where(magnitude < 2.0**-14, small, magnitude)
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = np.abs(values.astype(np.float16)).astype(np.float64)
        rounded = np.where(
            inside, np.floor(magnitude / step + draws // 8 * 2.0**-13) * step, nearest
        )
    expected = torch.from_numpy(np.copysign(rounded, values.astype(np.float64)))
    assert torch.equal(got.double().nan_to_num(7e5), expected.nan_to_num(7e5))


def trained(kind, dtype, batches, **options):
    table = make_table(
        kind, dtype=dtype, embedding_dim=20, num_embeddings=1 << 16,
        initializer=Normal(0.0, 0.3),
    )  # fmt: skip
    group = make_group(table, **options)
    for seed, (ids, offsets, sizes) in enumerate(batches):
        output = group(ids, offsets, training=True, batch_sizes=sizes)
        draw = torch.Generator().manual_seed(seed)
        output.backward(torch.randn(output.shape, generator=draw))
    return table.export_state()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_the_bits(kind, dtype, threads):
    """Batches large enough to be cut into parts; popular rows occur hundreds of times."""
    batches = [(*random_bags(seed, 900, 30, 1500 if seed else 7), None) for seed in range(3)]
    states = []
    for count in (1, 2, 4):
        threads(count)
        states.append(trained(kind, dtype, batches))
    assert same_state(states[0], states[1]) and same_state(states[0], states[2])


def test_threads_do_not_change_the_bits_of_variable_batches(threads):
    """Two features of one table and two ranks, so that segments are not in the order of the ids."""
    ids, offsets = random_bags(1, 1200, 20, 30)
    states = []
    for count in (1, 2, 4):
        threads(count)
        batches = [(ids, offsets, [[300, 300], [300, 300]])]
        states.append(trained(OptimizerKind.EXACT_SGD, torch.float32, batches, features=[2]))
    assert same_state(states[0], states[1]) and same_state(states[0], states[2])


def test_variable_batches_sum_in_the_order_of_the_ids():
    """So one rank with the whole batch and many ranks with parts of it agree bit for bit."""
    for bags, pool in ((10, 3), (1200, 30)):
        ids, offsets = random_bags(1, 2 * bags, 20, pool)
        half = bags // 2
        upstream = torch.randn(2, bags, 20)  # feature, bag
        states = []
        for sizes in ([[bags], [bags]], [[half, bags - half], [half, bags - half]]):
            table = make_table(embedding_dim=20, initializer=Normal(0.0, 0.3))
            group = make_group(table, features=[2])
            output = group(ids, offsets, training=True, batch_sizes=sizes)
            parts = [upstream] if len(sizes[0]) == 1 else [upstream[:, :half], upstream[:, half:]]
            output.backward(torch.cat([part.flatten() for part in parts]))
            states.append(table.export_state())
        assert same_state(*states), bags


def test_bags_of_other_rows_do_not_change_a_row():
    """Permuted ids in a bag and bags of other ids between do not change the order of a row's sum."""
    upstream = torch.randn(3, 20)
    states = []
    for bags in ([[1, 2], [2, 1, 3], [1]], [[2, 1], [3, 1, 2], [1]]):
        table = make_table(embedding_dim=20, initializer=Normal(0.0, 0.3))
        make_group(table)(*bags_of(*bags), training=True).backward(upstream)
        states.append(table.export_state())
    assert same_state(*states)
