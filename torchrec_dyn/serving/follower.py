"""Keeps a directory of served tables at the newest entry of a directory of `Checkpoints`.

What is served is known by its manifest, which names the entry: a follower that is started again, or another
one, goes on where the files are. Deltas are applied to what is served. Where that cannot be (the manifest is
lost, a file is damaged, entries between are gone, a full save came after), the newest full save and the
deltas after it are built aside, and served if they are not older.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    Entry,
    Place,
    PlaceLike,
    SavedChain,
    SavedTable,
    lasting_place_of,
    open_checkpoint,
    read_chain,
)
from torchrec_dyn.serving.builder import apply_deltas, build_instead, build_new
from torchrec_dyn.serving.files import DamagedTables, SecondWriter
from torchrec_dyn.serving.manifest import (
    Manifest,
    ServedEntry,
    known_generation,
    read_manifest,
    served_manifest,
)
from torchrec_dyn.storage import lacks_memory

# The longest time between two looks while errors last, if `every` is shorter.
_LONGEST_WAIT = 60.0
_MOST_SECONDS = 10**9  # time.sleep refuses more than 2^63 nanoseconds

Ids = dict[str, Tensor]  # by table, [M] int64
_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")


class ForkedChain(ValueError):
    """The newest entry does not follow what is served: training went on from an older entry."""


@dataclass(frozen=True)
class Followed:
    """Served rows of a newer entry.

    Attributes:
        entry: the entry whose rows are served.
        generation: name of the generation, the same as `generation` of a serving collection.
        changed: by table, the ids whose rows are new or differ from those of the entry `since`, [M] int64;
            None if any row may differ, because nothing was taken before, the tables were built from a full
            save, or the entries since then were removed.
        removed: by table, the ids that have lost their row since then, [M] int64; None if `changed` is None.
            This includes ids that got a row and lost it since then.
        lag: seconds from the moment of the rows until they could be served; set to 0 if the clocks of two
            machines make it negative.
        skipped: a line for each newer entry that could not be used, and why.
        is_fork: True if the rows served before are of an entry that is not before this entry in the chain.
    """

    entry: Entry
    generation: str
    changed: Mapping[str, Tensor] | None
    removed: Mapping[str, Tensor] | None
    lag: float
    skipped: Sequence[str]
    is_fork: bool = False

    @property
    def dense(self) -> Place:
        """Folder of the DCP checkpoint with the dense part, for `dcp.load`."""
        return self.entry.dense


class Follower:
    """Brings a directory of served tables to the newest entry of a directory of `Checkpoints`.

    Args:
        path: the directory of `Checkpoints`, or its URL.
        to: the directory of served tables. The first call of `poll` makes it.
        rows: dtype of the served rows, as in `build`; None: the dtype already served, float32 at first.
        tables: names of the tables to serve; None: the tables already served, all tables at first.
        since: id of the entry (`followed.entry.id`) whose rows the caller has taken, for `changed` and
            `removed`; None if it has taken no rows.
        follow_forks: True to serve the newest entry even if it does not follow what is served.

    Attributes:
        since: id of the last entry that `poll` returned. A caller that could not take its rows sets it back.
        skipped: a line for each newer entry that could not be used at the last `poll`, and why.

    Raises:
        ValueError: if `path` is a single checkpoint, or `to` has rows of another dtype or other tables.
    """

    def __init__(
        self,
        path: PlaceLike,
        to: str | os.PathLike[str],
        *,
        rows: torch.dtype | None = None,
        tables: Sequence[str] | None = None,
        since: str | None = None,
        follow_forks: bool = False,
    ) -> None:
        # The process may change its working directory.
        self.path, self.to, self.since = lasting_place_of(path), Path(to).absolute(), since
        self._chain = SavedChain(self.path)
        self.skipped: list[str] = []
        self._rows, self._tables, self._follow_forks = rows, tables, follow_forks
        self._known: Manifest | None = None  # the last that was read; its file may be lost since
        self._fault: str | None = None  # the error of the last poll
        if (self.path / ".metadata").exists() and not read_chain(self.path).entries:
            raise ValueError(
                f"Follower: expected a directory of Checkpoints, got {self.path}, one checkpoint of "
                "torch.distributed.checkpoint. Serve it with serving.build, or give the directory of entries."
            )
        self._look()

    def __repr__(self) -> str:
        return f"Follower({str(self.path)!r}, to={str(self.to)!r})"

    def poll(self) -> Followed | None:
        """Serves the newest entry that follows what is served, unless it is served already.

        An entry older than what is served is never used. If the manifest of the served tables is lost, or one
        of their files is damaged, the newest full save and the deltas after it replace them, with a warning.

        Returns:
            What is served now; None if it is the entry `since`.

        Raises:
            ForkedChain: if the newest entry does not follow what is served. `follow_forks` allows it.
            SecondWriter: if another follower writes to the served tables, or has written since they were
                read.
            ValueError: if an entry is damaged, or the manifest is lost and nothing as new as what was served
                can be built. The served tables do not change. Each call tries again; an error that lasts is
                raised once, and is in `skipped` after that.
            OSError: if the disk is full, or fails; also raised once.
            MemoryError: if there is too little memory (RuntimeError from torch); also raised once.
        """
        self.skipped = []
        try:
            followed = self._to_newest()
        except Exception as error:
            if isinstance(error, (ForkedChain, SecondWriter)) or not _may_pass(error):
                raise
            text = _text_of(error)
            self.skipped.append(text)
            lasts, self._fault = text == self._fault, text
            if not lasts:
                raise
            return None
        self._fault = None
        return followed

    def lag(self) -> float | None:
        """Returns the seconds since the moment of the served rows; None if they are not of an entry here."""
        _, damage, chain = self._look()
        entry = None if damage else self._entry(chain)
        return None if entry is None else _seconds_since(entry)

    def served(self) -> str | None:
        """Returns the id of the entry that is served; None if nothing is, or its manifest is lost."""
        _, damage, _ = self._look()
        return None if damage or self._served is None else self._served.id

    @property
    def _served(self) -> ServedEntry | None:
        """The entry that is served, or was before its manifest was lost."""
        return self._known.entry if self._known is not None else None

    def _entry(self, chain: SavedChain) -> Entry | None:
        served = self._served
        return next((entry for entry in chain.entries if served and entry.id == served.id), None)

    def _look(self) -> tuple[str | None, DamagedTables | None, SavedChain]:
        """Reads the name of the served generation, the error of a lost manifest, and then the entries."""
        if not self.to.exists():
            self._known = None
            return None, None, read_chain(self.path)
        try:
            name, manifest = served_manifest(self.to)
        except DamagedTables as damage:
            return known_generation(self.to), damage, read_chain(self.path)
        wanted = None if self._tables is None else sorted(self._tables)
        for what, want, got in (
            ("rows", self._rows, manifest.row_format.dtype),
            ("tables", wanted, sorted(manifest.tables)),
        ):
            if want is not None and want != got:
                raise ValueError(
                    f"Follower: expected {self.to} with {what} {want}, got {got}. Leave {what} out, or serve "
                    "from another directory."
                )
        self._known = manifest
        return name, None, self._read_chain()

    def _read_chain(self) -> SavedChain:
        """Returns the entries. Once the last is served, a look asks for it and for the one after it only."""
        last = self._chain.entries[-1:]
        is_served = self._served is not None and [entry.id for entry in last] == [self._served.id]
        if not is_served or not self._chain.is_newest():
            self._chain = read_chain(self.path)
        return self._chain

    def _to_newest(self) -> Followed | None:
        generation, damage, chain = self._look()
        served = self._served
        self.skipped = self._unusable(chain)
        is_fork = self._check_fork(chain)
        begin = None if served is None or damage is not None else served.id
        way = self._newest_way(chain, begin, 0 if is_fork else self._least(damage, chain))
        if way is None and damage is not None:
            raise ValueError(" ".join([str(damage), *self.skipped])) from damage
        now = self._entry(chain) if way is None else way[-1]
        if now is None:
            return None
        # Before the rows are served: the entries may be removed then.
        changes = self._changes(chain, now)
        if way is not None:
            generation = self._serve(way, generation, damage, chain)
            self._known = read_manifest(self.to, generation)
            return self._followed(now, generation, changes, is_fork)
        return None if generation is None else self._followed(now, generation, changes, False)

    def _unusable(self, chain: SavedChain) -> list[str]:
        """Returns a line for each entry after what is served that cannot be read."""
        last = 0 if self._served is None else self._served.sequence
        lines = [line for line in chain.skipped if _sequence_of(line) > last]
        if self._served is not None and not chain.entries:
            lines.append(f"{self.path}: expected the served entry or later ones, got none")
        return lines

    def _followed(
        self,
        now: Entry,
        generation: str,
        changes: tuple[Ids, Ids] | tuple[None, None],
        is_fork: bool,
    ) -> Followed | None:
        """Returns an entry for the caller; None if it is that which the caller has."""
        if now.id == self.since:
            return None
        self.since, lag, (changed, removed) = now.id, _seconds_since(now), changes
        return Followed(now, generation, changed, removed, lag, self.skipped, is_fork)

    def _check_fork(self, chain: SavedChain) -> bool:
        """Returns True if the newest entry does not come after what is served, and that is allowed."""
        is_fork = self._served is not None and _is_fork(chain, self._served)
        if is_fork and not self._follow_forks:
            raise ForkedChain(
                f"{self.path}: expected entries that come after the served one, got "
                f"{chain.entries[-1].path.name}, which does not: training was restored at an older entry, or "
                "this is another directory. To serve its rows, follow with follow_forks=True (--forks)."
            )
        return is_fork

    def _least(self, damage: DamagedTables | None, chain: SavedChain) -> int:
        """Returns the lowest sequence of an entry to serve: what is served is not newer."""
        if self._served is not None:
            return self._served.sequence + (damage is None)
        if self._known is None and damage is None:
            return 0
        # What is served may be of any entry.
        return chain.entries[-1].sequence if chain.entries else 0

    def _newest_way(self, chain: SavedChain, begin: str | None, least: int) -> list[Entry] | None:
        """Returns the way to the newest entry that has one, from sequence `least` on."""
        for entry in reversed(chain.entries):
            if entry.sequence < least:
                break
            if (way := _way_to(chain, entry, begin)) is not None:
                return way
            self.skipped.append(f"{entry.path.name}: an entry before it is missing.")
        return None

    def _serve(
        self,
        way: Sequence[Entry],
        before: str | None,
        damage: DamagedTables | None,
        chain: SavedChain,
    ) -> str:
        """Applies the deltas of a way, or builds from its full save; returns the generation."""
        now = way[-1]
        entry = ServedEntry(now.sequence, now.id, now.chain)
        if not way[0].is_full:
            assert before is not None
            try:
                return apply_deltas(self.to, [step.tables for step in way], before, entry)
            except DamagedTables as error:
                damage, line = error, chain.line_of(now)
                if line is None:
                    raise
                way = line
        rows, tables = self._wanted(damage)
        folders = [step.tables for step in way]
        if not self.to.exists():
            return build_new(folders, self.to, rows, tables, entry)
        generation = build_instead(folders, self.to, rows, tables, before, entry)
        if damage is not None:
            warnings.warn(
                f"Follower: {damage} The tables were built anew from {way[0].path}.", stacklevel=4
            )
        return generation

    def _wanted(self, damage: DamagedTables | None) -> tuple[torch.dtype, Sequence[str] | None]:
        """Returns dtype and names of the tables to build, as served, or as the caller says."""
        if self._known is not None:
            return self._known.row_format.dtype, tuple(self._known.tables)
        if damage is not None and self._rows is None:
            raise ValueError(
                f"{damage} Or follow with the dtype of its rows, as rows=torch.float32 (--dtype float32), "
                "and tables= if not all were served: they are built then."
            )
        return self._rows or torch.float32, self._tables

    def _changes(self, chain: SavedChain, now: Entry) -> tuple[Ids, Ids] | tuple[None, None]:
        """Returns the ids that changed and that were removed since the caller's entry; None: any may have."""
        if self.since in (None, now.id) or self._known is None:
            return None, None
        way = _way_to(chain, now, self.since)
        if way is None or any(entry.is_full for entry in way):
            return None, None
        changed = dict.fromkeys(self._known.tables, _NO_IDS)
        removed = dict(changed)
        try:
            for saved in (open_checkpoint(entry.tables).tables.values() for entry in way):
                for table in saved:
                    if table.name in changed:
                        _add_changes(table, changed, removed)
        except (ValueError, OSError):  # removed or damaged since they were applied
            return None, None
        return changed, removed


def _add_changes(delta: SavedTable, changed: Ids, removed: Ids) -> None:
    """Adds the ids of a delta of a table: what came last of each id counts."""
    name = delta.name
    ids = delta.read("ids") if delta.num_rows else _NO_IDS
    gone = delta.read("removed") if delta.rows_of("removed") else _NO_IDS
    left = changed[name][~torch.isin(changed[name], gone)]
    changed[name] = torch.cat([left, ids]).unique()
    gone = torch.cat([removed[name], gone]).unique()
    removed[name] = gone[~torch.isin(gone, changed[name])]


def _is_fork(chain: SavedChain, served: ServedEntry) -> bool:
    """Returns True if what is served is known not to be among the entries before the newest."""
    if not chain.entries:
        return False
    newest = chain.entries[-1]
    if newest.chain != served.chain:
        return True
    line = list(chain.backward(newest))
    is_among = served.id in {line[-1].parent, *(entry.id for entry in line)}
    return not is_among and line[-1].sequence <= served.sequence <= newest.sequence


def _way_to(chain: SavedChain, entry: Entry, begin: str | None) -> list[Entry] | None:
    """Returns the deltas from the entry `begin` to an entry, or the last full save and the deltas after it.

    Deltas do not lead across a full save. None if an entry of the way is missing.
    """
    way: list[Entry] = []
    for before in chain.backward(entry):
        if before.id == begin:
            return way[::-1]
        way.append(before)
        if before.is_full or (begin is not None and before.parent == begin):
            return way[::-1]
    return None


def _seconds_since(entry: Entry) -> float:
    return max(0.0, time.time() - entry.time)


def _sequence_of(line: str) -> int:
    """Returns the sequence of the entry that a line of a report begins with."""
    return int(re.split("[-/:]", line)[1])


def follow(
    path: PlaceLike,
    to: str | os.PathLike[str],
    *,
    every: float = 1.0,
    rows: torch.dtype | None = None,
    tables: Sequence[str] | None = None,
    since: str | None = None,
    follow_forks: bool = False,
) -> Iterator[Followed]:
    """Yields what is served, then each newer entry, without end, by polling a `Follower` every few seconds.

    An entry that cannot be used, a fork, a full disk or too little memory gives a single warning. The
    follower tries again, at longer and longer intervals, while the fault lasts.

    Args:
        path: the directory of `Checkpoints`, or its URL.
        to: the directory of served tables.
        every: seconds between two polls, from 0 to 10^9.
        rows: see `Follower`.
        tables: see `Follower`.
        since: see `Follower`.
        follow_forks: see `Follower`.

    Raises:
        ValueError: if `every` is not such a number, or an argument of `Follower` is wrong; raised before the
            first poll.
    """
    if not isinstance(every, Real) or not 0 <= every <= _MOST_SECONDS:
        raise ValueError(
            f"serving.follow: expected every to be a number of seconds from 0 to 10^9, got {every!r}. "
            "Write every=1.0."
        )
    follower = Follower(path, to, rows=rows, tables=tables, since=since, follow_forks=follow_forks)
    return _looks(follower, every)


def _looks(follower: Follower, every: float) -> Iterator[Followed]:
    warned: set[str] = set()
    wait = every
    while True:
        try:
            followed, faults = follower.poll(), [*follower.skipped]
        except Exception as error:
            if not _may_pass(error):
                raise
            followed, faults = None, [_text_of(error)]
        if followed is not None:
            yield followed
            wait = every
        else:
            for fault in faults:
                if fault not in warned:
                    warnings.warn(f"serving.follow: {fault}", stacklevel=2)
            wait = min(2 * wait, max(every, _LONGEST_WAIT)) if faults else every
            time.sleep(wait)
        warned = set(faults)


def _may_pass(error: Exception) -> bool:
    """Returns True for an error that a later poll may not have."""
    return isinstance(error, (ValueError, OSError)) or lacks_memory(error)


def _text_of(error: Exception) -> str:
    """Returns the same text each time that an error is raised again: no name of a new file."""
    if isinstance(error, OSError) and error.errno is not None:
        return str(OSError(error.errno, error.strerror))
    if isinstance(error, (ValueError, OSError)):
        return str(error)
    return f"expected memory to serve an entry, got {type(error).__name__}: {error}. It is tried again."
