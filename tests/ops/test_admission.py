"""Which new ids are admitted, and what becomes of their counters, against plain Python."""

import itertools
import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_samples import SAMPLES, scored
from oracle import chance, draw_of
from raw_maps import a_map
from score_blocks import MOST, blocks_of, write
from table_cases import hard_ids, ids_of

from torchrec_dyn import ops
from torchrec_dyn.life.admission import AdmissionRule
from torchrec_dyn.policies import AdmitAfter, AdmitWithProbability, Never

pytestmark = pytest.mark.usefixtures("device")
SHIFT = 3


class Rule(NamedTuple):
    """The rule of a table: its policy and key; None admits every id that asks."""

    policy: AdmitAfter | AdmitWithProbability | Never | None
    key: int
    has_counters: bool

    def admits(self, number, count, asks, step):
        if self.policy is None:
            return asks
        if isinstance(self.policy, Never):
            return False
        if isinstance(self.policy, AdmitAfter):
            return count >= self.policy.count
        return draw_of(self.key, step, number) < chance(self.policy.p, count)


class NewIds(NamedTuple):
    """The new ids of a table, their occurrences, and what their features ask for."""

    ids: list[int]
    occurrences: list[int]
    asks: list[bool]
    counted: list[int]


class Waiting(NamedTuple):
    """The counters of a table: {id: (row, count)}."""

    counters: dict[int, tuple[int, int]]
    is_growing: bool


def expected(rules, waiting, batches, step, sums):
    """Returns places, the four lists of pairs, and the numbers of each table."""
    places, lists, numbers, place = [], [[], [], [], []], [], itertools.count()
    for rule, table, new in zip(rules, waiting, batches, strict=True):
        before = [len(one) for one in lists]
        occurred = left_out = 0
        for number, times, asks, counted in zip(*new, strict=True):
            at = next(place)
            occurred += times
            row, in_counter = table.counters.get(number, (None, 0))
            count = min(counted + in_counter, MOST)
            counts = rule.policy is None or counted > 0
            if counts and rule.admits(number, count, asks, step):
                places.append(at)
                lists[0].append((number, count))
                if row is not None and rule.policy is not None:
                    lists[1].append((number, row))
                continue
            left_out += times
            if counts and rule.has_counters and rule.policy is not None:
                lists[2 if row is not None else 3].append(
                    (number, count) if row is None else (row, min(counted, MOST))
                )
        sizes = [len(one) - was for one, was in zip(lists, before, strict=True)]
        numbers.append([*sizes, occurred if sums else 0, left_out])
    return places, [pair for one in lists for pair in one], numbers


def admit(rules, waiting, batches, step, sums, asked):
    """Returns what the op says, as `expected`; `asked`: with asks and counted."""
    blocks, layout, maps = [], [], []
    for table in waiting:
        rows = [row for row, _ in table.counters.values()]
        maps.append(a_map(ids_of(*table.counters), ids_of(*rows), table.is_growing))
        own = blocks_of(max(rows, default=-1) + 1, SHIFT)
        write(own, SHIFT, {row: (3, count) for row, count in table.counters.values()})
        layout.append([len(blocks), len(own), SHIFT, 1])
        blocks += own
    arrays = [*(slots[0] for slots, _ in maps), *(slots[1] for slots, _ in maps if len(slots) == 2)]
    offsets = [0, *itertools.accumulate(len(new.ids) for new in batches)]
    asks = torch.tensor([one for new in batches for one in new.asks], dtype=torch.bool)
    made = [AdmissionRule(*rule) for rule in rules]
    given = scored(
        blocks,
        torch.tensor(layout),
        slots=arrays,
        moved=torch.cat([moved for _, moved in maps]),
        new_ids=ids_of(*(number for new in batches for number in new.ids)),
        occurrences=ids_of(*(times for new in batches for times in new.occurrences)),
        new_offsets=ids_of(*offsets),
        asks=asks if asked else None,
        counted=ids_of(*(times for new in batches for times in new.counted)) if asked else None,
        rules=torch.tensor([rule.numbers(step) for rule in made]),
        squares=torch.tensor([rule.squares for rule in made], dtype=torch.float64),
        sums=sums,
    )
    counters = given.pop("tables")
    if not any(rule.has_counters for rule in rules):
        counters = torch.empty(0, dtype=torch.int64)
    places, first, second, numbers = ops.admit(**given, counters=counters)
    assert numbers.is_cpu
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    return places.tolist(), pairs, numbers.view(-1, 6).tolist()


policies = st.one_of(
    st.builds(AdmitAfter, count=st.sampled_from([2, 9, 2**31, MOST])),
    st.builds(AdmitAfter, count=st.integers(1, 12)),
    st.none(),
    st.just(Never()),
    st.builds(AdmitWithProbability, p=st.floats(0.01, 1) | st.sampled_from([1.0, 0.5, 1e-9])),
)
mostly = st.sampled_from([True, True, False])
times = st.integers(1, 9) | st.sampled_from([2**31, MOST - 1, MOST])


@st.composite
def tables_of(draw, has_counters, asked):
    """Draws a rule, the counters and the new ids of a table: some wait, and some do not."""
    policy = draw(policies)
    known = draw(st.lists(hard_ids, max_size=20, unique=True)) if has_counters else []
    rows = draw(st.permutations(range(len(known) + 3)))
    counts = [draw(times) for _ in known]
    counters = dict(zip(known, zip(rows, counts, strict=False), strict=True))
    some = st.lists(
        hard_ids | st.sampled_from(known) if known else hard_ids, max_size=20, unique=True
    )
    ids = draw(some)
    occurrences = [draw(times) for _ in ids]
    asks, counted = [True] * len(ids), occurrences
    if asked:  # features that insert have some of the occurrences, or none
        counted = [draw(st.integers(0, most) | st.just(0)) for most in occurrences]
        asks = [count > 0 or draw(st.booleans()) for count in counted]
    rule = Rule(
        policy,
        draw(st.integers(-(2**63), 2**63 - 1)),
        has_counters and isinstance(policy, AdmitAfter),
    )
    waiting = Waiting(counters, draw(st.booleans()))
    return rule, waiting, NewIds(ids, occurrences, asks, counted)


@settings(max_examples=120)
@given(st.data())
def test_the_rules_of_all_tables_are_those_of_plain_python(data):
    """With counters or without any, of features that all insert or do not."""
    has_counters, asked = data.draw(mostly), data.draw(mostly)
    drawn = data.draw(st.lists(tables_of(has_counters, asked), min_size=1, max_size=4))
    rules, waiting, batches = (list(column) for column in zip(*drawn, strict=True))
    if not any(rule.has_counters for rule in rules):
        waiting = [Waiting({}, False) for _ in rules]
    step, sums = data.draw(st.integers(0, 2**40)), data.draw(st.booleans())
    got = admit(rules, waiting, batches, step, sums, asked)
    assert got == expected(rules, waiting, batches, step, sums)


def test_an_id_without_counted_occurrences_keeps_its_counter():
    """However high it is. Occurrences are summed, also of ids that no feature may insert."""
    waiting = [Waiting({5: (0, 9), 6: (1, 1), 7: (2, 8)}, False)]
    new = [
        NewIds([5, 6, 7, 8, 9], [4, 4, 2, 3, 1], [False, True, True, False, True], [0, 1, 2, 0, 1])
    ]
    rule = [Rule(AdmitAfter(10), 0, True)]
    places, pairs, numbers = admit(rule, waiting, new, 0, True, True)
    assert places == [2] and pairs == [(7, 10), (7, 2), (1, 1), (9, 1)]
    assert numbers == [[1, 1, 1, 1, 14, 12]]


def test_a_counter_outside_of_the_scores_is_an_error():
    """A map that is damaged, or of another table."""
    given = SAMPLES["admit"][0]()
    slots, moved = a_map([7], [50])
    scores, layout = blocks_of(8, 2), ids_of(0, 2, 2, 1).view(1, 4)
    counters = scored(scores, layout, slots=slots, moved=moved)["tables"]
    one = {"new_ids": ids_of(7), "occurrences": ids_of(1), "new_offsets": ids_of(0, 1)}
    one |= {"rules": given["rules"][:1].clone(), "squares": given["squares"][:1].clone()}
    rule = "admit: expected counters in rows below 8, got one in row 50"
    with pytest.raises(RuntimeError, match=rule):
        ops.admit(**{**given, **one, "counters": counters})


@pytest.mark.parametrize("probability", [0.02, 0.5, 1e-9, 1.0])
def test_many_draws_are_the_formula(probability):
    """Many ids, and counts that have more bits than the squares of a chance."""
    rng = random.Random(4)
    ids = [rng.randrange(-(2**63), 2**63) for _ in range(4000)]
    counts = [rng.choice((1, 2, 7, 600, 2**31, MOST)) for _ in ids]
    new = [NewIds(ids, counts, [True] * len(ids), counts)]
    rules = [Rule(AdmitWithProbability(probability), -17, False)]
    for step in (0, 1, 2**33):
        got = admit(rules, [Waiting({}, False)], new, step, False, False)
        assert got == expected(rules, [Waiting({}, False)], new, step, False)


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_no_tables_and_many_ids(count):
    """Every third id waits; the lists of all tables stand one after the other."""
    ids = list(range(count))
    waiting = {i: (i // 3, 1 + i % 4) for i in ids[::3]}
    new = NewIds(ids, [1] * count, [True] * count, [1] * count)
    rule, none = Rule(AdmitAfter(4), 0, True), Rule(None, 0, False)
    for rules in ([rule, none, rule], [rule], [none]) if count else ([], [rule]):
        tables = [Waiting(waiting if one.has_counters else {}, count == 5000) for one in rules]
        if not rules:
            given = (
                [ids_of()] * 2,
                ids_of(0),
                None,
                None,
                ids_of(),
                torch.empty(0).double(),
                ids_of(),
                True,
            )
            assert [len(one) for one in ops.admit(*given[0], *given[1:])] == [0, 0, 0, 0]
            continue
        got = admit(rules, tables, [new] * len(rules), 3, True, False)
        assert got == expected(rules, tables, [new] * len(rules), 3, True)
