"""Admission: which ids without a row get one, and the counts of waiting ids (`AdmitAfter`).

One op decides for all tables (csrc/life/admission.h). The draw of `AdmitWithProbability` for an id at a step
is a pure function of the table's key, the id and the step, so every column shard and every run decides the
same. Chances are made by multiplications alone: `pow` may differ in its last bit.

Legend: T tables, M ids, Q waiting ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.life.expiry import AgeLimit
from torchrec_dyn.life.lowest_rows import Chosen, ListedRows, Search
from torchrec_dyn.life.scores import SCORE_BYTES, ScoredMaps, Scores
from torchrec_dyn.policies import Admission, AdmitAfter, AdmitWithProbability, Never
from torchrec_dyn.storage import (
    IdMap,
    OpenForwards,
    RowAddition,
    RowNumbers,
    RowRemoval,
    block_shift,
    host_numbers,
    offsets_of,
    parts_of,
)

# At least a 64th of the counters, or rows, is freed at once, so that searches for the lowest scores are rare.
FREED_SHARE = 64
# Rows listed at once, in such shares. A listed row takes 24 bytes: 3 for each counter or row.
SHARES_AHEAD = 8
# The default of AdmitAfter.counters: this many for each row, and never fewer than LEAST_COUNTERS.
COUNTERS_A_ROW = 4


def most_counters(admission: Admission | None, row_limit: int, rows: int) -> int:
    """Returns the maximum number of waiting ids of a table with this row limit and `rows` rows in use."""
    if not isinstance(admission, AdmitAfter):
        return 0
    return admission.counters or min(row_limit, max(knobs.LEAST_COUNTERS, COUNTERS_A_ROW * rows))


class AdmissionCounters:
    """One counter for each waiting id: the step at which it was last seen, and its occurrences.

    Attributes:
        limit: the most counters that a training step keeps, whatever the rows in use.
        id_map: id -> row of its counter.
        row_numbers: of the counters.
        scores: of the counters.
        age_limit: when counters expire; None if they do not.
    """

    def __init__(self, limit: int, device: torch.device, age_limit: AgeLimit | None) -> None:
        self.limit = limit
        self.id_map = IdMap(limit, device)
        self.row_numbers = RowNumbers(OpenForwards(), device)
        self.scores = Scores(block_shift(limit, SCORE_BYTES, device.type), device)
        self.age_limit = age_limit
        self._device = device
        self._listed = ListedRows(device)
        self._prepared = ScoredMaps([self.id_map], [self.scores])

    def __len__(self) -> int:
        return self.id_map.num_ids

    @property
    def bytes(self) -> int:
        """Bytes of slots and counters."""
        return self.id_map.bytes + self.row_numbers.high_water_mark * SCORE_BYTES

    @property
    def handle(self) -> Tensor:
        """These counters as one table, the result of `ops.prepare_tables`."""
        return self._prepared.get()

    def reserve_scores(self, additional: int) -> None:
        """Makes room for `additional` more counters, but in their map."""
        self.scores.store.reserve(self.row_numbers.highest_after(additional))

    def counts(self, ids: Tensor) -> Tensor:
        """Returns the counts of ids [M] int64, 0 without a counter, [M] int64."""
        return self.read(self.id_map.lookup(ids))[1]

    def write(self, ids: Tensor, last_seen: Tensor, counts: Tensor) -> None:
        """Writes the counters of ids, with or without a counter so far. Waits for a GPU.

        ids [M] int64, distinct; last_seen [M] int64, steps; counts [M] int64.
        """
        new = ids[self.id_map.lookup(ids) < 0]
        self.id_map.reserve(new.numel())
        self.reserve_scores(new.numel())
        RowAddition({0: self}, new, {0: new.numel()}, {}, None, 1, self.handle).commit()
        self.scores.write(self.id_map.lookup(ids), last_seen, counts)

    def search(self, table: int, step: int, limit: int, more: int) -> Search | None:
        """Returns the search for counters above a limit with `more` of them, ids seen longest ago first."""
        surplus = len(self) + more - limit
        if surplus <= 0:
            return None
        share = limit // FREED_SHARE
        # Counters of the present step may be dropped, but not listed: a further forward of the step may give
        # their rows to other ids, with the same `last_seen`.
        return Search(
            table, self.row_numbers.high_water_mark, max(surplus, share), step, listed=self._listed,
            ahead=SHARES_AHEAD * share, until=step + 1,
        )  # fmt: skip

    def forget_listed(self) -> None:
        """Drops the listed rows. Call it after counters were written other than by a training step."""
        self._listed = ListedRows(self._device)
        if self.age_limit is not None:
            self.age_limit.forget_listed()

    def removal(self, ids: Tensor) -> RowRemoval:
        """Returns the removal of the counters of ids [M] int64, distinct; skips ids without a counter."""
        ids, rows = self.id_map.find(ids)
        return RowRemoval({0: self}, ids, rows, {0: ids.numel()}, 1, self.handle)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns last_seen and counts of rows [M] int64 of `id_map`, [M] int64 each."""
        return self.scores.read(rows)

    def export(self) -> Tensor:
        """Returns ids, last_seen and counts in canonical order, [3, Q] int64."""
        ids, rows = self.id_map.contents()
        return torch.stack([ids, *self.read(rows)])


class Asked(NamedTuple):
    """What the features of M ids without a row ask for, if some do not insert or do not count.

    Attributes:
        asks: [M] bool, True if a feature that inserts has the id.
        counted: [M] int64, occurrences in this step that count for admission: of features that insert.
    """

    asks: Tensor
    counted: Tensor


class Admitted(NamedTuple):
    """The admission of the new ids of several tables, in the order of the tables.

    Attributes:
        places: [K] int64, places of the admitted ids among the new ones; None if all are admitted.
        ids, counts: [K] int64, the admitted ids, and their occurrences that count, also in earlier steps.
        dropped: ids and rows of the counters that they had.
        seen: rows and present counts of the counters of refused ids.
        begun: ids and counts of refused ids without a counter.
        numbers: of each table: admitted ids, and counters dropped, seen and begun; occurrences of all new
            ids, if they were summed up; and of those that are not admitted.
    """

    places: Tensor | None
    ids: Tensor
    counts: Tensor
    dropped: tuple[Tensor, Tensor]
    seen: tuple[Tensor, Tensor]
    begun: tuple[Tensor, Tensor]
    numbers: list[list[int]]

    def sizes(self, column: int) -> dict[int, int]:
        """Returns a column of `numbers` by number of the table, without zeros."""
        return {t: numbers[column] for t, numbers in enumerate(self.numbers) if numbers[column]}


ADMITTED, DROPPED, SEEN, BEGUN, OCCURRED, LEFT_OUT = range(6)
_NEVER = 1 << 40
_SQUARES = 33  # csrc/life/admission.h


class AdmissionRule:
    """The rule of one table, in the form that `ops.admit` takes.

    Attributes:
        squares: (1 - p)^(2^bit) of a chance, for the bits of a count.
    """

    def __init__(self, admission: Admission | None, key: int, has_counters: bool) -> None:
        self._admission, self._key, self._has_counters = admission, key, has_counters
        self.squares = [1.0] * _SQUARES
        self._bits = 0
        if isinstance(admission, AdmitWithProbability):
            self.squares, self._bits = _squares_of(admission.p)

    @property
    def draws(self) -> bool:
        """True if it depends on the step."""
        return self._bits > 0

    def numbers(self, step: int) -> tuple[int, int, int, int]:
        """Returns kind, number, number of squares, and 1 with counters, for a step."""
        if isinstance(self._admission, AdmitAfter):
            return 1, self._admission.count, 0, int(self._has_counters)
        if isinstance(self._admission, AdmitWithProbability):
            # The word before those with which updates round (csrc/storage/rounding.h): no bits are shared.
            word = _mixed((self._key + step * _GOLDEN) & _WORD)
            return 2, word - (word >> 63 << 64), self._bits, 0
        return (1, _NEVER, 0, 0) if isinstance(self._admission, Never) else (0, 0, 0, 0)


EVERY_ID = AdmissionRule(None, 0, False)

_NO_COUNTERS = torch.empty(0, dtype=torch.int64, device="cpu")
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # as in csrc/mix64.h
_NO_CHANCE = 2.0**-60  # 1 - this is 1


def _squares_of(probability: float) -> tuple[list[float], int]:
    """Returns the squares of a chance, and how many matter: no higher count has another chance."""
    squares = [1.0 - probability]
    while squares[-1] >= _NO_CHANCE and len(squares) < _SQUARES:
        squares.append(squares[-1] * squares[-1])
    return squares + [1.0] * (_SQUARES - len(squares)), len(squares)


def _mixed(word: int) -> int:
    """Returns the mixed id of one word (csrc/mix64.h): an op and its tensors cost more than all draws."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


class CounterChange:
    """What a step does to the counters of waiting ids of several tables; making it changes nothing."""

    def __init__(
        self,
        counters: Mapping[int, AdmissionCounters],
        admitted: Admitted,
        steps: Mapping[int, int],
        count: int,
        handle: Tensor,
    ) -> None:
        self._handle, self._seen = handle, admitted.seen
        self._removal = RowRemoval(
            counters, *admitted.dropped, admitted.sizes(DROPPED), count, handle
        )
        ids, counts = admitted.begun
        self._addition = RowAddition(
            counters, ids, admitted.sizes(BEGUN), steps, counts, count, handle
        )
        self._counters = counters
        seen = admitted.sizes(SEEN)
        self._offsets = offsets_of(seen, count)
        rows, _ = admitted.seen
        self._steps = torch.empty_like(rows)
        for t, own in parts_of(self._steps, seen).items() if seen else ():
            own.fill_(steps[t])

    def commit(self) -> None:
        """Drops the counters of admitted ids, and writes those of refused ids."""
        self._removal.commit()
        rows, counts = self._seen
        if rows.numel():
            ops.write_scores_(rows, self._offsets, self._steps, counts, self._handle)
        self._addition.commit()

    def undo(self) -> Callable[[], None]:
        """Returns a call that undoes a commit that comes next, or a part of it."""
        rows, _ = self._seen
        scores = ops.read_scores(rows, self._offsets, self._handle)
        bring_back, added = self._removal.undo(), self._addition
        touched = {*self._removal.sizes, *added.sizes}
        renumber = [self._counters[t].row_numbers.undo() for t in touched]

        def restore() -> None:
            for t, ids in parts_of(added.ids, added.sizes).items() if added.sizes else ():
                self._counters[t].removal(ids).commit()
            bring_back()
            ops.write_scores_(rows, self._offsets, *scores, self._handle)
            for put_back in renumber:
                put_back()
            for t in touched:
                self._counters[t].forget_listed()

        return restore


class CounterTables:
    """The counters of T tables, by number of those that have some, prepared for the ops."""

    def __init__(self, counters: Mapping[int, AdmissionCounters], count: int) -> None:
        self.counters, self._count = counters, count
        device = next((own.id_map.slots.device for own in counters.values()), None)
        no_map = IdMap(device=device)
        maps = [counters[t].id_map if t in counters else no_map for t in range(count)]
        scores = [counters[t].scores if t in counters else None for t in range(count)]
        self._prepared = ScoredMaps(maps, scores)

    def get(self) -> Tensor:
        """Returns the result of `ops.prepare_tables`; [0] if no table has counters."""
        return self._prepared.get() if self.counters else _NO_COUNTERS

    def removal(self, chosen: Chosen) -> RowRemoval:
        """Returns the removal of counters."""
        return RowRemoval(self.counters, *chosen, self._count, self.get())

    def change(self, admitted: Admitted, steps: Mapping[int, int]) -> CounterChange:
        """Returns what an admission at `steps` changes."""
        return CounterChange(self.counters, admitted, steps, self._count, self.get())


class AdmissionRules:
    """The rules of T tables, in the form that `ops.admit` takes."""

    def __init__(self, rules: Sequence[AdmissionRule]) -> None:
        self._rules = rules
        self._fixed = host_numbers([rule.numbers(0) for rule in rules])
        self._squares = torch.ones(len(rules), _SQUARES, dtype=torch.float64, device="cpu")
        self._are_open = not any(rule.numbers(0)[0] for rule in rules)  # to every id
        self._drawn = [t for t, rule in enumerate(rules) if rule.draws]
        for t in self._drawn:
            self._squares[t] = torch.tensor(rules[t].squares, dtype=torch.float64, device="cpu")

    def admit(
        self,
        new_ids: Tensor,
        occurrences: Tensor,
        ends: Sequence[int],
        asked: Asked | None,
        counters: Tensor,
        step_of: Callable[[int], int],
        sums: bool = False,
    ) -> Admitted:
        """Decides the admission of new ids; writes nothing.

        Args:
            new_ids: [M] int64, distinct.
            occurrences: [M] int64, in this step.
            ends: [T + 1], where the ids of each table begin, and the end.
            asked: None if all ids ask and all occurrences count.
            counters: as `CounterTables.get` returns them.
            step_of: the step of a table, by number.
            sums: True to sum up the occurrences of all new ids.
        """
        if self._are_open and asked is None and not sums:
            empty = new_ids[:0]
            none = empty, empty
            sizes = [[end - begin, 0, 0, 0, 0, 0] for begin, end in pairwise(ends)]
            return Admitted(None, new_ids, occurrences, none, none, none, sizes)
        asks, counted = (None, None) if asked is None else asked
        places, first, second, numbers = ops.admit(
            new_ids, occurrences, host_numbers(ends), asks, counted, self._at(step_of), self._squares,
            counters, sums,
        )  # fmt: skip
        of_tables = numbers.view(-1, 6).tolist()
        sizes = [sum(own[column] for own in of_tables) for column in range(4)]
        admitted, dropped, seen, begun = zip(first.split(sizes), second.split(sizes), strict=True)
        return Admitted(places, *admitted, dropped, seen, begun, of_tables)

    def _at(self, step_of: Callable[[int], int]) -> Tensor:
        """Returns the rules at the steps of the tables, [T, 4] int64."""
        if not self._drawn:
            return self._fixed
        rules = self._fixed.clone()
        for t in self._drawn:
            rules[t] = host_numbers(self._rules[t].numbers(step_of(t)))
        return rules
