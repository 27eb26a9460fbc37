"""Lists of rows: those of lowest_rows in order, and the rows of lists that choose_listed takes."""

import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_samples import scored
from oracle import mix64, unmixed
from raw_maps import a_map
from score_blocks import FREE, blocks_of, write, write_rows
from table_cases import ids_of

from torchrec_dyn import ops

pytestmark = pytest.mark.usefixtures("device")


# The order of a list


def listed(ids, last_seen):
    """Returns the ids and last_seen of all rows in order."""
    rows = torch.arange(len(ids))
    slots, moved = a_map(ids, rows)
    blocks = blocks_of(len(ids), 12)
    write_rows(blocks, 12, rows, last_seen, rows * 0 + 1)
    found, of_found, seen, offsets = ops.lowest_rows(
        **scored(
            blocks, ids_of(0, len(blocks), 12, 1).view(1, 4), slots=slots, moved=moved, like=ids,
            questions=ids_of(0, len(ids), 0, FREE, len(ids)).view(1, 5), half_lives=None, in_order=True,
        )
    )  # fmt: skip
    assert offsets.tolist() == [0, len(ids)]
    assert torch.equal(ids[of_found], found) and torch.equal(last_seen[of_found], seen)
    return found.tolist()


def expected(ids, last_seen):
    pairs = zip(last_seen.tolist(), ids.tolist(), strict=True)
    return [number for _, number in sorted(pairs, key=lambda one: (one[0], mix64(one[1])))]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("high_halves", [1, 7, 1 << 32], ids=["one", "seven", "any"])
def test_many_are_sorted_even_if_their_mixed_ids_begin_alike(high_halves, far):
    """More rows than the radix sort leaves to a plain sort; equal high bits are sorted by the low bits.

    `far`: one mixed id is far from the others.
    """
    draw = torch.Generator().manual_seed(0)
    low = torch.randperm(5000, generator=draw) * 800_000
    high = torch.randint(high_halves, (5000,), generator=draw) << 32
    high[17] += far << 62
    ids = unmixed(high + low)
    last_seen = torch.randint(1 << 20, (5000,), generator=draw) // 200_000
    assert listed(ids, last_seen) == expected(ids, last_seen)


def test_two_of_one_step_with_equal_high_bits_are_in_the_order_of_their_low_bits():
    """A run of two is the shortest that is sorted by whole words; far ids beside it leave few bits first."""
    ids = unmixed(torch.tensor([0, -1, 2**62 + 1, 2**62]))  # -1: 2^64 - 1
    for last_seen in (ids_of(5, 5, 5, 5), ids_of(5, 6, 5, 5)):
        assert listed(ids, last_seen) == ids[[0, 3, 2, 1]].tolist()


# The rows of a list that have not changed


class Listed(NamedTuple):
    """A list of (id, row, last_seen) of a table, of which entries [begin, end) are looked at."""

    table: int
    entries: list[tuple[int, int, int]]
    begin: int
    end: int
    most: int


def chosen(tables, lists, shift):
    """Returns the (id, row) pairs that choose_listed takes of each list, and the firsts.

    tables: {row: last_seen} of each, with scores for 40 rows, or none for no scores.
    """
    blocks, layout = [], []
    for seen in tables:
        own = [] if seen is None else blocks_of(40, shift)
        write(own, shift, {row: (last_seen, 1) for row, last_seen in (seen or {}).items()})
        layout.append([len(blocks), len(own), shift, 1])
        blocks += own
    given = scored(
        blocks,
        torch.tensor(layout),
        listed=[torch.tensor(one.entries, dtype=torch.int64).view(-1, 3).T.contiguous() for one in lists],
        spans=torch.tensor([[one.table, one.begin, one.end, one.most] for one in lists]).long().view(-1, 4),
    )  # fmt: skip
    ids, rows, offsets, firsts = ops.choose_listed(**given)
    assert offsets.is_cpu and firsts.is_cpu and offsets[0] == 0
    pairs = list(zip(ids.tolist(), rows.tolist(), strict=True))
    assert len(pairs) == offsets[-1]
    return [pairs[a:b] for a, b in itertools.pairwise(offsets.tolist())], firsts.tolist()


def expected_choice(tables, one):
    """Returns the pairs and the first place of one list."""
    seen = tables[one.table] or {}
    places = [
        place
        for place in range(one.begin, one.end)
        if seen.get(one.entries[place][1], -1) == one.entries[place][2]
    ][: one.most]
    return [one.entries[place][:2] for place in places], places[0] if places else one.end


steps = st.integers(0, 3) | st.sampled_from([FREE - 1, FREE - 2])
entries = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-2, 70), steps)


@st.composite
def lists_of(draw, tables):
    found = draw(st.lists(entries, max_size=30))
    begin, end = sorted(draw(st.integers(0, len(found))) for _ in range(2))
    most = draw(st.integers(0, 5) | st.just(2**63 - 1))
    return Listed(draw(st.integers(0, tables - 1)), found, begin, end, most)


@given(st.data())
def test_the_first_unchanged_rows_are_chosen(data):
    """Several lists of one table or several; rows outside of a table, and tables without scores."""
    rows_seen = st.dictionaries(st.integers(0, 39), steps, max_size=40)
    tables = data.draw(st.lists(st.none() | rows_seen, min_size=1, max_size=3))
    lists = data.draw(st.lists(lists_of(len(tables)), max_size=4))
    pairs, firsts = chosen(tables, lists, shift=data.draw(st.integers(0, 6)))
    assert [*zip(pairs, firsts, strict=True)] == [expected_choice(tables, one) for one in lists]


def test_rows_seen_since_are_passed_over():
    """Seen later, listed later than seen, removed; ids repeat. The places count from the list's begin."""
    seen = {0: 5, 1: 6, 2: 5, 3: 7, 4: 5}
    entries = [(10, 0, 5), (11, 1, 5), (12, 2, 6), (13, 9, 5), (14, 3, 7), (14, 4, 5)]
    for begin, most, rows, first in ((0, 9, [0, 3, 4], 0), (1, 9, [3, 4], 4), (1, 1, [3], 4)):
        [pairs], firsts = chosen([seen], [Listed(0, entries, begin, 6, most)], 3)
        assert ([row for _, row in pairs], firsts) == (rows, [first])
    assert chosen([seen], [Listed(0, entries, 1, 4, 9)], 3) == ([[]], [4])
    assert chosen([seen], [Listed(0, entries, 0, 6, 0)], 3) == ([[]], [6])


@pytest.mark.parametrize("most", [1, 700, 2**62])
def test_long_lists(most):
    """Longer than the bursts of scores that are asked for at once; two lists of one table."""
    rows = torch.randperm(4096, generator=torch.Generator().manual_seed(2))
    blocks = blocks_of(4096, 7)
    write_rows(blocks, 7, rows, rows % 5, rows * 0)
    list_of_rows = torch.stack([rows * 3, rows, rows % 5 + (rows % 4 == 0).long()])
    spans = ids_of(0, 100, 4000, most, 0, 4000, 4096, most).view(2, 4)
    ids, found, offsets, firsts = ops.choose_listed(
        **scored(blocks, ids_of(0, 32, 7, 1).view(1, 4), listed=[list_of_rows] * 2, spans=spans)
    )
    wanted, places = [], []
    for _, begin, end, _ in spans.tolist():
        own = [i for i in range(begin, end) if int(rows[i]) % 4][:most]
        wanted.append(rows[own])
        places.append(own[0])
    assert torch.equal(found, torch.cat(wanted)) and torch.equal(ids, found * 3)
    assert offsets.diff().tolist() == [len(one) for one in wanted] and firsts.tolist() == places


def test_kept_rows_are_not_chosen_and_keep_their_scores():
    """By lists and by searches, by count and by last_seen; a kept row may occur twice."""
    rows, ids = torch.arange(6), ids_of(50, 51, 52, 53, 54, 55)
    slots, moved = a_map(ids, rows)
    blocks = blocks_of(6, 3)
    write_rows(blocks, 3, rows, rows // 2, 6 - rows)
    before = blocks[0].clone()
    kept = {"kept": ids_of(0, -1, 4, 0), "kept_offsets": ids_of(0, 4)}
    layout = ids_of(0, 1, 3, 1).view(1, 4)
    listed = torch.stack([ids, rows, rows // 2])
    _, found, _, firsts = ops.choose_listed(
        **scored(blocks, layout, listed=[listed], spans=ids_of(0, 0, 6, 2).view(1, 4), **kept)
    )
    assert found.tolist() == [1, 2] and firsts.tolist() == [1]
    questions = ids_of(0, 6, 0, 9, 2, 0, 6, 1, 9, 2).view(2, 5)
    maps = {"slots": slots, "moved": moved, "like": ids}
    asked = {"questions": questions, "half_lives": None, "in_order": False}
    _, found, _, _ = ops.lowest_rows(**scored(blocks, layout, **maps, **asked, **kept))
    oldest = min(2, 3, key=lambda row: mix64(50 + row))
    assert sorted(found.tolist()[:2]) == sorted((1, oldest))
    assert sorted(found.tolist()[2:]) == [3, 5]
    assert torch.equal(blocks[0], before)
