"""Scores of rows, written, touched and read, against plain Python."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_samples import scored
from score_blocks import FREE, MOST, blocks_of, read_rows, write, write_rows
from table_cases import ids_of

from torchrec_dyn import ops

pytestmark = pytest.mark.usefixtures("device")


# Prepared tables on a GPU are copies: a test does not see what becomes of them.
on_hosts = pytest.mark.parametrize("device", ["cpu", "simt"], indirect=True)


def touch(rows, offsets, blocks, layout, steps, times=None):
    given = scored(blocks, layout, rows=rows, table_offsets=offsets, steps=steps, times=times)
    ops.touch_scores_(**given)


def read(blocks, shift, rows):
    seen, counts = read_rows(blocks, shift, ids_of(*rows))
    return list(zip(seen.tolist(), counts.tolist(), strict=True))


@on_hosts
@given(st.data())
def test_touch_counts_every_occurrence_of_every_table(data):
    shift = data.draw(st.integers(0, 3))
    sizes = data.draw(
        st.lists(st.integers(0, 3), min_size=1, max_size=4)
    )  # number of blocks; 0: no scores
    tables = [blocks_of(size << shift, shift) for size in sizes]
    before = [
        {row: data.draw(st.tuples(st.integers(0, 9), st.sampled_from([0, 3, MOST - 1, MOST])))
         for row in range(size << shift)}
        for size in sizes
    ]  # fmt: skip
    for blocks, scores in zip(tables, before, strict=True):
        write(blocks, shift, scores)
    touched = [
        data.draw(st.lists(st.integers(-1, (size << shift) - 1 if size else 5), max_size=20))
        for size in sizes
    ]
    steps = data.draw(st.lists(st.integers(0, FREE - 1), min_size=len(sizes), max_size=len(sizes)))
    often = st.sampled_from([1, 2, 3, 2**31 - 1, MOST - 1, MOST])
    times = [[data.draw(often) for _ in rows] for rows in touched]
    if not data.draw(st.booleans()):
        times = [[1] * len(rows) for rows in touched]
    is_once = all(each == 1 for of_table in times for each in of_table)
    touch(
        ids_of(*itertools.chain(*touched)),
        ids_of(0, *torch.tensor([len(rows) for rows in touched]).cumsum(0).tolist()),
        list(itertools.chain(*tables)),
        torch.tensor([[sum(sizes[:t]), size, shift, 1] for t, size in enumerate(sizes)]),
        ids_of(*steps),
        None if is_once else ids_of(*itertools.chain(*times)),
    )
    for blocks, scores, rows, often, step in zip(
        tables, before, touched, times, steps, strict=True
    ):
        added = dict.fromkeys(rows, 0)
        for row, each in zip(rows, often, strict=True):
            added[row] += each
        expected = {
            row: (step, min(count + added[row], MOST)) if row in added else (seen, count)
            for row, (seen, count) in scores.items()
        }
        assert read(blocks, shift, expected) == list(expected.values())


@on_hosts
@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 5000])
def test_touch_gives_the_same_words_on_any_number_of_threads(threads, count, tables):
    """Popular rows and rows of one cache line, distributed over threads: few rows of the second table."""
    draw = torch.Generator().manual_seed(count)
    sizes = [count, count // 50, count][:tables]
    rows = [(torch.rand(size, generator=draw) ** 4 * 200).long() - 1 for size in sizes]
    layout = torch.tensor([[4 * t, 4, 6, 1] for t in range(tables)])
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    times = [torch.randint(1, 2**20, (size,), generator=draw) for size in sizes]
    seen_once = [torch.bincount(one[one >= 0], minlength=256) for one in rows]
    seen_often = [
        torch.zeros(256, dtype=torch.int64).index_add_(0, one[one >= 0], often[one >= 0])
        for one, often in zip(rows, times, strict=True)
    ]
    for number, often in itertools.product((1, 2, 3, 4), (None, torch.cat(times))):
        expected = seen_once if often is None else seen_often
        threads(number)
        blocks = blocks_of(256 * tables, 6)
        touch(torch.cat(rows), offsets, blocks, layout, torch.arange(tables) + 7, often)
        words = torch.cat(blocks).view(tables, 256)
        for t in range(tables):
            seen = torch.where(expected[t] > 0, 7 + t, -1)
            assert torch.equal(words[t], (seen << 32) + expected[t])


@on_hosts
@pytest.mark.parametrize("wrong", [64, -2, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("place", [0, 63, 64, 99])
def test_touch_writes_nothing_if_a_row_is_outside_and_says_so(place, wrong):
    memory = torch.zeros(192, dtype=torch.int64)
    block = memory[64:128].view(64, 1)
    rows = torch.full((100,), 5)
    rows[place] = wrong
    with pytest.raises(RuntimeError, match=r"touch_scores_: expected rows in .*, got one outside"):
        touch(rows, ids_of(0, 100), [block], ids_of(0, 1, 6, 1).view(1, 4), ids_of(3))
    assert not memory.any()


@on_hosts
@given(st.data())
def test_scores_of_several_tables_are_written_and_read(data):
    """Row -1, rows that repeat with equal scores, and tables without scores."""
    shift = data.draw(st.integers(0, 3))
    sizes = data.draw(st.lists(st.integers(0, 3), max_size=4))
    tables = [blocks_of(size << shift, shift) for size in sizes]
    layout = torch.tensor([[sum(sizes[:t]), size, shift, 1] for t, size in enumerate(sizes)])
    kept = [{row: (4, row) for row in range(size << shift)} for size in sizes]
    for own, scores in zip(tables, kept, strict=True):
        write(own, shift, scores)
    score = st.tuples(st.sampled_from([-1, 0, 9, FREE - 1]), st.sampled_from([0, 1, MOST]))
    rows = [
        data.draw(st.lists(st.integers(-1, (size << shift) - 1 if size else 5), max_size=20))
        for size in sizes
    ]
    written = [{row: data.draw(score) for row in {*own}} for own in rows]
    offsets = ids_of(0, *itertools.accumulate(map(len, rows)))
    given = scored(
        list(itertools.chain(*tables)), layout.long().view(-1, 4),
        rows=ids_of(*itertools.chain(*rows)), table_offsets=offsets,
    )  # fmt: skip
    pairs = [of[row] for of, own in zip(written, rows, strict=True) for row in own]
    seen, counts = (ids_of(*(pair[i] for pair in pairs)) for i in (0, 1))
    ops.write_scores_(**given, last_seen=seen, counts=counts)
    expected = []
    for own, scores, size, asked in zip(written, kept, sizes, rows, strict=True):
        scores |= {row: one for row, one in own.items() if row >= 0 and size}
        scores[-1] = (-1, 0)
        expected += [scores.get(row, (-1, 0)) for row in asked]
    expected = [(one, count if one >= 0 else 0) for one, count in expected]
    got = ops.read_scores(**given)
    assert list(zip(*(one.tolist() for one in got), strict=True)) == expected
    for own, scores in zip(tables, kept, strict=True):
        del scores[-1]
        now = [(one, count if one >= 0 else 0) for one, count in scores.values()]
        assert read(own, shift, scores) == now


@on_hosts
@pytest.mark.parametrize("place", [0, 63, 64, 99])
def test_a_wrong_score_of_several_tables_writes_nothing(place):
    rows, seen, counts = torch.arange(100) % 64, torch.full((100,), 7), torch.full((100,), 3)
    for wrong, of in ((64, rows), (-2, rows), (FREE, seen), (-2, seen), (MOST + 1, counts)):
        right, of[place] = int(of[place]), wrong
        blocks = blocks_of(64, 6)
        given = scored(
            blocks,
            ids_of(0, 1, 6, 1, 1, 0, 6, 1).view(2, 4),
            rows=rows,
            table_offsets=ids_of(0, 100, 100),
        )
        with pytest.raises(RuntimeError, match=r"write_scores_: expected rows in \[-1, 64\)"):
            ops.write_scores_(**given, last_seen=seen, counts=counts)
        assert torch.equal(blocks[0], blocks_of(64, 6)[0])
        of[place] = right


@on_hosts
def test_scores_are_written_and_read_back():
    blocks = blocks_of(12, 2)
    scores = {0: (0, 0), 3: (FREE - 1, MOST), 4: (7, 1), 11: (1, 7)}
    write(blocks, 2, scores)
    assert read(blocks, 2, [0, 3, 4, 11, 1, -1, 4]) == [*scores.values(), (-1, 0), (-1, 0), (7, 1)]
    write(blocks, 2, {0: (-1, 5), 4: (9, 3)})
    assert read(blocks, 2, [4, 0]) == [(9, 3), (-1, 0)]  # free: no count
    assert blocks[0][0].item() == -(2**32)


@on_hosts
@pytest.mark.parametrize("room", [0, 1, 700, 1999, 2000, 2001, 3999, 4000, 4001])
def test_counts_of_popular_rows_saturate(room):
    """A count that occurrences at once bring to the largest one stays there, and the step is not changed."""
    rows = torch.arange(4000) % 2
    blocks = blocks_of(4, 1)
    write(blocks, 1, {0: (9, MOST - room), 1: (3, MOST - room), 2: (9, 5)})
    touch(rows, ids_of(0, 4000), blocks, ids_of(0, 2, 1, 1).view(1, 4), ids_of(9))
    count = MOST - room + min(room, 2000)
    assert read(blocks, 1, [0, 1, 2, 3]) == [(9, count), (9, count), (9, 5), (-1, 0)]


@on_hosts
@pytest.mark.parametrize("number", [1, 2, 4])
def test_many_scores_are_read_at_any_thread_count(threads, number):
    blocks = blocks_of(20_000, 10)
    rows = torch.randperm(20_000, generator=torch.Generator().manual_seed(1))
    write_rows(blocks, 10, rows, rows * 5, rows + 1)
    threads(number)
    seen, counts = read_rows(blocks, 10, rows)
    assert torch.equal(seen, rows * 5) and torch.equal(counts, rows + 1)
