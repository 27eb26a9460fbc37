"""MergedTable: one table at an entry of a chain, a full save and the deltas after it, read without a model.

All saves have their ids in canonical order, so one pass over all of them meets each id once. A pass first
reads ids and removed ids, some of each save at a time, decides which save has the newest row of each id, and
then reads these rows only.

Legend: M rows of a part, D columns.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format.checkpoint_reader import open_table
from torchrec_dyn.checkpoint_format.column_cuts import mean_over_cuts
from torchrec_dyn.checkpoint_format.content_sums import DAMAGED, add_sums, content_sum
from torchrec_dyn.checkpoint_format.entries import Entry, read_chain
from torchrec_dyn.checkpoint_format.row_source import RowSource, TableFacts
from torchrec_dyn.checkpoint_format.saved_table import SavedTable
from torchrec_dyn.checkpoint_format.tensor_checks import ROW_TENSORS, is_canonical
from torchrec_dyn.optimizers import STATE_NAMES
from torchrec_dyn.storage import canonical_keys

_ID_BYTES = 8
_NUMBERS = ("ids", "last_seen", "count")  # one int64 a row


def saved_rows(
    path: str | os.PathLike[str], table: str | None, step: int | None, call: str
) -> MergedTable:
    """Returns a table of a checkpoint, or of a directory of `Checkpoints` at a step.

    `path` is the directory of a checkpoint, or of `Checkpoints`: then `step` is that of an entry, None: the
    newest. `table` is the name of the table, or its key in the checkpoint; None: the only table.

    Raises:
        ValueError: if there is no such table or step, or a save is missing, torn or damaged.
    """
    entry: Entry | None = None
    chain = read_chain(path)
    if chain.entries:
        entry = chain.entries[-1] if step is None else chain.at(step)
        if step is None and chain.highest > entry.sequence:
            warnings.warn(
                f"{call}: expected whole saves in {path}, got newer ones that are not: "
                f"{' '.join(chain.skipped)} Step {entry.step} is read.",
                stacklevel=4,
            )
        line = chain.line_of(entry)
        if line is None:
            raise ValueError(
                f"{call}: expected the full save and all deltas before {entry.path}, got a line that is "
                "not whole. Export another step, whose full save is there."
            )
        folders = [one.tables for one in line]
    elif chain.skipped or step is not None:
        why = f": {' '.join(chain.skipped)}" if chain.skipped else "."
        raise ValueError(
            f"{call}: expected a directory of Checkpoints with a whole entry, got {path} without "
            f"one{why} Give a step of a directory of Checkpoints only."
        )
    else:
        folders = [Path(path)]
    saves = [open_table(folder, table, f"{call}({folder})") for folder in folders]
    if saves[0].is_delta:
        raise ValueError(
            f"{call}: expected a full checkpoint, got {folders[0]}, a delta, which has changes only. "
            "Give the directory of Checkpoints that it is in."
        )
    return MergedTable(f"{call}(table='{saves[-1].name}', {folders[-1]})", saves, entry)


class MergedTable(RowSource):
    """A table as it was at its last save.

    `saves` are a full save and the deltas after it, in order; the full save alone, too. `entry` is the entry
    of the last save, whose content sums the rows must have; None: of the full save.

    Attributes:
        last: the last save; configs and tensors that are not by row are whole in it.
    """

    def __init__(self, where: str, saves: Sequence[SavedTable], entry: Entry | None = None) -> None:
        self.where, self._saves = where, tuple(saves)
        self.last = last = saves[-1]
        step, seed = None if entry is None else entry.step, int(last.config["seed"])
        self.facts = TableFacts(last.name, last.embedding_dim, last.dtype, seed, step)
        self._sums: Mapping[str, int] = last.sums
        if entry is not None:
            self._sums = entry.sums_by_tensor().get(last.name, {})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors by row; a save without rows may lack some of them."""
        with_rows = [save for save in self._saves if save.num_rows]
        known = [set(save.row_names) for save in with_rows or self._saves]
        found = set.intersection(*known) if with_rows else set.union({"ids", "weight"}, *known)
        return tuple(name for name in ROW_TENSORS if name in found)

    def columns_of(self, name: str) -> int:
        """Returns the number of columns of a tensor by row."""
        if name in _NUMBERS:
            return 1
        saves = [save for save in self._saves if save.num_rows and name in save.row_names]
        if name == "weight" or not saves:
            return self.last.embedding_dim
        return saves[-1].row_bytes_of((name,)) // torch.float32.itemsize

    def _row_bytes_of(self, name: str) -> int:
        of_number = {"weight": self.last.dtype.itemsize, **dict.fromkeys(_NUMBERS, _ID_BYTES)}
        return self.columns_of(name) * of_number.get(name, torch.float32.itemsize)

    def parts(
        self, names: Sequence[str], part_bytes: int, ids: range | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yields the rows of the table in canonical order.

        All ids are checked against their content sum, and all other tensors if all rows are read: do not rely
        on any part before the last.

        A part has at most `part_bytes`; about twice as many are in memory.

        Returns:
            Parts, each with the same rows of all `names` and "ids": [M, columns] or [M].

        Raises:
            ValueError: while reading, if a save is damaged, or the saves have several dtypes of rows.
        """
        dtypes = sorted({str(save.dtype) for save in self._saves})
        if "weight" in names and len(dtypes) > 1:  # of a job that had converted its table
            raise ValueError(
                f"{self.where}: expected saves with one dtype of rows, got {dtypes}. Call "
                "Checkpoints.restore in the training job, then save(..., full=True), and use that entry."
            )
        names = [name for name in names if name != "ids"]
        row_bytes = _ID_BYTES + sum(map(self._row_bytes_of, names))
        streams = self._streams(max(1, part_bytes // row_bytes))
        summed: dict[str, int] = {}
        while filled := [stream for stream in streams if stream.fill()]:
            end = min(stream.end_key for stream in filled)
            taken = [stream.take(end) for stream in streams]
            found, sources = _newest(taken)
            summed = add_sums(summed, {"ids": content_sum(self.last.name, "ids", found, found)})
            if ids is not None:
                is_chosen = (found >= ids.start) & (found <= ids.stop - 1)
                found, sources = found[is_chosen], sources[is_chosen]
            if not len(found):
                continue
            part = {"ids": found}
            for name in names:
                part[name] = self._gathered(name, streams, taken, sources)
                if ids is None:
                    own = content_sum(self.last.name, name, found, part[name])
                    summed = add_sums(summed, {name: own})
            yield part
        for name in ("ids", *(names if ids is None else ())):
            if self._has_sum_of(name) and summed.get(name, 0) != self._sums.get(name, 0):
                raise ValueError(
                    f"{self.where}: expected {name} with content sum {self._sums.get(name, 0):016x}, got "
                    f"{summed.get(name, 0):016x}. {DAMAGED}"
                )

    def waiting(self, part_rows: int) -> Iterator[Tensor]:
        """Yields the waiting ids, [M, 3] int64: id, step of the last occurrence, count.

        Raises:
            ValueError: while reading, if they are damaged.
        """
        if "waiting" not in self.last.names:
            return
        total, row_bytes = 0, self.last.row_bytes_of(("waiting",))
        for chunk in self.last.chunks(("waiting",), chunk_bytes=part_rows * row_bytes):
            rows = chunk["waiting"]
            total += content_sum(self.last.name, "waiting", rows[:, 0].contiguous(), rows)
            yield rows
        if total % (1 << 64) != self.last.sums["waiting"]:
            raise ValueError(
                f"{self.where}: expected waiting with content sum {self.last.sums['waiting']:016x}, got "
                f"{total % (1 << 64):016x}. {DAMAGED}"
            )

    def clock(self) -> Tensor:
        """Returns steps and the time that begins at each, [2, K] int64."""
        if "clock" not in self.last.names:
            return torch.empty(2, 0, dtype=torch.int64, device="cpu")
        return self.last.read("clock")

    def _streams(self, rows: int) -> list[_Stream]:
        """Returns the ids and removed ids of all saves, newest first; together they hold about `rows` ids.

        A save holds as many ids as its share of all, so that all saves reach their ends together. The ids of
        a delta stand before its removed ids: an id that is in both has a row.
        """
        named = [(save, name) for save in reversed(self._saves) for name in ("ids", "removed")]
        counts = [save.rows_of(name) for save, name in named]
        total = max(1, sum(counts))
        return [
            _Stream(self.where, save, name, count, 1 + rows * count // total)
            for (save, name), count in zip(named, counts, strict=True)
            if count
        ]

    def _gathered(
        self, name: str, streams: Sequence[_Stream], taken: Sequence[_Taken], sources: Tensor
    ) -> Tensor:
        """Returns the rows of one tensor, [M, columns] or [M], each from its source."""
        made: Tensor | None = None
        for stream, one in zip(streams, taken, strict=True):
            places = ((sources >= one.source) & (sources < one.source + len(one.ids))).nonzero()
            if not len(places):
                continue
            places = places.flatten()
            wanted = sources[places] - one.source  # ascending
            first, last = int(wanted[0]), int(wanted[-1]) + 1
            read = stream.save.rows(name, one.first + first, one.first + last)
            rows = self._in_last_cuts(stream.save, name, read)
            if len(places) == len(sources) == len(rows):
                return rows
            if made is None:
                made = rows.new_empty(len(sources), *rows.shape[1:])
            made[places] = rows[wanted - first]
        assert made is not None
        return made

    def _in_last_cuts(self, save: SavedTable, name: str, rows: Tensor) -> Tensor:
        """Returns row-wise optimizer state in the column cuts of the last save, as a load does."""
        cuts, last = _cuts(save), _cuts(self.last)
        if name not in STATE_NAMES or cuts == last or rows.shape[1] != len(cuts) - 1:
            return rows
        return torch.cat([mean_over_cuts(rows, cuts, span) for span in pairwise(last)], 1)

    def _has_sum_of(self, name: str) -> bool:
        """Returns False for row-wise state saved in several cuts: a load may have rounded it twice."""
        cuts = {tuple(_cuts(save)) for save in self._saves}
        return name not in STATE_NAMES or len(cuts) == 1


def _cuts(save: SavedTable) -> list[int]:
    return list((save.optimizer or {}).get("cuts", ()))


class _Taken:
    """The next ids of a stream: ids [M] int64, their keys, and the row of the first in its save."""

    def __init__(self, ids: Tensor, keys: Tensor, first: int, is_removed: bool) -> None:
        self.ids, self.keys, self.first, self.is_removed = ids, keys, first, is_removed
        self.source = 0  # number of the first id among the ids of all streams


class _Stream:
    """The ids, or the removed ids, of one save, some at a time."""

    def __init__(self, where: str, save: SavedTable, name: str, count: int, most: int) -> None:
        self._where, self.save, self._name, self._count, self._most = where, save, name, count, most
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._keys = self._ids
        self._read = 0  # ids read so far, with those that are held

    def fill(self) -> bool:
        """Reads further ids; returns False at the end.

        Raises:
            ValueError: if ids are not in canonical order.
        """
        missing = min(self._most - len(self._ids), self._count - self._read)
        if missing > 0:
            more = self.save.rows(self._name, self._read, self._read + missing)
            self._ids = torch.cat([self._ids, more])
            self._keys = canonical_keys(self._ids)
            self._read += missing
            if not is_canonical(self._ids):
                raise ValueError(
                    f"{self._where}: expected {self._name} in canonical order, got another order up to row "
                    f"{self._read} of {self.save.key}. {DAMAGED}"
                )
        return bool(len(self._ids))

    @property
    def end_key(self) -> int:
        """The largest key up to which all ids of this stream are held."""
        at_end = self._read == self._count
        return torch.iinfo(torch.int64).max if at_end else int(self._keys[-1])

    def take(self, end: int) -> _Taken:
        """Takes the ids with keys up to `end`."""
        cut = int(torch.searchsorted(self._keys, end, right=True))
        first = self._read - len(self._ids)
        taken = _Taken(self._ids[:cut], self._keys[:cut], first, self._name == "removed")
        self._ids, self._keys = self._ids[cut:], self._keys[cut:]
        return taken


def _newest(taken: Sequence[_Taken]) -> tuple[Tensor, Tensor]:
    """Returns the ids that have a row, [M] int64 in canonical order, and their numbers among all ids taken.

    Of equal ids the first stream counts, and ids that are removed in it have no row.
    """
    count, kept = 0, [one for one in taken if len(one.ids)]
    for one in taken:
        one.source, count = count, count + len(one.ids)
    if len(kept) == 1:
        (one,) = kept
        numbers = torch.arange(one.source, one.source + len(one.ids), device="cpu")
        return (one.ids[:0], numbers[:0]) if one.is_removed else (one.ids, numbers)
    keys, order = torch.cat([one.keys for one in taken]).sort(stable=True)
    is_first = torch.ones(len(keys), dtype=torch.bool, device="cpu")
    is_first[1:] = keys[1:] != keys[:-1]
    numbers = order[is_first]
    is_removed = torch.cat(
        [torch.full((len(one.ids),), one.is_removed, device="cpu") for one in taken]
    )
    numbers = numbers[~is_removed[numbers]]
    return torch.cat([one.ids for one in taken])[numbers], numbers
