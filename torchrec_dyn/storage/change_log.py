"""ChangeLog: the rows of a table that changed, and the ids that were removed, since a version in use.

A version is a point in the life of a table. A table keeps a log only while a version is held
(table/arrays.py). Versions are numbered 1, 2, ... On a GPU a row has two marks: the number of the latest
version before its last change, and the number of the latest version before its id was added. On the CPU the
ids of the changed rows are listed instead of the first mark, so that a delta takes as long as its rows
(touched_rows.py). For a removed id the numbers of its addition and its removal are kept if a version in use
lies between them. So the log never holds more removed ids than the table held at those versions.
A GPU's log may hold some more: the host waits where it sifts them out, so it does that rarely.

Changes depend only on the ids and their order in time, so all column shards of a table log the same.

Legend: T tables, N rows in table order, M ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.storage.host_reads import places_of, read
from torchrec_dyn.storage.id_map import IdMap
from torchrec_dyn.storage.row_marks import (
    RowMarks,
    bits_bytes,
    list_bits,
    marks_bytes,
    write_marks,
)
from torchrec_dyn.storage.touched_rows import TouchedRows, touch_rows

_SLOTS_AT_ONCE = 1 << 20
_ID_BYTES = 8
# Ids in a GPU's log that are not sifted yet: 48 KiB, or 1.5 bytes for each row of the limit.
_UNSIFTED_SHARE = 8


def most_log_bytes(rows: int, row_limit: int, device_type: str = "cpu") -> int:
    """Returns the bytes of the log of a table if all rows change between two markers and no id is removed."""
    marks = marks_bytes(rows, row_limit, device_type)
    if device_type != "cpu":
        return 2 * marks
    return marks + bits_bytes(rows, row_limit) + _ID_BYTES * rows


@dataclass(eq=False)
class Version:
    """A version of one table. Changes after it are kept as long as this object exists.

    They have the mark `number` or a higher mark. If `keeps_erased`, ids that the user erases are kept, too.
    """

    log: ChangeLog
    number: int
    keeps_erased: bool = False


class _Removed(NamedTuple):
    """Ids [M] int64 that were removed after version `at`, and the versions [M] int32 of their additions."""

    at: int
    ids: Tensor
    added: Tensor
    is_sifted: bool = False


class ChangeLog:
    """The changes of one table, or of one column shard of it. The latest version has `number`, an int32."""

    def __init__(self, row_limit: int, device: torch.device) -> None:
        self._row_limit, self._device = row_limit, device
        self.number, self.token = 0, object()
        self._versions: WeakSet[Version] = WeakSet()
        self.touched: TouchedRows | None
        self.changed: RowMarks | None
        self.touched, self.changed = self._nothing_changed(device)
        self.added = RowMarks(row_limit, device)
        self.removed: list[_Removed] = []
        self.erased: list[tuple[int, Tensor]] = []

    def _nothing_changed(
        self, device: torch.device
    ) -> tuple[TouchedRows, None] | tuple[None, RowMarks]:
        if device.type == "cpu":
            return TouchedRows(self._row_limit, self._versions), None
        return None, RowMarks(self._row_limit, device)

    @property
    def is_in_use(self) -> bool:
        """True if a version is held."""
        return len(self._versions) > 0

    def _numbers(self) -> list[int]:
        return [version.number for version in self._versions]

    def version(self, id_map: IdMap, withheld: Tensor, keeps_erased: bool = False) -> Version:
        """Starts and returns a version of a table with this map; withheld [M] int64 are its withheld rows."""
        # First: an update must not take rows as recorded whose bits are cleared here.
        self.token = object()
        if self.changed is not None:
            self.changed.settle(self.number)
        # Before the version begins: an interrupted one leaves its number unused, else two would have it.
        self.number += 1
        if self.touched is not None:
            self.touched.begin(self.number, withheld, id_map)
        self.token = object()
        version = Version(self, self.number, keeps_erased)
        self._versions.add(version)
        self.erased = self._still_asked()
        return version

    def note_erased(self, ids: Tensor) -> None:
        """Notes that the user erases ids [M] int64, with or without a row; only a version may ask for it."""
        kept = self._still_asked()
        if ids.numel() and any(version.keeps_erased for version in self._versions):
            kept.append((self.number, ids))
        self.erased = kept

    def _still_asked(self) -> list[tuple[int, Tensor]]:
        """Returns the erased ids that a version in use keeps."""
        asking = [version.number for version in self._versions if version.keeps_erased]
        return [(at, ids) for at, ids in self.erased if any(at >= number for number in asking)]

    def erased_ids(self, since: Version) -> Tensor:
        """Returns the ids [M] int64 that the user erased since a version that keeps them, each once."""
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        pieces = [ids.to(self._device) for at, ids in self.erased if at >= since.number]
        return torch.unique(torch.cat([nothing, *pieces]))

    def has_come_since(self, rows: Tensor, since: Version) -> Tensor:
        """Returns for rows [M] int64, -1 for none, whether their ids got them since a version, [M] bool."""
        return self.added.read(rows) >= since.number

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows."""
        for marks in (self.touched, self.changed, self.added):
            if marks is not None:
                marks.reserve(rows)

    def add(self, ids: Tensor, rows: Tensor, id_map: IdMap) -> None:
        """Records that rows [M] int64 are given to ids [M] int64; the map may lack the ids still."""
        if self.touched is not None:
            self.touched.add(ids, rows, id_map)
        elif self.changed is not None:
            self.changed.write(rows, self.number)
        self.added.write(rows, self.number)

    def touch(self, ids: Tensor, rows: Tensor) -> None:
        """Takes rows [M] int64 out of the sums that are kept, before they are removed with ids [M] int64."""
        if self.touched is not None:
            self.touched.touch(ids, rows)

    def note_all(self) -> None:
        """Records that all rows change."""
        if self.touched is not None:
            self.touched.touch_all()
        elif self.changed is not None:
            self.changed.fill(self.number)

    def forget_sums(self) -> None:
        """Forgets the content sums of the rows that were not touched: the contents are replaced."""
        if self.touched is not None:
            self.touched.rest = None

    def with_removed(self, ids: Tensor, rows: Tensor) -> list[_Removed]:
        """Returns `removed` as it must be when ids [M] int64 lose their rows [M] int64; changes nothing."""
        versions = self._numbers()
        removed = [piece for piece in self.removed if piece.at >= min(versions, default=0)]
        if rows.numel():
            _append(removed, _Removed(self.number, ids, self.added.read(rows)))
        unsifted = [piece for piece in removed if not piece.is_sifted]
        most = (
            0 if rows.is_cpu else max(knobs.LEAST_UNSIFTED_IDS, self._row_limit // _UNSIFTED_SHARE)
        )
        if sum(piece.ids.numel() for piece in unsifted) > most:
            del removed[-len(unsifted) :]
            for piece in _sifted(unsifted, versions):
                _append(removed, piece)
        return removed

    def replaced(
        self, ids: Tensor, rows: Tensor, high: int, device: torch.device
    ) -> dict[str, object]:
        """Returns the log's attributes if ids [M] int64 lose rows [M] int64 and all present ids are new.

        `high`, the number of rows handed out, and `device` are the present ones.
        """
        most = max(high, self.added.capacity)
        touched, changed = self._nothing_changed(device)
        added = RowMarks(self._row_limit, device)
        added.reserve(most)
        added.fill(self.number)
        if touched is not None:
            touched.reserve(most)
            touched.number = self.number
            touched.touch_all()
        elif changed is not None:
            changed.reserve(most)
            changed.fill(self.number)
        removed = [
            piece._replace(ids=piece.ids.to(device), added=piece.added.to(device))
            for piece in self.with_removed(ids, rows)
        ]
        marks = {"touched": touched, "changed": changed, "added": added}
        return {**marks, "removed": removed, "_device": device}

    def changed_rows(self, since: Version, id_map: IdMap) -> tuple[Tensor, Tensor]:
        """Returns the ids whose row changed or came since a version, and the rows, [M] int64 each."""
        if self.touched is not None:
            return self.touched.changed(since.number, id_map)
        assert self.changed is not None
        has_changed = self.changed.at_least(since.number)
        changed_slots = [torch.empty(0, 2, dtype=torch.int64, device=self._device)]
        for array in id_map.arrays()[0]:
            for slots in array.split(_SLOTS_AT_ONCE):
                used = slots[slots[:, 1] != 0]
                changed_slots.append(used[has_changed[used[:, 1] - 1]])
        both = torch.cat(changed_slots)
        return both[:, 0].contiguous(), both[:, 1] - 1

    def removed_ids(self, since: Version, id_map: IdMap) -> Tensor:
        """Returns ids [M] int64 that had a row at a version of this log and have none now, in any order."""
        pieces = [piece for piece in self.removed if piece.at >= since.number]
        # No id occurs twice: an id added before the version is removed after it only once.
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        ids = torch.cat([nothing, *(piece.ids[piece.added < since.number] for piece in pieces)])
        return ids[id_map.lookup(ids) < 0]

    @property
    def bytes(self) -> int:
        """Bytes of the marks, of the listed ids, and of the removed and erased ids."""
        removed = sum(piece.ids.nbytes + piece.added.nbytes for piece in self.removed)
        removed += sum(ids.nbytes for _, ids in self.erased)
        changed = self.touched or self.changed
        return (0 if changed is None else changed.bytes) + self.added.bytes + removed


def _sifted(pieces: Sequence[_Removed], versions: Sequence[int]) -> list[_Removed]:
    """Returns removed ids without those that were added after the latest version before their removal."""
    latest = [max((m for m in versions if m <= piece.at), default=0) for piece in pieces]
    masks = [piece.added < version for piece, version in zip(pieces, latest, strict=True)]
    counts = read([mask.count_nonzero() for mask in masks])
    places = [places_of(mask, count) for mask, count in zip(masks, counts, strict=True)]
    return [
        _Removed(piece.at, piece.ids[own], piece.added[own], is_sifted=True)
        for piece, own in zip(pieces, places, strict=True)
    ]


def _append(pieces: list[_Removed], last: _Removed) -> None:
    """Appends a piece that is not empty. Joins pieces: many steps remove a few ids each."""
    if last.ids.numel():
        pieces.append(last)
    while len(pieces) > 1:
        first, last = pieces[-2:]
        if (first.at, first.is_sifted) != (last.at, last.is_sifted):
            break
        if first.ids.numel() > 2 * last.ids.numel():
            break
        ids, added = torch.cat([first.ids, last.ids]), torch.cat([first.added, last.added])
        pieces[-2:] = [last._replace(ids=ids, added=added)]


def note_changed(
    logs: Sequence[ChangeLog | None],
    ids: Tensor | Sequence[IdMap],
    rows: Tensor,
    table_offsets: Tensor,
) -> None:
    """Records rows [N] int64 of ids [N] int64, or of each table's map, before they or their scores change."""
    if all(log is None for log in logs):
        return
    if _on_cpu(logs):
        touch_rows([None if log is None else log.touched for log in logs], ids, rows, table_offsets)
        return
    marks = [None if log is None else log.changed for log in logs]
    numbers = [0 if log is None else log.number for log in logs]
    write_marks(marks, rows, table_offsets, numbers)


def _on_cpu(logs: Sequence[ChangeLog | None]) -> bool:
    return all(log is None or log.touched is not None for log in logs)


def note_update(
    logs: Sequence[ChangeLog | None], id_maps: Sequence[IdMap], rows: Tensor, table_offsets: Tensor
) -> tuple[Sequence[Tensor], Tensor | None]:
    """As `note_changed`, for an update that comes next; returns the arguments with which a GPU's does it."""
    if _on_cpu(logs):
        note_changed(logs, id_maps, rows, table_offsets)
        return (), None
    marks = [None if log is None else log.changed for log in logs]
    return list_bits([None if own is None else (own.bits, own.shift) for own in marks])


def unrecorded(
    logs: Sequence[ChangeLog | None], noted: Sequence[object] | None
) -> list[ChangeLog | None]:
    """Returns the logs, None for those without a new version since `noted`, the `tokens_of` the logs then."""
    pairs = zip(logs, noted or [None] * len(logs), strict=True)
    return [None if log is None or log.token is token else log for log, token in pairs]


def tokens_of(logs: Sequence[ChangeLog | None]) -> list[object]:
    """Returns a token of each table's latest version, new for each log and version; None without a log."""
    return [None if log is None else log.token for log in logs]
