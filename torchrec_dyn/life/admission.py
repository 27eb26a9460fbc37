"""Admission: which ids without a row get one, and the counts of waiting ids (`policies.Counting`).

One op decides for all tables (csrc/life/admission.h). The draw of `AdmitWithProbability` for an id at a step
is a pure function of the table's key, the id and the step, so every column shard and every run decides the
same. Chances are made by multiplications alone: `pow` may differ in its last bit.

Legend: T tables, M ids, Q waiting ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.life.expiry import AgeLimit
from torchrec_dyn.life.lowest_rows import ListedRows, Search, joined_rows, lowest_rows
from torchrec_dyn.life.scores import SCORE_BYTES, ScoredMaps, Scores
from torchrec_dyn.own_policies import OwnAdmission
from torchrec_dyn.policies import (
    Admission,
    AdmitAfter,
    AdmitWithProbability,
    Counting,
    Never,
)
from torchrec_dyn.storage import (
    Added,
    Chosen,
    IdMap,
    OpenForwards,
    RowChange,
    RowNumbers,
    block_shift,
    canonical_order,
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
    if not isinstance(admission, Counting):
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
        RowChange({0: self}, 1, self.handle, added=Added(new, {0: new.numel()}, {})).commit()
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

    def removal(self, ids: Tensor) -> RowChange:
        """Returns the removal of the counters of ids [M] int64, distinct; skips ids without a counter."""
        ids, rows = self.id_map.find(ids)
        return RowChange({0: self}, 1, self.handle, Chosen(ids, rows, {0: ids.numel()}))

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns last_seen and counts of rows [M] int64 of `id_map`, [M] int64 each."""
        return self.scores.read(rows)

    def export(self) -> Tensor:
        """Returns ids, last_seen and counts in canonical order, [3, Q] int64."""
        ids, rows = self.id_map.contents()
        return torch.stack([ids, *self.read(rows)])


class Asked(NamedTuple):
    """The requests of M ids without a row, if some features do not insert or count, or the user decides.

    Attributes:
        asks: [M] bool, True if a feature that inserts has the id, and under OwnAdmission what that answers.
        counted: [M] int64, occurrences in this step that count for admission: of features that insert; None:
            all of them.
    """

    asks: Tensor
    counted: Tensor | None


class Admitted(NamedTuple):
    """The admission of the new ids of several tables, in the order of the tables.

    Attributes:
        places: [K] int64, places of the admitted ids among the new ones; None if all are admitted.
        ids, counts: [K] int64, the admitted ids, and their occurrences that count, also in earlier steps.
        dropped: ids and rows of the counters that they had.
        seen: rows of the counters of refused ids, and what they count more.
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

    def chosen(self, column: int) -> Chosen:
        """Returns the counters that are dropped or seen; of seen ones only their rows mean something."""
        ids, rows = self.dropped if column == DROPPED else (self.seen[0], self.seen[0])
        return Chosen(ids, rows, self.sizes(column))


ADMITTED, DROPPED, SEEN, BEGUN, OCCURRED, LEFT_OUT = range(6)


def nobody(like: Tensor, count: int) -> Admitted:
    """Returns the admission of no ids of `count` tables; `like` is an int64 tensor on their device."""
    none = like[:0], like[:0]
    return Admitted(None, *none, none, none, none, [[0] * 6] * count)


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
        if isinstance(self._admission, OwnAdmission):
            return 3, 0, 0, int(self._has_counters)
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

    def removal(self, chosen: Chosen) -> RowChange:
        """Returns the removal of counters."""
        return RowChange(self.counters, self._count, self.get(), chosen)

    def step(
        self, admitted: Admitted, drops: Chosen | None, steps: Mapping[int, int], at: Tensor
    ) -> tuple[tuple[Any, ...], Callable[[], None]]:
        """Returns the arguments of `ops.commit_step_` about counters, and a call that notes what it did.

        `steps` by number, and `at` [T] int64, are those of an admission. `drops` go, too, if there are any.
        """
        if not self.counters:
            no, none = admitted.ids[:0], _NO_COUNTERS
            of_added: tuple[Any, ...] = no, no, [], [], no, [], [], None, None, None, None, None
            return (no, no, [], no, none, none, None, *of_added, none), lambda: None
        ids, counts = admitted.begun
        gone = joined_rows([admitted.chosen(DROPPED), *([] if drops is None else [drops])], ids)
        added = Added(ids, admitted.sizes(BEGUN), steps, counts)
        change = RowChange(self.counters, self._count, self.get(), gone, added)
        rows, times = admitted.seen
        seen = rows, offsets_of(admitted.sizes(SEEN), self._count), at, times
        return (*change.removes, *seen, *change.adds, None, self.get()), change.note

    def lowest(self, searches: Sequence[Search], admitted: Admitted) -> tuple[Chosen, Admitted]:
        """Returns the counters to drop, and the admission without those that would begin and be dropped.

        Counters of the present step, those that are seen or begin in it, go last.
        """
        like, dropped = admitted.ids, admitted.chosen(DROPPED)
        kept = joined_rows([dropped, admitted.chosen(SEEN)], like)
        drops = lowest_rows(
            [one._replace(until=None) for one in searches],
            like,
            self.get(),
            (kept.rows, offsets_of(kept.sizes, self._count)),
        )
        more = {one.table: one.most - drops.sizes.get(one.table, 0) for one in searches}
        for t in [t for t, number in more.items() if number]:
            gone = parts_of(*joined_rows([dropped, drops], like)[1:3])
            present, admitted = self._first_present(t, more[t], gone.get(t, like[:0]), admitted)
            drops = joined_rows([drops, present], like)
        return drops, admitted

    def _first_present(
        self, t: int, most: int, gone: Tensor, admitted: Admitted
    ) -> tuple[Chosen, Admitted]:
        """Returns the first counters of table `t` by mixed id, but for those in rows `gone`.

        Counters that would begin are among them: the second result is the admission without these.
        """
        ids, rows = self.counters[t].id_map.contents()
        is_left = torch.isin(rows, gone, invert=True)
        ids, rows, begun = ids[is_left], rows[is_left], admitted.begun[0]
        places = torch.arange(len(begun), device=begun.device)
        new = parts_of(places, admitted.sizes(BEGUN)).get(t, places[:0])
        first = canonical_order(torch.cat([ids, begun[new]]))[:most]
        own, unwanted = first[first < len(ids)], first[first >= len(ids)] - len(ids)
        begins = torch.ones_like(begun, dtype=torch.bool)
        begins[new[unwanted]] = False
        numbers = [[*of_table] for of_table in admitted.numbers]
        numbers[t][BEGUN] -= len(unwanted)
        ids_left, counts_left = (part[begins] for part in admitted.begun)
        admitted = admitted._replace(begun=(ids_left, counts_left), numbers=numbers)
        return Chosen(ids[own], rows[own], {t: len(own)}), admitted


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
