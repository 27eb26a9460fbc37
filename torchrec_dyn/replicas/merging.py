"""One sync on one rank, from what has changed here to the merged contents of all tables here. Writes nothing.

Every replica sends the ids that have changed. Ids are cut into parts, one a replica. The replica of a part
decides on its ids by their states on all replicas. Then the rows of ids that stay are sent to it, and their
means from it to all.

Legend: K ids, M rows, R replicas, P parts (as many), S sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops
from torchrec_dyn.life import Clock
from torchrec_dyn.replicas.exchange import (
    DIGEST_BYTES,
    Cursor,
    Sends,
    digest_of,
    joined,
    lists_joined,
)
from torchrec_dyn.replicas.merge import HAS_ROW, ROW, IdStates, Verdict
from torchrec_dyn.replicas.side import Changes, Merged, Side
from torchrec_dyn.storage import canonical_order


class SideRows(NamedTuple):
    """Rows of one side in one part: those with places [begin, end)."""

    side: int
    begin: int
    end: int


def rounds_of(rows: Sequence[int], row_bytes: Sequence[int], most: int) -> list[list[SideRows]]:
    """Returns the rows of S sides in rounds of at most `most` bytes, and at least one row, each."""
    rounds: list[list[SideRows]] = []
    left = 0
    for side, (count, size) in enumerate(zip(rows, row_bytes, strict=True)):
        begin = 0
        while begin < count:
            if left < size:
                rounds.append([])
                left = max(most, size)
            end = min(count, begin + left // size)
            rounds[-1].append(SideRows(side, begin, end))
            left -= (end - begin) * size
            begin = end
    return rounds


def part_of(ids: Tensor, parts: int) -> Tensor:
    """Returns the part of each of ids [K] int64, [K] int64: by the low bits of mixed ids.

    Ranks own ranges of mixed ids, so the high bits are alike here.
    """
    return (ops.mix64(ids) & 0xFFFFFFFF) % parts


def _cut(ids: Tensor, parts: int) -> list[Tensor]:
    """Returns ids [K] int64 by their parts."""
    part = part_of(ids, parts)
    return [ids[part == number] for number in range(parts)]


class Merging:
    """One sync of the sides of this rank.

    `sides` are the tables that this rank has shards of, `place` is the number of its replica among R.

    Attributes:
        clocks: the merged clock of each side; None where all replicas have the same.
    """

    def __init__(self, sides: Sequence[Side], place: int, replicas: int) -> None:
        self._sides, self._place, self._parts = sides, place, replicas
        self.clocks: list[Clock | None] = [None for _ in sides]

    def run(self) -> Sends[list[Merged]]:
        """Returns the merged contents of each side.

        Raises:
            RuntimeError: if the union of rows is over the limit of a table.
        """
        changes = [side.find_changes() for side in self._sides]
        unions = yield from self._unions(changes)
        own_states = [
            [
                side.states_of(side_ids, change)
                for side, side_ids, change in zip(self._sides, ids, changes, strict=True)
            ]
            for ids in unions
        ]
        id_states = yield from self._gather_states(unions[self._place], own_states)
        verdicts = [
            side.decide(side_states, clock)
            for side, clock, *side_states in zip(self._sides, self.clocks, *id_states, strict=True)
        ]
        kinds, words = yield from self._decided(unions, verdicts)
        whole = [_joined_parts(parts) for parts in (unions, kinds, words)]
        for side, ids, kinds_of_ids, _ in zip(self._sides, *whole, strict=True):
            side.check_limit(ids, kinds_of_ids)
        rows = _Rows(self._sides, self._place, unions, kinds, own_states, id_states, verdicts)
        return [
            Merged(*fields) for fields in zip(*whole, (yield from rows.exchange()), strict=True)
        ]

    def _unions(self, changes: Sequence[Changes]) -> Sends[list[list[Tensor]]]:
        """Returns the ids that changed on some replica, by part and side, in canonical order, [P][S].

        Sets `clocks`.
        """
        clocks = [side.clock for side in self._sides]
        digest = digest_of(clocks)
        by_part = zip(*(_cut(change.ids, self._parts) for change in changes), strict=True)
        arrived = yield [joined([digest, lists_joined(ids)]) for ids in by_part]
        cursors = [Cursor(sent) for sent in arrived]
        digests = [cursor.take(torch.uint8, DIGEST_BYTES) for cursor in cursors]
        by_replica = [cursor.lists(len(self._sides)) for cursor in cursors]
        if any(not other.equal(digest) for other in digests):
            self.clocks = yield from self._merged_clocks(clocks)
        unions = [torch.unique(torch.cat(ids)) for ids in zip(*by_replica, strict=True)]
        union = lists_joined([ids[canonical_order(ids)] for ids in unions])
        arrived = yield [union] * self._parts
        return [Cursor(sent).lists(len(self._sides)) for sent in arrived]

    def _merged_clocks(self, clocks: Sequence[Tensor]) -> Sends[list[Clock | None]]:
        """Returns the merged clock of each side, from clocks [2, K] int64 of all replicas."""
        arrived = yield [lists_joined([clock.flatten() for clock in clocks])] * self._parts
        by_replica = [Cursor(sent).lists(len(self._sides)) for sent in arrived]
        return [
            Clock.latest([clock.view(2, -1) for clock in side_clocks])
            for side_clocks in zip(*by_replica, strict=True)
        ]

    def _gather_states(
        self, ids: Sequence[Tensor], own_states: Sequence[Sequence[IdStates]]
    ) -> Sends[list[list[IdStates]]]:
        """Returns the states of the ids of this rank's part on the replicas, [R][S]; sends its own."""
        arrived = yield [
            joined(
                [
                    tensor
                    for side, states in zip(self._sides, part, strict=True)
                    for tensor in (states if side.has_life else states[:1])
                ]
            )
            for part in own_states
        ]
        id_states: list[list[IdStates]] = []
        for cursor in map(Cursor, arrived):
            id_states.append([])
            for side, side_ids in zip(self._sides, ids, strict=True):
                count = side_ids.numel()
                flags = cursor.take(torch.uint8, count)
                scores = [_words(cursor, side, count) for _ in range(2)]
                id_states[-1].append(IdStates(flags, *scores))
        return id_states

    def _decided(
        self, unions: Sequence[Sequence[Tensor]], verdicts: Sequence[Verdict]
    ) -> Sends[tuple[list[list[Tensor]], list[list[Tensor]]]]:
        """Returns kinds and words of the verdicts on all ids, by part and side, [P][S]."""
        own_verdicts = joined(
            [
                tensor
                for side, verdict in zip(self._sides, verdicts, strict=True)
                for tensor in verdict[: 2 if side.has_life else 1]
            ]
        )
        arrived = yield [own_verdicts] * self._parts
        kinds: list[list[Tensor]] = []
        words: list[list[Tensor]] = []
        for cursor, ids in zip(map(Cursor, arrived), unions, strict=True):
            kinds.append([])
            words.append([])
            for side, side_ids in zip(self._sides, ids, strict=True):
                kinds[-1].append(cursor.take(torch.uint8, side_ids.numel()))
                words[-1].append(_words(cursor, side, side_ids.numel()))
        return kinds, words


class _Rows:
    """The rows of the ids that get one, which are merged by the replicas of their parts.

    `unions` are the ids, with `kinds` and the states on this rank, all [P][S]; `id_states` [R][S] are the
    states of the ids of this rank's part on the replicas, with the `verdicts` on these, [S].
    """

    def __init__(
        self,
        sides: Sequence[Side],
        place: int,
        unions: Sequence[Sequence[Tensor]],
        kinds: Sequence[Sequence[Tensor]],
        own_states: Sequence[Sequence[IdStates]],
        id_states: Sequence[Sequence[IdStates]],
        verdicts: Sequence[Verdict],
    ) -> None:
        self._sides, self._place = sides, place
        self._id_states, self._verdicts = id_states, verdicts
        self._sizes = [side.record_bytes for side in sides]
        # The ids with a row, and which of them have one here, [P][S].
        self._chosen = [
            [
                (ids[kind == ROW], (states.flags[kind == ROW] & HAS_ROW) != 0)
                for ids, kind, states in zip(*part, strict=True)
            ]
            for part in zip(unions, kinds, own_states, strict=True)
        ]
        # Their places in the part of this rank, [S].
        self._places = [(verdict.kinds == ROW).nonzero().flatten() for verdict in verdicts]
        self._rounds = [
            rounds_of([ids.numel() for ids, _ in part], self._sizes, knobs.ROUND_BYTES)
            for part in self._chosen
        ]

    def exchange(self) -> Sends[list[list[Tensor]]]:
        """Returns the merged records by side, part after part, each in pieces."""
        parts = range(len(self._chosen))
        records: list[list[list[Tensor]]] = [[[] for _ in self._sides] for _ in parts]  # [P][S]
        for number in range(max(map(len, self._rounds))):
            arrived = yield [self._read(part, number) for part in parts]
            means = yield [self._merge(arrived, number)] * len(parts)
            for part, cursor in enumerate(map(Cursor, means)):
                for run in self._runs(part, number):
                    shape = run.end - run.begin, self._sizes[run.side]
                    records[part][run.side].append(cursor.take(torch.uint8, *shape))
        return [
            [piece for part_records in records for piece in part_records[side]]
            for side in range(len(self._sides))
        ]

    def _runs(self, part: int, number: int) -> list[SideRows]:
        rounds = self._rounds[part]
        return rounds[number] if number < len(rounds) else []

    def _read(self, part: int, number: int) -> Tensor:
        """Returns the records of a round of a part that are here."""
        records = []
        for run in self._runs(part, number):
            ids, is_here = (values[run.begin : run.end] for values in self._chosen[part][run.side])
            records.append(self._sides[run.side].records(ids[is_here]))
        return joined(records)

    def _merge(self, arrived: Sequence[Tensor], number: int) -> Tensor:
        """Returns the means of a round of this rank's part, of the records of the replicas."""
        cursors, means = [Cursor(sent) for sent in arrived], []
        for run in self._runs(self._place, number):
            side, size = self._sides[run.side], self._sizes[run.side]
            at = self._places[run.side][run.begin : run.end]
            records = []
            for cursor, id_states in zip(cursors, self._id_states, strict=True):
                has_row = (id_states[run.side].flags[at] & HAS_ROW) != 0
                arrived_records = torch.zeros(at.numel(), size, dtype=torch.uint8, device="cpu")
                arrived_records[has_row] = cursor.take(torch.uint8, int(has_row.sum()), size)
                records.append(arrived_records)
            ids = self._chosen[self._place][run.side][0][run.begin : run.end]
            verdict = self._verdicts[run.side]
            gives, takes_part = verdict.gives[:, at], verdict.takes_part[:, at]
            means.append(side.mean(ids, records, gives, takes_part))
        return joined(means)


def _joined_parts(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Returns the tensors of each side, part after part, of tensors [P][S]."""
    return [torch.cat(side) for side in zip(*parts, strict=True)]


def _words(cursor: Cursor, side: Side, count: int) -> Tensor:
    """Returns the next scores of a side, [count] int64; zeros if its table has none."""
    if side.has_life:
        return cursor.take(torch.int64, count)
    return torch.zeros(count, dtype=torch.int64, device="cpu")
