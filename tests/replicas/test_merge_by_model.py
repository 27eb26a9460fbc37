"""Replicas of one table under every policy against a plain model: trained, edited and merged, repeatedly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from life_cases import ADMISSIONS, EVICTIONS, Held, SideBySide, living_table
from life_model import MOST, Counted, LifeModel, Row
from oracle import EXTREME_IDS
from replica_cases import side_of, sync
from table_cases import ids_of, make_group, same_state


@dataclass
class Replica:
    """A table with its model, and what the model was at the last sync."""

    pair: SideBySide
    erased: set[int] = field(default_factory=set)
    rows: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # born, last_seen, count
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)  # last_seen, count
    times: list[int | None] = field(default_factory=lambda: [None])  # the clock at each step

    @property
    def model(self) -> LifeModel:
        return self.pair.model

    def begin(self) -> None:
        self.erased = set()
        self.rows = {
            number: (row.born, row.last_seen, row.count) for number, row in self.model.rows.items()
        }
        self.waiting = {
            number: (one.last_seen, one.count) for number, one in self.model.waiting.items()
        }

    def before(self, number: int) -> tuple[int, int]:
        """Returns last_seen and count that what the replica has of an id had at the last sync; 0, 0."""
        if number in self.erased:
            return 0, 0
        row, counter = self.model.rows.get(number), self.waiting.get(number, (0, 0))
        if row is not None:
            born, *score = self.rows.get(number, (-1, 0, 0))
            if born == row.born:
                return score[0], score[1]
            goes_on = self.model.unit is None and counter[1] <= row.count
            return counter if goes_on else (0, 0)
        return counter if counter[1] <= self.model.waiting[number].count else (0, 0)


class TooMany(Exception):
    """The union of the replicas is over the limit, and no policy replaces rows."""


def merge(replicas: list[Replica]) -> None:
    """Merges the models and the expected contents, as `Replicas.sync` does the tables."""
    model = replicas[0].model
    times = [_latest(of_step) for of_step in zip(*(one.times for one in replicas), strict=True)]
    erased = set().union(*(one.erased for one in replicas))
    every = erased.union(*({*one.model.rows, *one.model.waiting, *one.rows} for one in replicas))
    rows: dict[int, tuple[Counted, Held]] = {}
    waiting: dict[int, Counted] = {}
    for number in sorted(every):
        sides = [one for one in replicas if number not in erased or number in one.erased]
        with_row = [one for one in sides if number in one.model.rows]
        counting = [one for one in sides if number in one.model.waiting]
        if with_row:
            counted = with_row + (counting if model.unit is None else [])
            merged = _score(model, counted, number, number in erased, times)
            rows[number] = merged, _mean(replicas, with_row, number, number in erased)
        elif counting:
            waiting[number] = _score(model, counting, number, number in erased, times)
    if len(rows) > model.limit and not model.makes_room:
        raise TooMany
    for one in replicas:
        _write(one, rows, waiting, times)


def _latest(times: tuple[int | None, ...]) -> int | None:
    return max((time for time in times if time is not None), default=None)


def _score(
    model: LifeModel,
    sides: list[Replica],
    number: int,
    is_erased: bool,
    times: list[int | None],
) -> Counted:
    has = [(one.model.rows.get(number) or one.model.waiting[number], one) for one in sides]
    latest = max(row.last_seen for row, _ in has)

    def as_of(last_seen: int, count: int) -> int:
        begun = 0
        if model.half_steps is not None:
            begun = latest // model.half_steps - last_seen // model.half_steps
        elif model.half_time is not None:
            now, then = (times[min(step, len(times) - 1)] or 0 for step in (latest, last_seen))
            begun = now // model.half_time - then // model.half_time
        return math.floor(Fraction(count, 2 ** max(0, begun)) + Fraction(1, 2))

    before = [0 if is_erased else as_of(*one.before(number)) for _, one in has]
    added = [
        max(0, as_of(row.last_seen, row.count) - less)
        for (row, _), less in zip(has, before, strict=True)
    ]
    count = min(max(before) + sum(added), MOST)
    return Counted(latest, count, times[min(latest, len(times) - 1)])


def _mean(replicas: list[Replica], with_row: list[Replica], number: int, is_erased: bool) -> Held:
    """Returns the mean of the rows; a replica that evicted the id does not count, another as an unseen id."""
    weights, squares, sides = 0.0, 0.0, 0
    for one in replicas:
        if one in with_row:
            held = one.pair.held[one.model.rows[number].born]
            weights, squares = weights + held.weight, squares + held.squares
        elif number in one.rows and not is_erased:
            continue
        else:
            weights = weights + one.pair.initial(number).double()
        sides += 1
    merged = Held(weights / sides)
    merged.squares = squares / sides
    return merged


def _write(
    one: Replica,
    rows: dict[int, tuple[Counted, Held]],
    waiting: dict[int, Counted],
    times: list[int | None],
) -> None:
    model, pair = one.model, one.pair
    for number in set(model.rows) - set(rows):
        model._drop(number, "erased")
    for number, (score, held) in rows.items():
        if number not in model.rows:
            model._start(number, score.last_seen, score.count)
        born = model.rows[number].born
        model.rows[number] = Row(score.last_seen, score.count, score.time, born)
        pair.held[born] = Held(held.weight)
        pair.held[born].squares = held.squares
    model.waiting = {
        number: Counted(found.last_seen, found.count, found.time)
        for number, found in waiting.items()
    }
    one.times = list(times)
    model.clock = times[-1]
    surplus = len(model.rows) - model.limit
    for number in sorted(model.rows, key=lambda n: model._score(n, model.step + 1))[
        : max(0, surplus)
    ]:
        model._drop(number, "evicted_full")
    model._drop_counters(len(model.rows))
    one.begin()


IDS = [*EXTREME_IDS[:3], *range(3, 9)]
ids_st = st.lists(st.sampled_from(IDS), max_size=5)
edit_st = st.tuples(
    st.sampled_from(["erase", "assign"]), st.lists(st.sampled_from(IDS), max_size=2)
)


@st.composite
def intervals(draw: st.DrawFn, replicas: int) -> list[list[tuple]]:
    """Draws what each replica does up to a sync: as many steps as the others, and edits."""
    steps = draw(st.integers(0, 3))
    of_replicas = []
    for _ in range(replicas):
        does: list[tuple] = []
        for _ in range(steps):
            if draw(st.booleans()):
                does.append(("time", draw(st.integers(0, 6))))
            does.append(("train", draw(ids_st)))
            if draw(st.integers(0, 3)) == 0:
                does.append(draw(edit_st))
        of_replicas.append(does)
    return of_replicas


def replica_of(eviction, admission, limit) -> tuple[Replica, object]:
    table = living_table(EVICTIONS[eviction], ADMISSIONS[admission], limit)
    return Replica(SideBySide(table)), make_group(table)


def do(replica: Replica, group, what: str, given) -> None:
    pair, model, table = replica.pair, replica.model, replica.pair.table
    if what == "time":
        if model.is_timed:
            time = (model.clock or 0) + given
            table.set_time(time)
            model.set_time(time)
            if set(replica.times) == {None}:  # the first time holds from the first step on
                replica.times = [time] * len(replica.times)
    elif what == "train":
        batch = given if pair.fits(given) else []
        births = pair.change(lambda model: model.train(batch))
        replica.times.append(model.clock)
        bags = torch.tensor([0, len(batch)])
        group(ids_of(*batch), bags, training=True).sum().backward()
        pair.learn(births, 1.0)
    elif what == "erase":
        replica.erased |= set(given)
        table.erase(ids_of(*given))
        pair.change(lambda model: model.erase(given))
    elif len({*given, *model.rows}) <= model.limit:
        for number in dict.fromkeys(given):
            row = pair.initial(number)[None] + 1
            table.assign(ids_of(number), row)
            pair.change(lambda model, number=number: model.assign([number]))
            pair.held[model.rows[number].born].weight = row[0].double()


@pytest.mark.everyday(4)
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("eviction", EVICTIONS)
@settings(max_examples=max(4, settings.default.max_examples // 10))
@given(data=st.data())
def test_replicas_merge_as_the_model_says(eviction, admission, data):
    count = data.draw(st.integers(2, 3))
    both = [replica_of(eviction, admission, limit=7) for _ in range(count)]
    replicas = [replica for replica, _ in both]
    sides = [side_of(one.pair.table) for one in replicas]
    for _ in range(data.draw(st.integers(1, 3))):
        for (replica, group), does in zip(both, data.draw(intervals(count)), strict=True):
            for what, arguments in does:
                do(replica, group, what, arguments)
        before = [one.pair.table.export_state() for one in replicas]
        try:
            merge(replicas)
        except TooMany:
            with pytest.raises(RuntimeError, match="in the union of the replicas, got"):
                sync(sides)
            now = [one.pair.table.export_state() for one in replicas]
            assert all(map(same_state, before, now))
            return
        sync(sides)
        states = [one.pair.table.export_state() for one in replicas]
        assert all(same_state(state, states[0]) for state in states)
        for one in replicas:
            take_times_of_due_rows(one)
            one.pair.assert_same_life(IDS)
            check_rows(one, states[0])
        assert all(not ids.numel() for ids, *_ in sync(sides))


def take_times_of_due_rows(one: Replica) -> None:
    """Has the model take earlier times of rows that expire at the next step.

    The time of their last step may be that of a replica that has none as old, and has dropped it.
    """
    model, table = one.model, one.pair.table
    for number in model.due() if model.is_timed else ():
        row, told = model.rows[number], int(table.last_seen(ids_of(number)))
        assert told <= (row.time or 0)
        row.time = told


def check_rows(one: Replica, state: dict[str, torch.Tensor]) -> None:
    held = [one.pair.held[one.model.rows[n].born] for n in state["ids"].tolist()]
    for place, expected in enumerate(held):
        torch.testing.assert_close(
            state["weight"][place].double(), expected.weight, rtol=1e-5, atol=1e-6
        )
        squares = torch.full((4,), expected.squares, dtype=torch.float32)
        torch.testing.assert_close(state["momentum1"][place], squares, rtol=1e-5, atol=1e-6)
