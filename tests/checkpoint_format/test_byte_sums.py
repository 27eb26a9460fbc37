"""Sums of bytes: the same however a file is written, another for every changed byte."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_dyn.checkpoint_format.byte_sums import (
    SUMMED_BYTES,
    FileSums,
    RunningSums,
    chunk_sum,
    sums_of,
)

DATA = torch.randint(
    0, 256, (2 * SUMMED_BYTES + 777,), generator=torch.Generator().manual_seed(0)
).to(torch.uint8)


@pytest.fixture(scope="module")
def whole() -> FileSums:
    return sums_of(DATA)


def test_sums_are_pinned():
    """Directories that exist are checked by them."""
    chunk = torch.zeros(SUMMED_BYTES, dtype=torch.uint8)
    chunk[:11] = torch.arange(1, 12, dtype=torch.uint8)
    chunk[-1] = 255
    assert [chunk_sum(0, chunk), chunk_sum(7, chunk)] == [16669885384262472617, 4814935904517962925]
    assert chunk_sum(3, torch.zeros_like(chunk)) == 0


def test_sums_follow_the_formula():
    """Rows of 128 int64, the row number as id."""
    from torchrec_dyn.checkpoint_format import content_sum

    rows = DATA[:SUMMED_BYTES].view(torch.int64).view(-1, 128)
    for number in (0, 5):
        ids = torch.arange(1024) + 1024 * number
        assert chunk_sum(number, DATA[:SUMMED_BYTES]) == content_sum("", "bytes", ids, rows)


@given(
    cuts=st.lists(st.integers(0, len(DATA)), max_size=5),
    restarts=st.sets(st.integers(0, 4)),
)
def test_the_sums_of_parts(whole, cuts, restarts):
    """In any pieces, by any number of writers one after another."""
    running, begin = RunningSums(FileSums()), 0
    for number, end in enumerate(sorted([*cuts, len(DATA)])):
        running.add(DATA[begin:end])
        begin = end
        if number in restarts:
            before = running.sums()
            assert before == sums_of(DATA[:end])
            running = RunningSums(before)
    assert running.sums() == whole
    assert running.sums() == whole, "reading the sums does not change them"
    assert whole.total == sum(whole.sums) % 2**64


@given(place=st.integers(0, len(DATA) - 1), change=st.integers(1, 255))
def test_a_changed_byte_changes_the_sum_of_its_chunk(whole, place, change):
    changed = DATA.clone()
    changed[place] ^= change
    found = sums_of(changed).sums
    different = [
        n for n, (one, other) in enumerate(zip(found, whole.sums, strict=True)) if one != other
    ]
    assert different == [place // SUMMED_BYTES]


def test_chunks_and_rows_that_changed_places(whole):
    one, other = DATA[:SUMMED_BYTES], DATA[SUMMED_BYTES : 2 * SUMMED_BYTES]
    swapped = torch.cat([other, one, DATA[2 * SUMMED_BYTES :]])
    assert sums_of(swapped).total != whole.total
    rows = DATA.clone()
    rows[:1024], rows[1024:2048] = DATA[1024:2048], DATA[:1024]
    assert sums_of(rows) != whole


@pytest.mark.parametrize("size", [0, 1, SUMMED_BYTES - 1, SUMMED_BYTES, SUMMED_BYTES + 1])
def test_lengths(size):
    running = RunningSums(FileSums())
    running.add(DATA[3 : 3 + size])  # not aligned
    assert running.sums() == sums_of(DATA[3 : 3 + size])
    assert running.sums().bytes == size and len(running.sums().sums) == -(-size // SUMMED_BYTES)
