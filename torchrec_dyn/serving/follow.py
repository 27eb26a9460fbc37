"""Keeps a directory of served tables at the newest entry of a directory of `Checkpoints`.

What is served is known by its content sums, which the entries name too: so nothing else is remembered, and a
follower that is started again, or another one, goes on where the files are.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import Entry, open_checkpoint, read_chain
from torchrec_dyn.serving.builder import build
from torchrec_dyn.serving.manifest import current_generation, read_manifest
from torchrec_dyn.serving.update import apply_delta, build_again


@dataclass(frozen=True)
class Followed:
    """A new generation of served tables.

    Attributes:
        entry: the entry whose rows are served.
        generation: name of the generation, as `generation` of a serving collection.
        changed: by table the ids whose rows are new or other than in the generation before, [M] int64; None
            if the tables were built from a full save: any row may be other.
        removed: by table the ids without a row that had one in the generation before, [M] int64; None as
            `changed`.
        lag: seconds from the moment of the rows to the moment when they could be served.
        skipped: a line for each newer entry that could not be used, and why.
    """

    entry: Entry
    generation: str
    changed: Mapping[str, Tensor] | None
    removed: Mapping[str, Tensor] | None
    lag: float
    skipped: Sequence[str]

    @property
    def dense(self) -> Path:
        """Folder of the DCP checkpoint with the dense part, for `dcp.load`."""
        return self.entry.dense


class Follower:
    """Brings a directory of served tables to the newest entry of a directory of `Checkpoints`.

    Args:
        path: the directory of `Checkpoints`.
        to: the directory of served tables. The first call of `poll` makes it.
        rows: dtype of the served rows, as in `build`.
        tables: names of the tables to serve; None: all.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        to: str | os.PathLike[str],
        *,
        rows: torch.dtype = torch.float32,
        tables: Sequence[str] | None = None,
    ) -> None:
        self.path, self.to = Path(path), Path(to)
        self._rows, self._tables = rows, tables

    def __repr__(self) -> str:
        return f"Follower({str(self.path)!r}, to={str(self.to)!r})"

    def poll(self) -> Followed | None:
        """Serves the newest entry that is whole, if it is not served yet.

        Deltas are applied one after another. If the served rows are not on the line of the newest entry (a
        full save came after them, or the trainer went back and took another way), they are built from its
        full save, in a new generation that readers change to like any other.

        Returns:
            The new generation; None if nothing is new.

        Raises:
            ValueError: nothing could be used. What was served still is.
            OSError: the disk is full, or fails. What was served still is.
        """
        chain = read_chain(self.path)
        skipped, fault = list(chain.skipped), None
        for entry in reversed(chain.entries):
            line = chain.line_of(entry)
            if line is None:
                skipped.append(f"{entry.path.name}: an entry before it is missing")
                continue
            at = self._place_in(line)
            if at == len(line) - 1:
                return None
            try:
                return self._go(line, at, skipped)
            except ValueError as error:
                fault = fault or error
                skipped.append(f"{entry.path.name}: {' '.join(str(error).split())}")
        if fault is not None:
            raise ValueError(
                f"{self.path}: expected an entry that can be served, got none. {' '.join(skipped)}"
            ) from fault
        return None

    def lag(self) -> float | None:
        """Returns the seconds since the moment of the served rows; None if they are of no entry here."""
        for entry in reversed(read_chain(self.path).entries):
            if self._place_in([entry]) == 0:
                return time.time() - entry.time
        return None

    def _place_in(self, line: Sequence[Entry]) -> int | None:
        """Returns the place of the served rows in a line of entries; None if they are not there."""
        if not self.to.exists():
            return None
        tables = read_manifest(self.to, current_generation(self.to)).tables
        for place in reversed(range(len(line))):
            sums = line[place].row_sums()
            if all(
                sums.get(name) == (one.sums["ids"], one.sums["weight"])
                for name, one in tables.items()
            ):
                return place
        return None

    def _go(self, line: Sequence[Entry], at: int | None, skipped: list[str]) -> Followed:
        """Serves the entries of a line behind a place, as far as they are sound; at least one."""
        is_anew, served = at is None, at
        changed: dict[str, Tensor] = {}
        removed: dict[str, Tensor] = {}
        if at is None:
            if self.to.exists():
                build_again(self.to, line[0].tables)
            else:
                build(line[0].tables, self.to, self._rows, self._tables)
            served = 0
        assert served is not None
        for entry in line[served + 1 :]:
            try:
                apply_delta(self.to, entry.tables)
            except ValueError as error:
                if served == at:
                    raise
                skipped.append(f"{entry.path.name}: {' '.join(str(error).split())}")
                break
            served += 1
            if not is_anew:
                self._note(entry, changed, removed)
        return Followed(
            line[served],
            current_generation(self.to),
            None if is_anew else changed,
            None if is_anew else removed,
            time.time() - line[served].time,
            skipped,
        )

    def _note(self, entry: Entry, changed: dict[str, Tensor], removed: dict[str, Tensor]) -> None:
        """Adds the ids of a delta to those of the deltas before it."""
        for table in open_checkpoint(entry.tables).tables.values():
            if self._tables is not None and table.name not in self._tables:
                continue
            nothing = torch.empty(0, dtype=torch.int64, device="cpu")
            ids, gone = (
                table.read(name) if name in table.names else nothing for name in ("ids", "removed")
            )
            before = changed.get(table.name, nothing), removed.get(table.name, nothing)
            changed[table.name] = torch.cat([_without(before[0], torch.cat([ids, gone])), ids])
            removed[table.name] = torch.cat([_without(before[1], torch.cat([ids, gone])), gone])


def _without(ids: Tensor, others: Tensor) -> Tensor:
    return ids[~torch.isin(ids, others)]


def follow(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    every: float = 1.0,
    rows: torch.dtype = torch.float32,
    tables: Sequence[str] | None = None,
) -> Iterator[Followed]:
    """Yields each new generation of served tables, without end; a `Follower` that looks every few seconds.

    An entry that cannot be used, or a full disk, is a warning, and is tried again.

    Args:
        path: the directory of `Checkpoints`.
        to: the directory of served tables.
        every: seconds between two looks.
        rows: dtype of the served rows, as in `build`.
        tables: names of the tables to serve; None: all.
    """
    follower = Follower(path, to, rows=rows, tables=tables)
    while True:
        try:
            followed = follower.poll()
        except (ValueError, OSError) as error:
            warnings.warn(f"serving.follow: {error}", stacklevel=2)
            followed = None
        if followed is not None:
            yield followed
        else:
            time.sleep(every)
