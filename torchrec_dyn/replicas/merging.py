"""One sync on one rank, from what has changed here to the merged rows of all tables, beside their shards.

Every replica sends the ids that have changed. Ids are cut into parts, one a replica. The replica of a part
decides on its ids by their states on all replicas. Then the rows of ids that stay are sent to it, and their
means from it to all.

What a rank computes is a generator: it yields tensors for each replica, and gets those from each. So
`run_over` sends them over ranks, a test hands them over in one process, and an error between two sends is an
error on all.

Legend: K ids, M rows, R replicas, P parts (as many), S sides.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import islice
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.life import Clock
from torchrec_dyn.ranks import exchange, gather_results
from torchrec_dyn.replicas.merge import HAS_ROW, ROW, IdStates, Verdict
from torchrec_dyn.replicas.side import Side
from torchrec_dyn.storage import canonical_order

_T = TypeVar("_T")
# Yields tensors [...] of the CPU for each replica, in their order, and gets tensors from each.
Sends = Generator[list[list[Tensor]], list[list[Tensor]], _T]
# Of the ids of a side that changed on some side, the same on all: ids [K] int64, verdicts [K] uint8, and
# scores [K] int64; and the merged clock.
Merged = tuple[Tensor, Tensor, Tensor, Clock | None]

_Form = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a tensor
_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


def run_over(
    group: dist.ProcessGroup, ranks: Sequence[int], call: str, work: Sends[_T]
) -> tuple[_T, int]:
    """Runs a generator on every rank of the job; returns its result, and the bytes sent to other replicas.

    Generators of one replica group send equally often; those of other groups may send more or less often.
    `group` are all ranks of the job; it sends tensors of the CPU. `ranks` are those of this replica group in
    it, in the order of the replicas. An error of one rank is one of all.
    """
    place, total = ranks.index(dist.get_rank(group)), 0
    arrived: list[list[Tensor]] = []
    results: list[_T] = []
    while True:
        parts: list[list[Tensor]] = []
        forms = gather_results(group, call, lambda: _next_forms(work, arrived, parts, results))  # noqa: B023
        if all(of_rank is None for of_rank in forms):
            return results[0], total
        sent, received = [0] * len(forms), [0] * len(forms)
        data: dict[int, Tensor] = {}
        for rank, part in zip(ranks, parts, strict=False):
            of_other = forms[rank]
            assert of_other is not None, "generators of a replica group send equally often"
            data[rank] = torch.cat(
                [_NO_BYTES, *(one.reshape(-1).view(torch.uint8) for one in part)]
            )
            sent[rank], received[rank] = data[rank].numel(), sum(map(_bytes_of, of_other[place]))
        total += sum(sent) - sent[ranks[place]]
        whole = torch.cat([_NO_BYTES, *(data[rank] for rank in sorted(data))])
        by_rank = exchange(group, whole, sent, received).split(received)
        arrived = [_as_sent(by_rank[rank], (forms[rank] or [])[place]) for rank in data]


def _next_forms(
    work: Sends[_T], arrived: list[list[Tensor]], parts: list[list[Tensor]], results: list[_T]
) -> list[list[_Form]] | None:
    """Runs a generator to its next send: adds its parts, and returns their forms; None at its end."""
    if results:
        return None
    try:
        parts.extend(work.send(arrived) if arrived else next(work))
    except StopIteration as end:
        results.append(end.value)
        return None
    return [[(one.dtype, tuple(one.shape)) for one in part] for part in parts]


def _bytes_of(form: _Form) -> int:
    return form[0].itemsize * prod(form[1])


def _as_sent(data: Tensor, forms: Sequence[_Form]) -> list[Tensor]:
    """Returns the tensors of these forms that were sent as data [n] uint8."""
    parts = zip(data.split([*map(_bytes_of, forms)]), forms, strict=True)
    # A copy: bytes begin anywhere.
    return [part.clone().view(dtype).view(shape) for part, (dtype, shape) in parts]


def rounds_of(
    rows: Sequence[int], row_bytes: Sequence[int], most: int
) -> list[list[tuple[int, slice]]]:
    """Returns rounds of at most `most` bytes, or one row: sides, and the range of rows of each."""
    rounds: list[list[tuple[int, slice]]] = []
    left = 0
    for side, (count, size) in enumerate(zip(rows, row_bytes, strict=True)):
        begin = 0
        while begin < count:
            if left < size:
                rounds.append([])
                left = max(most, size)
            end = min(count, begin + left // size)
            rounds[-1].append((side, slice(begin, end)))
            left -= (end - begin) * size
            begin = end
    return rounds


def part_of(ids: Tensor, parts: int) -> Tensor:
    """Returns the part of each of ids [K] int64, [K] int64."""
    # Ranks own ranges of mixed ids, so the high bits are alike here.
    return (ops.mix64(ids) & 0xFFFFFFFF) % parts


def _cut(ids: Tensor, parts: int) -> list[Tensor]:
    """Returns ids [K] int64 by their parts."""
    part = part_of(ids, parts)
    return [ids[part == number] for number in range(parts)]


class Merging:
    """One sync of the sides of this rank, whose replica is number `place` among R."""

    def __init__(self, sides: Sequence[Side], place: int, replicas: int) -> None:
        self._sides, self._place, self._parts = sides, place, replicas

    def run(self) -> Sends[list[Merged]]:
        """Appends the merged rows to the sides, and returns what else was merged of each."""
        unions, clocks = yield from self._unions()
        own_states = [
            [side.states_of(side_ids) for side, side_ids in zip(self._sides, ids, strict=True)]
            for ids in unions
        ]
        arrived = yield [self._sent(part) for part in own_states]
        id_states = [[IdStates(*states) for states in self._received(sent, 2)] for sent in arrived]
        verdicts = [
            side.decide(side_states, clock)
            for side, clock, *side_states in zip(self._sides, clocks, *id_states, strict=True)
        ]
        arrived = yield [self._sent([verdict[:2] for verdict in verdicts])] * self._parts
        decided = self._decided(unions, arrived)
        whole = [
            [torch.cat(parts) for parts in zip(*by_part, strict=True)]
            for by_part in zip(*decided, strict=True)
        ]
        for side, (ids, kinds, _) in zip(self._sides, whole, strict=True):
            side.check_limit(ids, kinds)
        # The ids with a row, their scores, and which of them have a row here, [P][S].
        chosen = [
            [
                (ids[kinds == ROW], words[kinds == ROW], _has_row(states)[kinds == ROW])
                for (ids, kinds, words), states in zip(*part, strict=True)
            ]
            for part in zip(decided, own_states, strict=True)
        ]
        yield from self._exchange_rows(chosen, id_states, verdicts)
        return [
            (ids, kinds, words, clock)
            for (ids, kinds, words), clock in zip(whole, clocks, strict=True)
        ]

    def _decided(
        self, unions: Sequence[Sequence[Tensor]], arrived: Sequence[Sequence[Tensor]]
    ) -> list[list[tuple[Tensor, ...]]]:
        """Returns ids with kinds and words of the verdicts that arrived, by part and side, [P][S]."""
        return [
            [(ids, *verdict) for ids, verdict in zip(part, self._received(sent, 1), strict=True)]
            for part, sent in zip(unions, arrived, strict=True)
        ]

    def _unions(self) -> Sends[tuple[list[list[Tensor]], list[Clock | None]]]:
        """Returns the ids that changed somewhere, in canonical order, [P][S], and clocks that differed."""
        own_clocks = [side.clock for side in self._sides]
        by_part = zip(
            *(_cut(side.find_changes(), self._parts) for side in self._sides), strict=True
        )
        arrived = yield [[*own_clocks, *ids] for ids in by_part]
        by_side = [*zip(*arrived, strict=True)]
        clocks = [
            None if all(map(own.equal, saved)) else Clock.latest(saved)
            for own, saved in zip(own_clocks, by_side, strict=False)
        ]
        unions = [torch.unique(torch.cat(ids)) for ids in by_side[len(self._sides) :]]
        return (yield [[ids[canonical_order(ids)] for ids in unions]] * self._parts), clocks

    def _sent(self, by_side: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Returns tensors [K] of each side, one after another; scores only of tables that have any."""
        return [
            tensor
            for side, tensors in zip(self._sides, by_side, strict=True)
            for tensor in (tensors if side.has_life else tensors[:1])
        ]

    def _received(self, sent: Sequence[Tensor], scores: int) -> list[list[Tensor]]:
        """Returns what `_sent` was given: of each side one tensor, and so many of scores, else zeros."""
        left, by_side = iter(sent), []
        for side in self._sides:
            first = next(left)
            zeros = torch.zeros(len(first), dtype=torch.int64, device="cpu")
            by_side.append(
                [first, *(next(left) if side.has_life else zeros for _ in range(scores))]
            )
        return by_side

    def _exchange_rows(
        self,
        chosen: Sequence[Sequence[tuple[Tensor, Tensor, Tensor]]],
        id_states: Sequence[Sequence[IdStates]],
        verdicts: Sequence[Verdict],
    ) -> Sends[None]:
        """Sends rows of chosen ids [P][S] to their parts, and appends their means here; id_states [R][S]."""
        sizes = [side.record_bytes for side in self._sides]
        counts = [side.record_tensors for side in self._sides]
        rounds = [
            rounds_of([ids.numel() for ids, _, _ in part], sizes, knobs.ROUND_BYTES)
            for part in chosen
        ]
        places = [(verdict.kinds == ROW).nonzero().flatten() for verdict in verdicts]

        def runs(part: int, number: int) -> list[tuple[int, slice]]:
            return rounds[part][number] if number < len(rounds[part]) else []

        def records(part: int, number: int) -> list[Tensor]:
            """Returns the records of a round of a part that are here."""
            read: list[Tensor] = []
            for side, span in runs(part, number):
                ids, _, is_here = chosen[part][side]
                read += self._sides[side].records(ids[span][is_here[span]])
            return read

        def means(arrived: Sequence[Sequence[Tensor]], number: int) -> list[Tensor]:
            """Returns the means of a round of this rank's part, of the records of the replicas."""
            left, merged = [iter(sent) for sent in arrived], []
            for side, span in runs(self._place, number):
                at, ids = places[side][span], chosen[self._place][side][0][span]
                have_row = [_has_row(states[side])[at] for states in id_states]
                given = [
                    [_in_places(rows, has_row) for rows in islice(sent, counts[side])]
                    for sent, has_row in zip(left, have_row, strict=True)
                ]
                gives, takes_part = verdicts[side].gives[:, at], verdicts[side].takes_part[:, at]
                merged += self._sides[side].mean(ids, given, gives, takes_part)
            return merged

        for number in range(max(map(len, rounds))):
            arrived = yield [records(part, number) for part in range(self._parts)]
            merged = yield [means(arrived, number)] * self._parts
            for part, left in enumerate(map(iter, merged)):
                for side, span in runs(part, number):
                    ids, words, _ = chosen[part][side]
                    rows = [*islice(left, counts[side])]
                    self._sides[side].append(ids[span], words[span], rows)


def _has_row(states: IdStates) -> Tensor:
    return (states.flags & HAS_ROW) != 0


def _in_places(rows: Tensor, has_row: Tensor) -> Tensor:
    """Returns rows [M, columns] where has_row [K] is True, else zeros: [K, columns]."""
    placed = rows.new_zeros(len(has_row), rows.shape[1])
    placed[has_row] = rows
    return placed
