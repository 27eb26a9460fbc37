"""A plain model of the merge of replicas: one id after the other, over models of the life of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from life_cases import Held, SideBySide
from life_model import MOST, Counted, LifeModel, Row
from oracle import mix64


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
    for number in sorted(model.rows, key=lambda n: (model._score(n)[0], mix64(n)))[
        : max(0, surplus)
    ]:
        model._drop(number, "evicted_full")
    model._drop_counters(len(model.rows))
    one.begin()
