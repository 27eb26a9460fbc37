"""ChangeLog: which rows of a table changed, and which ids left it, since moments that somebody holds.

Until the first moment is asked for nothing is kept, and when the last one was dropped all of it is forgotten,
at the next change. A moment is a number that counts up; a row has two marks: the number at which it last
changed, and that at which its id got it. Of an id that left, both ends of its stay are kept if a moment that
is held lies between them: so the log is never longer than the table was at those moments.

What changes follows from the stream of ids alone, so the column shards of a table agree.

Legend: T tables, N rows named, M ids.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from torchrec_dyn.storage.id_map import IdMap
from torchrec_dyn.storage.row_marks import RowMarks

_SLOTS_AT_ONCE = 1 << 20


_NO_IDS = torch.empty(0, dtype=torch.int64)


class Moment:
    """A moment of one table. What changes from it on is kept for as long as this object lives.

    Attributes:
        log: of the table.
        number: marks that are not lower are of changes since.
    """

    def __init__(self, log: ChangeLog, number: int) -> None:
        self.log = log
        self.number = number


class _Left(NamedTuple):
    """Ids that left.

    Attributes:
        at: the number at which they did.
        ids: [M] int64.
        born: [M] int32, the number at which each had got its row.
    """

    at: int
    ids: Tensor
    born: Tensor


class ChangeLog:
    """What changed in one table, or in one column shard of it.

    Args:
        row_limit: of the table.
        device: of the table.

    Attributes:
        number: of the latest moment; as int32, one a second lasts 68 years.
        token: stands for this log and this number.
        changed: of each row, when it last changed.
        born: of each row, when its id got it.
    """

    def __init__(self, row_limit: int, device: torch.device) -> None:
        self._of = (row_limit, device)
        self.number, self.token = 0, object()
        self.changed, self.born = RowMarks(*self._of), RowMarks(*self._of)
        self._left: list[_Left] = []
        self._moments: WeakSet[Moment] = WeakSet()

    @property
    def is_wanted(self) -> bool:
        """Whether anybody holds a moment."""
        return len(self._moments) > 0

    def moment(self) -> Moment:
        """Begins a moment."""
        self.number, self.token = self.number + 1, object()
        moment = Moment(self, self.number)
        self._moments.add(moment)
        return moment

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows."""
        self.changed.reserve(rows)
        self.born.reserve(rows)

    def came(self, rows: Tensor) -> None:
        """Takes note of rows that ids just got.

        Args:
            rows: [M] int64.
        """
        self.changed.write(rows, self.number)
        self.born.write(rows, self.number)

    def left(self, ids: Tensor, rows: Tensor) -> None:
        """Takes note of ids that just left.

        Args:
            ids: [M] int64.
            rows: [M] int64, which they held.
        """
        held = [moment.number for moment in self._moments]
        while self._left and self._left[0].at < min(held, default=0):
            del self._left[0]
        born = self.born.read(rows)
        is_asked_for = born < max(held, default=0)  # others came and left behind every moment
        if bool(is_asked_for.any()):
            self._left.append(_Left(self.number, ids[is_asked_for], born[is_asked_for]))
        # One step after another lets a few go: pieces are joined so that there are never many.
        while len(self._left) > 1 and _belong_together(*self._left[-2:]):
            one, other = self._left.pop(-2), self._left.pop()
            ids, born = torch.cat([one.ids, other.ids]), torch.cat([one.born, other.born])
            self._left.append(_Left(one.at, ids, born))

    def replaced(self, ids: Tensor, rows: Tensor, high: int) -> None:
        """Takes note that all ids of before left, and that all that are here now came.

        Args:
            ids: [M] int64, of before.
            rows: [M] int64, which they held.
            high: rows handed out now.
        """
        changed, born = RowMarks(*self._of), RowMarks(*self._of)
        for marks in (changed, born):
            marks.reserve(high)
            marks.fill(self.number)
        self.left(ids, rows)
        self.changed, self.born = changed, born

    def changed_rows(self, since: Moment, id_map: IdMap) -> tuple[Tensor, Tensor]:
        """Lists the ids that have a row now which changed since, or which they got since; in any order.

        Args:
            since: a moment of this log.
            id_map: of the table.

        Returns:
            ids: [M] int64.
            rows: [M] int64, theirs.
        """
        has_changed = self.changed.at_least(since.number)
        found = [_NO_IDS.reshape(0, 2)]
        for array in id_map.arrays()[0]:
            for slots in array.split(_SLOTS_AT_ONCE):
                used = slots[slots[:, 1] != 0]
                found.append(used[has_changed[used[:, 1] - 1]])
        both = torch.cat(found)
        return both[:, 0].contiguous(), both[:, 1] - 1

    def removed_ids(self, since: Moment, id_map: IdMap) -> Tensor:
        """Lists the ids that had a row at a moment and have none now, in any order.

        Args:
            since: a moment of this log.
            id_map: of the table.

        Returns:
            [M] int64.
        """
        left = [one for one in self._left if one.at >= since.number]
        # No id is twice in it: of its stays only one began before the moment and ended after it.
        ids = torch.cat([_NO_IDS, *(one.ids[one.born < since.number] for one in left)])
        return ids[id_map.lookup(ids) < 0]

    @property
    def bytes(self) -> int:
        """Bytes of marks and of the ids that left."""
        left = sum(one.ids.nbytes + one.born.nbytes for one in self._left)
        return self.changed.bytes + self.born.bytes + left


def _belong_together(one: _Left, other: _Left) -> bool:
    return one.at == other.at and one.ids.numel() <= 2 * other.ids.numel()
