"""The rows with the lowest scores, against a plain sort."""

import pytest
import torch
from device_ops import CPU
from hypothesis import given
from hypothesis import strategies as st
from oracle import GOLDEN, WORD, signed, unmixed
from raw_maps import a_map
from score_blocks import FREE, MOST, blocks_of, write
from table_cases import hard_ids, ids_of

from torchrec_dyn import ops


class Scored:
    """A map and the scores of its rows; all other rows are free."""

    def __init__(self, ids, rows, seen, counts, shift=6, is_growing=False, spare=0):
        """Builds the map and the scores; each argument of the rows is [N] int64."""
        self.ids, self.rows_of, self.seen, self.counts = ids, rows, seen, counts
        self.slots, self.moved = a_map(ids, rows, is_growing)
        self.shift = shift
        self.blocks = blocks_of(max(rows.tolist(), default=0) + 1 + spare, shift)
        ops.write_scores_(rows, seen, counts, self.blocks, shift)
        self.rows = len(self.blocks) << shift
        self.held = torch.cat(self.slots)
        self.place_of_row = torch.full((self.rows + 1,), -1)  # by row + 1, as slots hold it
        self.place_of_row[self.held[:, 1]] = torch.arange(len(self.held))
        self.marks = torch.zeros(self.rows, dtype=torch.int64)

    def lowest(self, by_count, before, most, rows=None):
        """Returns (id, row) pairs [M, 2]; asserts that they are in the order of the device."""
        rows = self.rows if rows is None else rows
        ids, found = ops.lowest_scores(
            self.slots, self.moved, self.blocks, self.shift, rows, by_count, before, most
        )
        places = self.place_of_row[found + 1]
        assert torch.equal(self.held[places, 0], ids)
        order = (
            ops.mix64(ids) ^ -(2**63)
            if ops.lowest_scores is not CPU.lowest_scores.default
            else places
        )
        assert bool((order[1:] > order[:-1]).all())
        return torch.stack([ids, found], dim=1)

    def expected(self, by_count, before, most, rows=None):
        """Returns (id, row) pairs [M, 2] of a plain sort, lowest first."""
        seen, counts = self.seen, self.counts
        # A row of step `before` with count 0 was assigned for that step and not seen yet.
        is_old = (seen < before) | ((seen == before) & (counts == 0))
        is_asked = self.rows_of < (self.rows if rows is None else rows)
        chosen = (is_old & (seen != FREE) & is_asked).nonzero().flatten()
        mixed = ops.mix64(self.ids[chosen]) ^ -(2**63)  # in unsigned order
        chosen = chosen[mixed.argsort()]
        chosen = chosen[(counts if by_count else seen)[chosen].argsort(stable=True)[:most]]
        return torch.stack([self.ids[chosen], self.rows_of[chosen]], dim=1)

    def check(self, *asked):
        got = self.lowest(*asked)
        assert self.same(got, self.expected(*asked))
        return got.tolist()

    def same(self, got, expected):
        """Returns True if two tensors of pairs [M, 2] hold the same pairs, in any order."""
        if len(got) != len(expected):
            return False
        self.marks[expected[:, 1]] = torch.arange(1, len(expected) + 1)
        places = self.marks[got[:, 1]] - 1  # -1: not expected; the rows of `got` are distinct
        self.marks[expected[:, 1]] = 0
        return bool((places >= 0).all()) and torch.equal(got, expected[places])


def scored_of(scores, **options):
    """Returns a `Scored` of {id: (row, last_seen, count)}."""
    columns = zip(*scores.values(), strict=True) if scores else ((), (), ())
    return Scored(ids_of(*scores), *(ids_of(*column) for column in columns), **options)


# Keys near the bounds of the bins that count keys: 2048 single keys, then digits of 11 bits. Kernels of a GPU
# count digits only.
keys = st.one_of(
    st.integers(0, 3),
    st.sampled_from(
        [2046, 2047, 2048, 2049, 4095, 2**21, 2**21 + 1, 2**22, 2**31, FREE - 2, FREE - 1]
    ),
    st.integers(0, FREE - 1),
)


@pytest.mark.usefixtures("device")
@given(st.data())
def test_the_lowest_are_those_of_a_plain_sort(data):
    ids = data.draw(st.lists(hard_ids, max_size=60, unique=True))
    rows = data.draw(st.permutations(range(len(ids) + data.draw(st.integers(0, 70)))))
    few = data.draw(st.lists(keys, min_size=1, max_size=4))
    score = st.tuples(st.sampled_from(few), st.sampled_from([*few, MOST]))
    scored = scored_of(
        {number: (row, *data.draw(score)) for number, row in zip(ids, rows, strict=False)},
        shift=data.draw(st.integers(0, 8)),
        is_growing=data.draw(st.booleans()),
        spare=data.draw(st.integers(0, 100)),
    )
    for _ in range(4):
        scored.check(
            data.draw(st.booleans()),
            data.draw(st.sampled_from([*few, FREE, FREE + 1, 2**62, -(2**63)]) | keys),
            data.draw(st.integers(0, len(ids) + 2) | st.just(2**63 - 1)),
            data.draw(st.integers(0, scored.rows)),
        )


@pytest.mark.everyday(8)
@pytest.mark.parametrize("is_growing", [False, True])
@pytest.mark.parametrize("span", [1, 5, 3000, FREE])
def test_many_rows_at_any_thread_count(threads, device, is_growing, span):
    """Several parts of slots and of rows; all rows tie, or many, few or none of them."""
    draw = torch.Generator().manual_seed(span)
    ids = (torch.arange(9000) - 4500) * 2654435761
    rows = torch.randperm(300_000, generator=draw)[:9000]
    seen, counts = torch.randint(span, (2, 9000), generator=draw)
    scored = Scored(ids, rows, seen, counts, shift=12, is_growing=is_growing)
    for by_count in (False, True):
        for before, most in ((span // 2, 4000), (FREE, 140), (FREE, 8999), (FREE, 9000), (1, 10)):
            expected = scored.expected(by_count, before, most)
            for number in (1, 2, 4) if device == "cpu" else (1,):
                threads(number)
                assert scored.same(scored.lowest(by_count, before, most), expected)


@pytest.mark.usefixtures("device")
def test_boundaries():
    scored = scored_of({10 + k: (k, 5 + k % 3, 9 - k % 2) for k in range(12)}, is_growing=True)
    assert (
        scored.check(False, 5, 100) == [] == scored.check(True, 5, 100)
    )  # no row is below `before`
    assert len(scored.check(False, 6, 100)) == 4
    assert scored.check(False, 100, 0) == []
    assert len(scored.check(False, 100, 12)) == len(scored.check(True, 100, 13)) == 12
    assert scored.check(False, 100, 4) == scored.check(False, 6, 4)
    assert scored.check(False, 100, 5, 0) == []
    assert {row for _, row in scored.check(True, 100, 100, 7)} == set(range(7))
    assert scored_of({}).check(False, 9, 9) == []
    write(scored.blocks, scored.shift, {0: (-1, 0)})
    read = {row for _, row in scored.lowest(False, 2**62, 100).tolist()}
    assert 0 not in read  # free, for any `before`


MANY = 66_000  # more than 2^16 ties, which are cut by a bound
# The bits of unsigned mixed ids as int64.
MIXED = {
    "random": lambda k: k * signed(GOLDEN),
    "all tiny": lambda k: k,
    "all huge": lambda k: -1 - k,
    "one owner's": lambda k: signed(WORD // 8 * 5) + (k * signed(GOLDEN)) % (WORD // 8),
    "two heaps": lambda k: torch.where(k % 7 > 0, k, -1 - k),
}


@pytest.mark.everyday(10)
@pytest.mark.parametrize("is_growing", [False, True])
@pytest.mark.parametrize("mixed", MIXED)
def test_many_ties_are_cut_by_mixed_id_however_these_lie(threads, device, mixed, is_growing):
    """Half of the rows tie, with no row or half of the rows below; or a quarter ties and is taken whole."""
    ids = unmixed(MIXED[mixed](torch.arange(2 * MANY)))
    rows = torch.randperm(2 * MANY, generator=torch.Generator().manual_seed(1))
    seen, counts = ids_of(3, 4).repeat(MANY), ids_of(0, 2, 1, 2).repeat(MANY // 2)
    scored = Scored(ids, rows, seen, counts, shift=12, is_growing=is_growing)
    for by_count, mosts in ((False, (1, 1000, MANY - 1, MANY)), (True, (MANY, MANY * 3 // 2))):
        ordered = scored.expected(by_count, 9, 2 * MANY)
        for most in mosts:
            found = []
            for number in (1, 2) if device == "cpu" else (1,):
                threads(number)
                found.append(scored.lowest(by_count, 9, most))
            assert torch.equal(found[0], found[-1])
            assert scored.same(found[0], ordered[:most])


@pytest.mark.parametrize(("is_growing", "number"), [(False, 2), (True, 1)])
def test_more_rows_than_are_marked_by_bytes(threads, is_growing, number):
    """Above 2^20 rows the CPU marks rows by bits. Of 4,000 ids here, 1,000 are below 2,000 ties."""
    threads(number)
    ids = (torch.arange(4000) - 2000) * 2654435761
    rows = torch.cat([torch.arange(3000) * 349, torch.arange(1000) + 2**20 + 8])
    seen, counts = ids_of(4, 2, 6, 4).repeat(1000), ids_of(1, 3, 3, 5, 3).repeat(800)
    scored = Scored(ids, rows, seen, counts, shift=12, is_growing=is_growing)
    asked = 2**20 + 1008  # a table has no scores after its last row
    for most in (700, 1000, 1001, 2500, 3000, 3500, 4000):
        scored.check(False, 9, most, asked)
    scored.check(True, 9, 900, asked)
    scored.check(True, 6, 1500, asked)
    assert len(scored.check(False, 9, 4000, asked - 1)) == 3999


def test_ties_beyond_the_sample_are_found():
    """The sampled slots hold low mixed ids, all other slots high ones: the first bound is far too low."""
    ids = torch.arange(160_000) * 2654435761
    slots, moved = a_map(ids, torch.arange(160_000))
    held = slots[0][slots[0][:, 1] > 0]
    mixed = ops.mix64(held[:, 0].contiguous())
    place = slots[0][:, 1].nonzero().flatten()
    is_low = mixed >= 0  # unsigned below 2^63
    runs = 19  # every 19th run of 64 slots is sampled, see the assertion
    ties = held[is_low == (place // 64 % runs == 0)]
    assert len(ties) > 1 << 16 and len(ties) >> 12 == runs
    blocks = blocks_of(160_000, 12)
    ops.write_scores_(
        ties[:, 1] - 1, ids_of(4).expand(len(ties)).contiguous(), ties[:, 0] * 0, blocks, 12
    )
    got, _ = ops.lowest_scores(slots, moved, blocks, 12, 160_000, False, 9, 30_000)
    order = (ops.mix64(ties[:, 0].contiguous()) ^ -(2**63)).argsort()
    assert torch.equal(got.sort().values, ties[order[:30_000], 0].sort().values)
