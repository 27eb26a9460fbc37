"""The rows with the lowest scores, against a plain sort; and lists of them in order."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_samples import scored
from oracle import GOLDEN, WORD, signed, unmixed
from raw_maps import a_map
from score_blocks import FREE, MOST, blocks_of, write, write_rows
from table_cases import hard_ids, ids_of

from torchrec_dyn import ops
from torchrec_dyn.life.clock import Clock
from torchrec_dyn.life.decay import Decay
from torchrec_dyn.policies import LeastFrequentlyUsed

MOST_HALVINGS = 40


class Question(NamedTuple):
    """The `most` lowest rows of a table among its first `rows`, all by default; begins [40] of half-lives."""

    by_count: bool
    before: int
    most: int
    rows: int | None = None
    begins: list[int] | None = None
    table: int = 0


class Scored:
    """A map and the scores of its rows; all other rows are free."""

    def __init__(self, ids, rows, seen, counts, shift=6, is_growing=False, spare=0):
        """Builds the map and the scores; each argument of the rows is [N] int64."""
        self.ids, self.rows_of, self.seen, self.counts = ids, rows, seen, counts
        self.slots, self.moved = a_map(ids, rows, is_growing)
        self.shift = shift
        self.blocks = blocks_of(max(rows.tolist(), default=0) + 1 + spare, shift)
        write_rows(self.blocks, shift, rows, seen, counts)
        self.rows = len(self.blocks) << shift
        self.marks = torch.zeros(self.rows, dtype=torch.int64)

    def expected(self, question):
        """Returns (id, row) pairs [M, 2] of a plain sort, lowest first."""
        seen, counts, before = self.seen, self.counts, question.before
        # A row of step `before` with count 0 was assigned for that step and not seen yet.
        is_old = (seen < before) | ((seen == before) & (counts == 0))
        is_asked = self.rows_of < (self.rows if question.rows is None else question.rows)
        chosen = (is_old & (seen != FREE) & is_asked).nonzero().flatten()
        mixed = ops.mix64(self.ids[chosen]) ^ -(2**63)  # in unsigned order
        chosen = chosen[mixed.argsort()]
        keys = self.keys(question.begins) if question.by_count else seen
        chosen = chosen[keys[chosen].argsort(stable=True)[: question.most]]
        return torch.stack([self.ids[chosen], self.rows_of[chosen]], dim=1)

    def keys(self, begins):
        """Returns the counts, halved once for each half-life that has begun since, in 256ths."""
        if begins is None:
            return self.counts
        begun = sum((self.seen >= begin).long() for begin in begins)
        return (self.counts << 8).bitwise_right_shift(len(begins) - begun).clamp_(max=MOST)

    def same(self, got, expected):
        """Returns True if two tensors of pairs [M, 2] hold the same pairs, in any order."""
        if len(got) != len(expected):
            return False
        self.marks[expected[:, 1]] = torch.arange(1, len(expected) + 1)
        places = self.marks[got[:, 1]] - 1  # -1: not expected; the rows of `got` are distinct
        self.marks[expected[:, 1]] = 0
        return bool((places >= 0).all()) and torch.equal(got, expected[places])

    def lowest(self, *asked):
        """Returns (id, row) pairs [M, 2]."""
        [found] = answers([self], [Question(*asked)])
        return found

    def check(self, *asked):
        got = self.lowest(*asked)
        assert self.same(got, self.expected(Question(*asked)))
        return got.tolist()


def answers(tables, questions, in_order=False):
    """Returns (id, row) pairs [M, 2] of each question, or (id, row, last_seen) if in order."""
    growing = [table for table in tables if len(table.slots) == 2]
    layout, first = [], 0
    for table in tables:
        layout.append([first, len(table.blocks), table.shift, 1])
        first += len(table.blocks)
    all_rows = [tables[one.table].rows if one.rows is None else one.rows for one in questions]
    asked = [
        [one.table, rows, one.by_count, one.before, one.most]
        for one, rows in zip(questions, all_rows, strict=True)
    ]
    half_lives = None
    if any(one.begins for one in questions):
        half_lives = torch.tensor([one.begins or [-1] * MOST_HALVINGS for one in questions])
    arguments = scored(
        [block for table in tables for block in table.blocks],
        torch.tensor(layout),
        slots=[*(table.slots[0] for table in tables), *(table.slots[1] for table in growing)],
        moved=torch.cat([table.moved for table in tables]),
        like=torch.zeros(1, dtype=torch.int64),
        questions=torch.tensor(asked, dtype=torch.int64).view(-1, 5),
        half_lives=half_lives,
        in_order=in_order,
    )
    ids, rows, last_seen, offsets = ops.lowest_rows(**arguments)
    assert offsets.is_cpu and offsets[0] == 0 and len(offsets) == len(questions) + 1
    assert len(ids) == len(rows) == offsets[-1] and len(last_seen) == (len(ids) if in_order else 0)
    columns = [ids, rows, *([last_seen] if in_order else [])]
    return torch.stack(columns, dim=1).split(offsets.diff().tolist())


def in_order(table, pairs):
    """Returns (id, row, last_seen) [M, 3] of pairs [M, 2]: by last_seen, then by mixed id, unsigned."""
    last_seen = dict(zip(table.rows_of.tolist(), table.seen.tolist(), strict=True))
    seen = ids_of(*(last_seen[row] for row in pairs[:, 1].tolist()))
    order = (ops.mix64(pairs[:, 0].contiguous()) ^ -(2**63)).argsort()
    order = order[seen[order].argsort(stable=True)]
    return torch.cat([pairs, seen[:, None]], dim=1)[order]


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


@st.composite
def scored_tables(draw, few):
    ids = draw(st.lists(hard_ids, max_size=60, unique=True))
    rows = draw(st.permutations(range(len(ids) + draw(st.integers(0, 70)))))
    score = st.tuples(st.sampled_from(few), st.sampled_from([*few, MOST]))
    return scored_of(
        {number: (row, *draw(score)) for number, row in zip(ids, rows, strict=False)},
        shift=draw(st.integers(0, 8)),
        is_growing=draw(st.booleans()),
        spare=draw(st.integers(0, 100)),
    )


@st.composite
def questions_of(draw, tables, few):
    table = draw(st.integers(0, len(tables) - 1))
    before = draw(st.sampled_from([*few, FREE, FREE + 1, 2**62, -(2**63)]) | keys)
    begins = None
    if draw(st.booleans()):  # half-lives begin until the present step
        last = max(0, min(before, FREE))
        steps = st.lists(st.integers(0, last), min_size=1, max_size=MOST_HALVINGS)
        some = sorted(
            draw(steps | st.lists(st.sampled_from([min(s, last) for s in few]), min_size=1))
        )
        begins = ([0] * MOST_HALVINGS + some)[-MOST_HALVINGS:]
    return Question(
        draw(st.booleans()),
        before,
        draw(st.integers(0, len(tables[table].ids) + 2) | st.just(2**63 - 1)),
        draw(st.integers(0, tables[table].rows)),
        begins,
        table,
    )


@pytest.mark.usefixtures("device")
@settings(max_examples=60)
@given(st.data())
def test_the_lowest_are_those_of_a_plain_sort(data):
    """Several questions about one table or several, whose answers are in order, or in any."""
    few = data.draw(st.lists(keys, min_size=1, max_size=4))
    tables = data.draw(st.lists(scored_tables(few), min_size=1, max_size=3))
    questions = data.draw(st.lists(questions_of(tables, few), max_size=5))
    is_in_order = data.draw(st.booleans())
    got = answers(tables, questions, is_in_order)
    for question, found in zip(questions, got, strict=True):
        table = tables[question.table]
        expected = table.expected(question)
        if is_in_order:
            assert torch.equal(found, in_order(table, expected))
        else:
            assert table.same(found, expected)


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
    begins = [span // 2 // MOST_HALVINGS * age for age in range(MOST_HALVINGS)]
    for by_count, ages in ((False, None), (True, None), (True, begins)):
        for before, most in ((span // 2, 4000), (FREE, 140), (FREE, 8999), (FREE, 9000), (1, 10)):
            question = Question(by_count, before, most, None, ages if before > 1 else None)
            expected = scored.expected(question)
            for number in (1, 2, 4) if device == "cpu" else (1,):
                threads(number)
                [found] = answers([scored], [question])
                assert scored.same(found, expected)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("half_life", [1, 3, 10])
def test_counts_decay_by_the_half_lives_of_a_policy(half_life):
    """A count is halved once for each multiple of the half-life that has come since; 39 of them matter."""
    step, ages = 100 * half_life + 1, range(100)
    decay = Decay(LeastFrequentlyUsed(half_life_steps=half_life))
    begins = decay.begins(step, Clock())
    seen = ids_of(*(step - age for age in ages))
    counts = ids_of(*([1, 2**31, MOST, 7, 2**20][age % 5] for age in ages))
    table = Scored(torch.arange(100), torch.arange(100), seen, counts)
    halvings = [step // half_life - one // half_life for one in seen.tolist()]
    by_hand = [
        min(count * 256 >> h, MOST) for count, h in zip(counts.tolist(), halvings, strict=True)
    ]
    kept = [key if h < MOST_HALVINGS else 0 for key, h in zip(by_hand, halvings, strict=True)]
    assert table.keys(begins).tolist() == kept
    for most in range(0, 101, 7):
        table.check(True, step + 1, most, None, begins)


@pytest.mark.usefixtures("device")
def test_each_question_has_half_lives_of_its_own():
    """Or none: the oldest rows have the highest counts, and lose them the sooner, the shorter it is."""
    seen, counts = torch.arange(64), 64 - torch.arange(64)
    tables = [
        Scored(torch.arange(64) + first, torch.arange(64), seen, counts, shift=4)
        for first in (0, 90)
    ]
    ages = range(MOST_HALVINGS)
    begins = [
        None,
        [*(24 + age for age in ages)],
        None,
        [0] * 20 + [64 - 2 * age for age in range(20, 0, -1)],
    ]
    for order in (begins, begins[::-1]):
        questions = [Question(True, 70, 20, None, one, t) for one in order for t in (0, 1)]
        found = answers(tables, questions)
        for question, got in zip(questions, found, strict=True):
            assert tables[question.table].same(got, tables[question.table].expected(question))
        of_the_first = {frozenset(got[:, 1].tolist()) for got in found[::2]}
        assert len(of_the_first) == 3


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
    assert answers([scored], []) == ()
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
        ordered = scored.expected(Question(by_count, 9, 2 * MANY))
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
    slots, _ = a_map(ids, torch.arange(160_000))
    held = slots[0][slots[0][:, 1] > 0]
    mixed = ops.mix64(held[:, 0].contiguous())
    place = slots[0][:, 1].nonzero().flatten()
    is_low = mixed >= 0  # unsigned below 2^63
    runs = 19  # every 19th run of 64 slots is sampled, see the assertion
    is_tie = is_low == (place // 64 % runs == 0)
    ties = held[is_tie]
    assert len(ties) > 1 << 16 and len(ties) >> 12 == runs
    table = Scored(ids, torch.arange(160_000), ids * 0 - 1, ids * 0, shift=12)
    assert torch.equal(table.slots[0], slots[0])
    rows = ties[:, 1] - 1
    write_rows(table.blocks, 12, rows, torch.full_like(rows, 4), rows * 0)
    got = table.lowest(False, 9, 30_000)
    order = (ops.mix64(ties[:, 0].contiguous()) ^ -(2**63)).argsort()
    assert torch.equal(got[:, 0].sort().values, ties[order[:30_000], 0].sort().values)
