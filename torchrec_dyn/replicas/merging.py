"""One sync on one rank, from what has changed here to the merged contents of all tables here. Writes nothing.

Every replica tells which ids have changed. Ids are cut into parts, one a replica. The replica of a part
decides on its ids by what all tell of them. Then the rows of ids that stay are sent to it, and their means
from it to all.

Legend: K ids, M rows, R replicas, P parts (as many), S sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn import ops
from torchrec_dyn.life import Clock
from torchrec_dyn.replicas.exchange import (
    DIGEST_BYTES,
    Cursor,
    Sends,
    digest_of,
    joined,
    lists_joined,
)
from torchrec_dyn.replicas.merge import HAS_ROW, ROW, Told, Verdict
from torchrec_dyn.replicas.side import Changes, Merged, Side
from torchrec_dyn.storage import canonical_order

# Merged rows of one part that are sent at once; a rank receives so many bytes from each replica.
_ROUND_BYTES = 8 << 20


class Run(NamedTuple):
    """A run of the rows of one side in one part: those with places [begin, end)."""

    side: int
    begin: int
    end: int


def rounds_of(rows: Sequence[int], row_bytes: Sequence[int], most: int) -> list[list[Run]]:
    """Returns the rows of S sides in rounds of at most `most` bytes, and at least one row, each."""
    rounds: list[list[Run]] = []
    left = 0
    for side, (count, size) in enumerate(zip(rows, row_bytes, strict=True)):
        begin = 0
        while begin < count:
            if left < size:
                rounds.append([])
                left = max(most, size)
            end = min(count, begin + left // size)
            rounds[-1].append(Run(side, begin, end))
            left -= (end - begin) * size
            begin = end
    return rounds


def part_of(ids: Tensor, parts: int) -> Tensor:
    """Returns the part of each of ids [K] int64, [K] int64: by the low bits of mixed ids.

    Ranks own ranges of mixed ids, so the high bits are alike here.
    """
    return (ops.mix64(ids) & 0xFFFFFFFF) % parts


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
        mine = [
            [
                side.tell(of_side, change)
                for side, of_side, change in zip(self._sides, ids, changes, strict=True)
            ]
            for ids in unions
        ]
        told = yield from self._told(unions[self._place], mine)
        verdicts = [
            side.decide(of_side, clock)
            for side, clock, *of_side in zip(self._sides, self.clocks, *told, strict=True)
        ]
        kinds, words = yield from self._decided(unions, verdicts)
        whole = [_joined_parts(of_parts) for of_parts in (unions, kinds, words)]
        for side, ids, kinds_of_ids, _ in zip(self._sides, *whole, strict=True):
            side.check_limit(ids, kinds_of_ids)
        rows = _Rows(self._sides, self._place, unions, kinds, mine, told, verdicts)
        return [Merged(*one) for one in zip(*whole, (yield from rows.exchange()), strict=True)]

    def _unions(self, changes: Sequence[Changes]) -> Sends[list[list[Tensor]]]:
        """Returns the ids that changed on some replica, by part and side, in canonical order, [P][S].

        Sets `clocks`.
        """
        clocks = [side.clock for side in self._sides]
        digest = digest_of(clocks)
        parts = [part_of(change.ids, self._parts) for change in changes]
        both = [*zip(changes, parts, strict=True)]
        arrived = yield [
            joined([digest, lists_joined([one.ids[part == number] for one, part in both])])
            for number in range(self._parts)
        ]
        cursors = [Cursor(sent) for sent in arrived]
        digests = [cursor.take(torch.uint8, DIGEST_BYTES) for cursor in cursors]
        of_replicas = [cursor.lists(len(self._sides)) for cursor in cursors]
        if not all(one.equal(digest) for one in digests):
            told = yield [lists_joined([one.flatten() for one in clocks])] * self._parts
            of_clocks = [Cursor(sent).lists(len(self._sides)) for sent in told]
            self.clocks = [
                Clock.latest([one.view(2, -1) for one in of_side])
                for of_side in zip(*of_clocks, strict=True)
            ]
        unions = [torch.unique(torch.cat(ids)) for ids in zip(*of_replicas, strict=True)]
        union = lists_joined([ids[canonical_order(ids)] for ids in unions])
        arrived = yield [union] * self._parts
        return [Cursor(sent).lists(len(self._sides)) for sent in arrived]

    def _told(
        self, ids: Sequence[Tensor], mine: Sequence[Sequence[Told]]
    ) -> Sends[list[list[Told]]]:
        """Returns what the replicas have of the ids of this rank's part, [R][S]; sends what is here."""
        arrived = yield [
            joined(
                [
                    tensor
                    for side, one in zip(self._sides, of_part, strict=True)
                    for tensor in (one if side.has_life else one[:1])
                ]
            )
            for of_part in mine
        ]
        told: list[list[Told]] = []
        for cursor in map(Cursor, arrived):
            told.append([])
            for side, of_side in zip(self._sides, ids, strict=True):
                count = of_side.numel()
                flags = cursor.take(torch.uint8, count)
                scores = [_words(cursor, side, count) for _ in range(2)]
                told[-1].append(Told(flags, *scores))
        return told

    def _decided(
        self, unions: Sequence[Sequence[Tensor]], verdicts: Sequence[Verdict]
    ) -> Sends[tuple[list[list[Tensor]], list[list[Tensor]]]]:
        """Returns kinds and words of the verdicts on all ids, by part and side, [P][S]."""
        mine = joined(
            [
                tensor
                for side, one in zip(self._sides, verdicts, strict=True)
                for tensor in ((one.kinds, one.words) if side.has_life else (one.kinds,))
            ]
        )
        arrived = yield [mine] * self._parts
        kinds: list[list[Tensor]] = []
        words: list[list[Tensor]] = []
        for cursor, ids in zip(map(Cursor, arrived), unions, strict=True):
            kinds.append([])
            words.append([])
            for side, of_side in zip(self._sides, ids, strict=True):
                kinds[-1].append(cursor.take(torch.uint8, of_side.numel()))
                words[-1].append(_words(cursor, side, of_side.numel()))
        return kinds, words


class _Rows:
    """The rows of the ids that get one, which are merged by the replicas of their parts.

    Args:
        sides: the tables of this rank.
        place: number of this rank's replica.
        unions: the ids, [P][S].
        kinds: the verdicts on them, [P][S].
        mine: what this rank has told of them, [P][S].
        told: what the replicas have told of the ids of this rank's part, [R][S].
        verdicts: the whole verdicts on these, [S].
    """

    def __init__(
        self,
        sides: Sequence[Side],
        place: int,
        unions: Sequence[Sequence[Tensor]],
        kinds: Sequence[Sequence[Tensor]],
        mine: Sequence[Sequence[Told]],
        told: Sequence[Sequence[Told]],
        verdicts: Sequence[Verdict],
    ) -> None:
        self._sides, self._place = sides, place
        self._told, self._verdicts = told, verdicts
        self._sizes = [side.record_bytes for side in sides]
        # The ids with a row, and which of them have one here, [P][S].
        self._chosen = [
            [
                (ids[kind == ROW], (one.flags[kind == ROW] & HAS_ROW) != 0)
                for ids, kind, one in zip(*of_part, strict=True)
            ]
            for of_part in zip(unions, kinds, mine, strict=True)
        ]
        # Their places in the part of this rank, [S].
        self._places = [(verdict.kinds == ROW).nonzero().flatten() for verdict in verdicts]
        self._rounds = [
            rounds_of([ids.numel() for ids, _ in of_part], self._sizes, _ROUND_BYTES)
            for of_part in self._chosen
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
            [piece for of_part in records for piece in of_part[side]]
            for side in range(len(self._sides))
        ]

    def _runs(self, part: int, number: int) -> list[Run]:
        rounds = self._rounds[part]
        return rounds[number] if number < len(rounds) else []

    def _read(self, part: int, number: int) -> Tensor:
        """Returns the records of a round of a part that are here."""
        found = []
        for run in self._runs(part, number):
            ids, is_here = (one[run.begin : run.end] for one in self._chosen[part][run.side])
            side = self._sides[run.side]
            found.append(side.records(ids[is_here]))
        return joined(found)

    def _merge(self, arrived: Sequence[Tensor], number: int) -> Tensor:
        """Returns the means of a round of this rank's part, of the records of the replicas."""
        cursors, means = [Cursor(sent) for sent in arrived], []
        for run in self._runs(self._place, number):
            side, size = self._sides[run.side], self._sizes[run.side]
            at = self._places[run.side][run.begin : run.end]
            records = []
            for cursor, told in zip(cursors, self._told, strict=True):
                has_row = (told[run.side].flags[at] & HAS_ROW) != 0
                of_replica = torch.zeros(at.numel(), size, dtype=torch.uint8, device="cpu")
                of_replica[has_row] = cursor.take(torch.uint8, int(has_row.sum()), size)
                records.append(of_replica)
            ids = self._chosen[self._place][run.side][0][run.begin : run.end]
            verdict = self._verdicts[run.side]
            gives, takes_part = verdict.gives[:, at], verdict.takes_part[:, at]
            means.append(side.mean(ids, records, gives, takes_part))
        return joined(means)


def _joined_parts(of_parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Returns the tensors of each side, part after part, of tensors [P][S]."""
    return [torch.cat(of_side) for of_side in zip(*of_parts, strict=True)]


def _words(cursor: Cursor, side: Side, count: int) -> Tensor:
    """Returns the next scores of a side, [count] int64; zeros if its table has none."""
    if side.has_life:
        return cursor.take(torch.int64, count)
    return torch.zeros(count, dtype=torch.int64, device="cpu")
