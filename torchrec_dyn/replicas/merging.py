"""One sync on one rank, from what has changed here to the merged rows of all tables, beside their shards.

Every replica sends the ids that have changed. Ids are cut into parts, one a replica. The replica of a part
decides on its ids by their states on all replicas. Then the rows of ids that stay are sent to it, and their
means from it to all.

Legend: K ids, M rows, R replicas, P parts (as many), S sides.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from torchrec_dyn.replicas.side import Side
from torchrec_dyn.storage import canonical_order

# Of the ids of a side that changed on some side, the same on all: ids [K] int64, verdicts [K] uint8, and
# scores [K] int64; and the merged clock.
Merged = tuple[Tensor, Tensor, Tensor, Clock | None]


def rounds_of(
    rows: Sequence[int], row_bytes: Sequence[int], most: int
) -> list[list[tuple[int, slice]]]:
    """Returns the rows of S sides in rounds of at most `most` bytes, and at least one row, each.

    A round has sides, and the range of rows of each.
    """
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
    """

    def __init__(self, sides: Sequence[Side], place: int, replicas: int) -> None:
        self._sides, self._place, self._parts = sides, place, replicas

    def run(self) -> Sends[list[Merged]]:
        """Appends the merged rows to the sides, and returns what else was merged of each."""
        unions, clocks = yield from self._unions()
        own_states = [
            [side.states_of(side_ids) for side, side_ids in zip(self._sides, ids, strict=True)]
            for ids in unions
        ]
        id_states = yield from self._gather_states(unions[self._place], own_states)
        verdicts = [
            side.decide(side_states, clock)
            for side, clock, *side_states in zip(self._sides, clocks, *id_states, strict=True)
        ]
        kinds, words = yield from self._decided(unions, verdicts)
        whole = [_joined_parts(parts) for parts in (unions, kinds, words)]
        for side, ids, kinds_of_ids, _ in zip(self._sides, *whole, strict=True):
            side.check_limit(ids, kinds_of_ids)
        # The ids with a row, their scores, and which of them have a row here, [P][S].
        chosen = [
            [
                (ids[kind == ROW], scores[kind == ROW], _has_row(states)[kind == ROW])
                for ids, kind, scores, states in zip(*part, strict=True)
            ]
            for part in zip(unions, kinds, words, own_states, strict=True)
        ]
        yield from self._exchange_rows(chosen, id_states, verdicts)
        return list(zip(*whole, clocks, strict=True))

    def _unions(self) -> Sends[tuple[list[list[Tensor]], list[Clock | None]]]:
        """Returns the ids that changed on some replica, by part and side, in canonical order, [P][S].

        Also the merged clock of each side; None where all replicas have the same.
        """
        own_clocks = [side.clock for side in self._sides]
        digest = digest_of(own_clocks)
        by_part = zip(
            *(_cut(side.find_changes(), self._parts) for side in self._sides), strict=True
        )
        arrived = yield [joined([digest, lists_joined(ids)]) for ids in by_part]
        cursors = [Cursor(sent) for sent in arrived]
        digests = [cursor.take(torch.uint8, DIGEST_BYTES) for cursor in cursors]
        by_replica = [cursor.lists(len(self._sides)) for cursor in cursors]
        clocks: list[Clock | None] = [None for _ in self._sides]
        if any(not other.equal(digest) for other in digests):
            clocks = yield from self._merged_clocks(own_clocks)
        unions = [torch.unique(torch.cat(ids)) for ids in zip(*by_replica, strict=True)]
        union = lists_joined([ids[canonical_order(ids)] for ids in unions])
        arrived = yield [union] * self._parts
        return [Cursor(sent).lists(len(self._sides)) for sent in arrived], clocks

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

    def _exchange_rows(
        self,
        chosen: Sequence[Sequence[tuple[Tensor, Tensor, Tensor]]],
        id_states: Sequence[Sequence[IdStates]],
        verdicts: Sequence[Verdict],
    ) -> Sends[None]:
        """Sends the rows of the chosen ids to the replicas of their parts, and appends their means here.

        `id_states` [R][S] are the states of the ids of this rank's part on the replicas, with the `verdicts`
        on these, [S].
        """
        sizes = [side.record_bytes for side in self._sides]
        rounds = [
            rounds_of([ids.numel() for ids, _, _ in part], sizes, knobs.ROUND_BYTES)
            for part in chosen
        ]
        places = [(verdict.kinds == ROW).nonzero().flatten() for verdict in verdicts]

        def runs(part: int, number: int) -> list[tuple[int, slice]]:
            return rounds[part][number] if number < len(rounds[part]) else []

        def records(part: int, number: int) -> Tensor:
            """Returns the records of a round of a part that are here."""
            read = []
            for side, span in runs(part, number):
                ids, _, is_here = chosen[part][side]
                read.append(self._sides[side].records(ids[span][is_here[span]]))
            return joined(read)

        def means(arrived: Sequence[Tensor], number: int) -> Tensor:
            """Returns the means of a round of this rank's part, of the records of the replicas."""
            cursors, merged = [Cursor(sent) for sent in arrived], []
            for side, span in runs(self._place, number):
                at, size = places[side][span], sizes[side]
                side_records = []
                for cursor, states in zip(cursors, id_states, strict=True):
                    has_row = _has_row(states[side])[at]
                    side_records.append(
                        torch.zeros(at.numel(), size, dtype=torch.uint8, device="cpu")
                    )
                    side_records[-1][has_row] = cursor.take(torch.uint8, int(has_row.sum()), size)
                ids, verdict = chosen[self._place][side][0][span], verdicts[side]
                gives, takes_part = verdict.gives[:, at], verdict.takes_part[:, at]
                merged.append(self._sides[side].mean(ids, side_records, gives, takes_part))
            return joined(merged)

        for number in range(max(map(len, rounds))):
            arrived = yield [records(part, number) for part in range(self._parts)]
            merged = yield [means(arrived, number)] * self._parts
            for part, cursor in enumerate(map(Cursor, merged)):
                for side, span in runs(part, number):
                    ids, words, _ = chosen[part][side]
                    rows = cursor.take(torch.uint8, span.stop - span.start, sizes[side])
                    self._sides[side].append(ids[span], words[span], rows)


def _has_row(states: IdStates) -> Tensor:
    return (states.flags & HAS_ROW) != 0


def _joined_parts(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Returns the tensors of each side, part after part, of tensors [P][S]."""
    return [torch.cat(side) for side in zip(*parts, strict=True)]


def _words(cursor: Cursor, side: Side, count: int) -> Tensor:
    """Returns the next scores of a side, [count] int64; zeros if its table has none."""
    if side.has_life:
        return cursor.take(torch.int64, count)
    return torch.zeros(count, dtype=torch.int64, device="cpu")
