"""Marks of rows, written and read by version, against plain Python."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_cases import ids_of

from torchrec_dyn import ops

pytestmark = pytest.mark.usefixtures("device")

LAST = 2**31 - 1
versions = st.sampled_from([0, 1, 2, LAST - 1, LAST])


def blocks_of(words, shift):
    """Returns blocks that begin with these words; the rest is 0. Later blocks have lower addresses."""
    blocks = torch.zeros(-(-len(words) // (1 << shift)), 1 << shift, 1, dtype=torch.int32)
    blocks.view(-1)[: len(words)] = torch.as_tensor(words, dtype=torch.int32)
    return list(blocks.flip(0))[::-1]


def words_of(blocks):
    return torch.cat(blocks).flatten().tolist() if blocks else []


@given(st.data())
def test_each_row_named_has_its_tables_version(data):
    shift = data.draw(st.integers(0, 3))
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))  # blocks; 0: no marks
    expected = [
        data.draw(st.lists(versions, min_size=size << shift, max_size=size << shift))
        for size in sizes
    ]
    tables = [blocks_of(words, shift) for words in expected]
    rows = [
        data.draw(st.lists(st.integers(-2, (size << shift) - 1 if size else 99), max_size=90))
        for size in sizes
    ]
    now = data.draw(st.lists(versions, min_size=len(sizes), max_size=len(sizes)))
    ops.mark_rows_(
        ids_of(*itertools.chain(*rows)),
        ids_of(0, *itertools.accumulate(map(len, rows))),
        list(itertools.chain(*tables)),
        torch.tensor([[sum(sizes[:t]), size, shift, 1] for t, size in enumerate(sizes)]),
        ids_of(*now),
    )
    for words, named, version in zip(expected, rows, now, strict=True):
        for row in named:
            if row >= 0 and words:
                words[row] = version
    assert [words_of(blocks) for blocks in tables] == expected


@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 9000, 40_000])
def test_marks_are_the_same_on_any_number_of_threads(threads, count, tables):
    """Several threads mark the same popular rows at once."""
    draw = torch.Generator().manual_seed(count)
    rows = [(torch.rand(count, generator=draw) ** 4 * 200).long() - 1 for _ in range(tables)]
    layout = torch.tensor([[4 * t, 4, 6, 1] for t in range(tables)])
    for number in (1, 2, 3, 4):
        threads(number)
        marks = blocks_of([0] * 256 * tables, 6)
        ops.mark_rows_(
            torch.cat(rows),
            torch.arange(tables + 1) * count,
            marks,
            layout,
            torch.arange(tables) + 7,
        )
        for t in range(tables):
            expected = torch.zeros(256, dtype=torch.int32)
            expected[rows[t][rows[t] >= 0]] = 7 + t
            assert torch.equal(torch.cat(marks[4 * t : 4 * t + 4]).flatten(), expected)


@pytest.mark.parametrize("wrong", [64, 2**63 - 1])
@pytest.mark.parametrize("place", [0, 63, 64, 199])
def test_an_error_marks_nothing(place, wrong):
    """Neither the rows before the invalid row nor the rows of another table are marked."""
    memory = torch.zeros(192, dtype=torch.int32)
    rows = torch.full((200,), 5)
    rows[place] = wrong
    with pytest.raises(RuntimeError, match=r"mark_rows_: expected rows below 64, .*got one above"):
        ops.mark_rows_(
            rows,
            ids_of(0, 100, 200),
            [memory[:64].view(64, 1), memory[64:128].view(64, 1)],
            torch.tensor([[0, 1, 6, 1], [1, 1, 6, 1]]),
            ids_of(3, 4),
        )
    assert not memory.any()


@pytest.mark.parametrize("count", [0, 1, 64, 9000, 40_000])
def test_the_first_places_of_rows_whose_bit_was_clear(threads, count):
    """On any number of threads; the second table keeps no marks, and its rows are not looked at."""
    draw = torch.Generator().manual_seed(count)
    rows = [(torch.rand(count, generator=draw) ** 4 * 2000).long() - 1 for _ in range(3)]
    rows[1] += 10**9
    layout = torch.tensor([[0, 4, 6, 1], [4, 0, 6, 1], [4, 2, 7, 1]])
    for number in (1, 2, 3):
        threads(number)
        marks = [torch.zeros(1 << shift, dtype=torch.uint8) for shift in (6, 6, 6, 6, 7, 7)]
        given = torch.cat(rows), torch.arange(4) * count, marks, layout
        places, begins = ops.mark_new_(*given)
        expected, ends = [], [0]
        for t, of_table in enumerate(rows):
            seen = set() if t != 1 else {*of_table.tolist()}
            for place, row in enumerate(of_table.tolist(), t * count):
                expected += [place] if row >= 0 and row not in seen else []
                seen.add(row)
            ends.append(len(expected))
        assert begins.tolist() == ends and places[: ends[-1]].tolist() == expected
        assert (places[ends[-1] :] == -1).all()
        num_set = sum(int((block >> bit & 1).sum()) for block in marks for bit in range(8))
        assert num_set == len(expected)
        assert ops.mark_new_(*given)[0].numel() == 0


@pytest.mark.parametrize("sizes", [[2, 0], [2, 0, 0], [0, 2], [0, 0], [2, 0, 1, 0]])
def test_a_table_without_rows_begins_where_the_one_before_ends(sizes):
    marks = [torch.zeros(64, dtype=torch.uint8) for _ in sizes]
    layout = torch.tensor([[t, 1, 6, 1] for t in range(len(sizes))])
    ends = [0, *itertools.accumulate(sizes)]
    places, begins = ops.mark_new_(torch.arange(ends[-1]), ids_of(*ends), marks, layout)
    assert begins.tolist() == ends and places.tolist() == [*range(ends[-1])]


def test_bits_set_by_number_are_the_bits_of_the_update():
    """The same bits as of `update_rows_`: row r of a block of 512 is bit (r >> 6 & 7) of byte r & 63."""
    marks = [torch.zeros(64, dtype=torch.uint8)]
    ops.mark_new_(ids_of(3, 70, 511), ids_of(0, 3), marks, torch.tensor([[0, 1, 6, 1]]))
    assert {n: int(byte) for n, byte in enumerate(marks[0]) if byte} == {3: 1, 6: 2, 63: 128}
