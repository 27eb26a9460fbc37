"""Outputs that the caches cannot hold are stored past them: the same bits as those of small batches."""

import pytest
import torch
from table_cases import bits, make_group, make_table

from torchrec_dyn.initializers import Normal

LARGE = 8 << 20  # bytes of float32 output, beyond which it is stored past the caches


@pytest.fixture
def threads():
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def tables_of(widths, dtype=torch.float32):
    return [
        make_table(name=f"t{i}", embedding_dim=width, dtype=dtype, initializer=Normal(0.0, 1.0))
        for i, width in enumerate(widths)
    ]


def batch_of(bags, features):
    """Bags of 0, 1, 2 and 3 ids of 700: feature by feature, [features * bags]."""
    draw = torch.Generator().manual_seed(bags)
    lengths = torch.randint(0, 4, (features, bags), generator=draw)
    ids = torch.randint(0, 700, (int(lengths.sum()),), generator=draw)
    return ids, lengths, torch.randn(ids.numel(), generator=draw)


def forward(group, ids, lengths, weights, first, last):
    """The bags [first, last) of every feature."""
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
        table.find_or_insert(torch.arange(600))  # the others are absent
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
    """A stride, or only a table's first column, is no multiple of 4."""
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
