"""Keeps a directory of served tables at the newest entry of a directory of `Checkpoints`.

What is served is known by its manifest, which names the entry: a follower that is started again, or another
one, goes on where the files are. Where the manifest is lost, the tables are built anew from a full save, with
dtype and names that the follower was given, or those of the last manifest that it read. If an entry up to
that manifest's is damaged, nothing is built; the rows are those of the full save until the deltas after it
are applied.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import Entry, SavedChain, open_checkpoint, read_chain
from torchrec_dyn.serving.builder import (
    CHUNK_BYTES,
    build_from,
    check_target,
    chosen_tables,
    remove_unfinished,
)
from torchrec_dyn.serving.chain_ways import (
    ForkedChain,
    Way,
    is_replaced,
    way_to,
)
from torchrec_dyn.serving.files import SecondWriter
from torchrec_dyn.serving.manifest import (
    REMEDY,
    LostManifest,
    Manifest,
    ServedEntry,
    current_generation,
    known_generation,
    served_manifest,
)
from torchrec_dyn.serving.update import Choice, Ids, apply_deltas, build_again_from
from torchrec_dyn.storage import lacks_memory

# An entry that could not be used is read again after so many seconds, or when other rows are served.
_RETRY_SECONDS = 600.0


@dataclass(frozen=True)
class Followed:
    """Served rows of a newer entry.

    Attributes:
        entry: the entry whose rows are served.
        generation: name of the generation, as `generation` of a serving collection.
        changed: by table the ids whose rows are new or other than in the entry `since`, [M] int64; None if
            any row may be other: nothing was taken before, the tables were built from a full save, or the
            entries since then were removed.
        removed: by table the ids that lost their row since then and have none, [M] int64; None as `changed`.
            An id that came and went since then is among them.
        lag: seconds from the moment of the rows to the moment when they could be served; the clocks of two
            machines may differ, so it is at least 0.
        skipped: a line for each newer entry that could not be used, and why.
        is_fork: True if the rows served before are not before this entry in the chain.
    """

    entry: Entry
    generation: str
    changed: Mapping[str, Tensor] | None
    removed: Mapping[str, Tensor] | None
    lag: float
    skipped: Sequence[str]
    is_fork: bool = False

    @property
    def dense(self) -> Path:
        """Folder of the DCP checkpoint with the dense part, for `dcp.load`."""
        return self.entry.dense


@dataclass(frozen=True)
class _Seen:
    """The entries and the served tables as read together.

    `damage` is the error of served tables whose manifest is lost; None if it was read, or nothing is served.
    """

    chain: SavedChain
    generation: str | None
    served: ServedEntry | None
    damage: LostManifest | None = None


@dataclass(frozen=True)
class _Fault:
    """Why an entry could not be used, beside which generation, and until when it is not read again."""

    text: str
    generation: str | None
    until: float


class Follower:
    """Brings a directory of served tables to the newest entry of a directory of `Checkpoints`.

    Args:
        path: the directory of `Checkpoints`.
        to: the directory of served tables. The first call of `poll` makes it.
        rows: dtype of the served rows, as in `build`; None: as served, float32 at first.
        tables: names of the tables to serve; None: as served, all at first.
        since: id of the entry (`followed.entry.id`) whose rows the caller has taken, for `changed` and
            `removed`; None: none.
        follow_forks: True to serve the newest entry also if what is served is not before it.

    Attributes:
        since: id of the entry that `poll` has returned last. A caller that could not take its rows sets it
            back.
        skipped: a line for each entry newer than what is served that could not be used at the last `poll`,
            and why.

    Raises:
        ValueError: `path` is one checkpoint, or `to` has rows of another dtype or other tables, or is a link
            to nothing, or a path has a zero byte.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        to: str | os.PathLike[str],
        *,
        rows: torch.dtype | None = None,
        tables: Sequence[str] | None = None,
        since: str | None = None,
        follow_forks: bool = False,
    ) -> None:
        # The process may change its working directory.
        self.path, self.to, self.since = Path(path).absolute(), Path(to).absolute(), since
        self.skipped: list[str] = []
        self._rows, self._tables, self._follow_forks = rows, tables, follow_forks
        # As last served, for when the manifest is lost.
        self._there: Choice | None = None
        self._entry: ServedEntry | None = None
        self._faults: dict[str, _Fault] = {}  # by id of the entry
        self._check_path()
        check_target(self.to)
        remove_unfinished(self.to)
        with suppress(LostManifest):  # for `poll` to mend
            if (found := self._read_served()) is not None:
                self._entry = found[1].entry

    def _check_path(self) -> None:
        """Raises ValueError for a zero byte or one checkpoint: there would be no entries for ever."""
        if "\0" in str(self.path):
            raise ValueError(
                f"Follower: expected a directory of Checkpoints, got {str(self.path)!r}. Give a path without "
                "a zero byte."
            )
        if (self.path / ".metadata").exists() and not read_chain(self.path).entries:
            raise ValueError(
                f"Follower: expected a directory of Checkpoints, got {self.path}, one checkpoint of "
                "torch.distributed.checkpoint. Serve it with serving.build, or give the directory of entries."
            )

    def __repr__(self) -> str:
        return f"Follower({str(self.path)!r}, to={str(self.to)!r})"

    def poll(self) -> Followed | None:
        """Serves the newest entry that is whole, if it is not served yet.

        Deltas are applied together, or one by one if that fails. If a full save came after the served rows,
        they are built from the newest full save, in a new generation that readers change to like any other.
        An entry older than what is served is never taken. If a damaged manifest does not say what is served,
        the tables are built so, too, with a warning, unless a delta up to what was served is damaged. Until
        the deltas are applied, or if there is no room for them, the rows are those of the full save.

        Returns:
            What is served; None if it is of the entry `since`.

        Raises:
            ForkedChain: the newest entry does not come after what is served. `follow_forks` allows it. If a
                damaged manifest does not say what is served, what this follower read or served last counts.
            SecondWriter: another follower writes to the served tables.
            ValueError: nothing is served yet, and no entry can be; or a damaged manifest does not say what
                is served, and neither does `rows`, or no entry can be that is as new as what was served.
            OSError: the disk is full, or fails.
            MemoryError: there is too little memory (torch: RuntimeError). What is served is whole.
        """
        seen = self._look()
        try:
            return self._to_newest(seen)
        except (ValueError, OSError):
            # Entries are removed, and other followers serve, at any time: what has gone is not judged.
            if not self._has_moved(seen):
                raise
        return self._to_newest(self._look())

    def lag(self) -> float | None:
        """Returns the seconds since the moment of the served rows; None if they are of no entry here."""
        seen = self._look()
        entry = _entry_of(seen.chain, seen.served)
        return None if entry is None else _seconds_since(entry)

    def served(self) -> str | None:
        """Returns the id of the entry that is served; None if nothing is, or no entry here has its rows."""
        served = self._look().served
        return None if served is None else served.id

    def _look(self) -> _Seen:
        # First: what another writer builds is not what is damaged.
        before = known_generation(self.to)
        try:
            found = self._read_served()
        except LostManifest as damage:
            return _Seen(read_chain(self.path), before, None, damage)
        chain = read_chain(self.path)  # after the tables: it has their entry then
        if found is None:
            return _Seen(chain, None, None)
        generation, manifest = found
        self._entry = manifest.entry or _entry_by_sums(chain, manifest)
        return _Seen(chain, generation, self._entry)

    def _read_served(self) -> tuple[str, Manifest] | None:
        """Returns the generation that is served and its manifest; None before the first build."""
        check_target(self.to)
        if not self.to.exists():
            return None
        generation, manifest = served_manifest(self.to)
        there = {"rows": manifest.row_format.dtype, "tables": sorted(manifest.tables)}
        tables = None if self._tables is None else sorted(self._tables)
        for what, wanted in (("rows", self._rows), ("tables", tables)):
            if wanted is not None and wanted != there[what]:
                raise ValueError(
                    f"Follower: expected {self.to} with {what} {wanted}, got {there[what]}. Leave {what} "
                    "out, or serve from another directory."
                )
        self._there = manifest.row_format.dtype, [*manifest.tables]
        return generation, manifest

    def _has_moved(self, seen: _Seen) -> bool:
        """Returns True if entries were removed since, or another generation is served."""
        there = {entry.id for entry in read_chain(self.path).entries}
        is_other = known_generation(self.to) != seen.generation
        return is_other or any(one.id not in there for one in seen.chain.entries)

    def _to_newest(self, seen: _Seen) -> Followed | None:
        """Serves the newest entry that can be, and returns what is served for the caller."""
        chain, served, lost = seen.chain, seen.served, None
        if seen.damage is not None:
            served, lost = self._entry, self._instead_of(seen.damage)
        ids = {entry.id for entry in chain.entries}
        self._faults = {one: fault for one, fault in self._faults.items() if one in ids}
        told: dict[str, Ids] = {}  # of the deltas that are applied, by id of the entry
        skipped, fault = list(chain.skipped), False
        last, is_fork = None, False
        least = 0
        if served is not None and not is_replaced(chain, served):
            least = served.sequence + (lost is None)
        for entry in reversed(chain.entries):
            if entry.sequence < least:
                break
            way = way_to(chain, entry, served, lost is not None)
            if way is None:
                skipped.append(f"{entry.path.name}: an entry before it is missing.")
                continue
            if way.is_fork and not self._follow_forks:
                raise self._forked(entry)
            if last is None and self._fault_in(way) is None:
                if lost is None or self._are_sound(way, least, seen, lost):
                    last, is_fork = self._go(way, seen, told, lost), way.is_fork
                least = least if last is None else last.sequence + 1
            if (reason := self._fault_in(way)) is not None:
                skipped.append(f"{entry.path.name}: {reason}")
                fault = True
        least = last.sequence if last is not None else served.sequence if served is not None else 0
        self.skipped = [line for line in skipped if _sequence_of(line) > least]
        if seen.damage is not None and last is None:
            raise ValueError(" ".join([str(seen.damage), *skipped])) from seen.damage
        if fault and last is None and served is None:
            raise ValueError(
                f"{self.path}: expected an entry that can be served, got none. {' '.join(skipped)}"
            )
        if served is not None and not chain.entries:
            self.skipped.append(f"{self.path}: expected the served entry or later ones, got none")
        now = last or _entry_of(chain, served)
        if now is None or now.id == self.since:
            return None
        changed, removed = self._changes(chain, now, told)
        lag, generation = _seconds_since(now), current_generation(self.to)
        followed = Followed(now, generation, changed, removed, lag, self.skipped, is_fork)
        self.since = now.id
        return followed

    def _forked(self, entry: Entry) -> ForkedChain:
        return ForkedChain(
            f"{self.path}: expected entries that come after the served one, got {entry.path.name}, which "
            "does not: training was restored at an older entry, or this is another directory. To serve its "
            "rows, follow with follow_forks=True (--forks)."
        )

    def _instead_of(self, damage: LostManifest) -> Choice:
        """Returns what tables to build in the place of those whose manifest is lost."""
        rows, names = self._there or (None, None)
        rows = self._rows or rows
        if rows is None:
            raise ValueError(
                f"{damage} To have it built at the next look, follow with the dtype of its rows, as "
                "rows=torch.float32 (--dtype float32), and tables= if not all were served."
            ) from damage
        return rows, self._tables or names

    def _go(self, way: Way, seen: _Seen, told: dict[str, Ids], lost: Choice | None) -> Entry | None:
        """Serves the entries of a way, as far as they are sound; returns the last that is served then."""
        fulls = [entry for entry in way.entries if entry.is_full]
        deltas = [entry for entry in way.entries if not entry.is_full]
        groups, last = [group for group in (fulls, deltas) if group], None
        while groups:
            group = groups.pop(0)
            try:
                generation = self._take(group, seen.generation, told, lost)
            except SecondWriter:
                raise
            except (ValueError, OSError) as error:
                if len(group) == 1:
                    self._blame(group[0], error, seen)
                    break
                if self._has_moved(seen):
                    raise
                # Those before a damaged one are served. One by one they need less room on the disk:
                # unused rows are given back in between.
                groups = [[entry] for entry in group]
            else:
                last = group[-1]
                if lost is not None:  # here, since the deltas after it may fail
                    warnings.warn(
                        f"Follower: {str(seen.damage).removesuffix(REMEDY)}The tables were built anew from "
                        f"{last.path}.",
                        stacklevel=4,
                    )
                seen, lost = replace(seen, generation=generation), None
        return last

    def _are_sound(self, way: Way, least: int, seen: _Seen, lost: Choice) -> bool:
        """Returns False if a delta of a way is damaged, up to sequence `least`.

        Such a delta would leave the rows of the full save before it in place of newer ones that were served.
        """
        for entry in way.entries:
            if entry.is_full or entry.sequence > least:
                continue
            try:
                saved = open_checkpoint(entry.tables).tables
                for table in chosen_tables(saved, lost[1], f"Follower({entry.tables})").values():
                    if "removed" in table.names:
                        table.read("removed")
                    for _ in table.chunks(chunk_bytes=CHUNK_BYTES):
                        pass
            except (ValueError, OSError) as error:
                self._blame(entry, error, seen)
                return False
        return True

    def _blame(self, entry: Entry, error: ValueError | OSError, seen: _Seen) -> None:
        """Notes why an entry cannot be used; raises the error if that is not the fault of the entry."""
        if self._has_moved(seen) or not _is_of_entry(error, entry):
            raise error
        until = time.monotonic() + _RETRY_SECONDS
        text = " ".join(str(error).split())
        self._faults[entry.id] = _Fault(text, seen.generation, until)

    def _take(
        self, group: Sequence[Entry], before: str | None, told: dict[str, Ids], lost: Choice | None
    ) -> str:
        """Serves a full save, or applies deltas together, after generation `before`; returns the new one.

        `lost` is as `_instead_of` returns it.
        """
        entry = ServedEntry(group[-1].sequence, group[-1].id)
        if not group[0].is_full:
            assert before is not None
            before, found = apply_deltas(self.to, [one.tables for one in group], before, entry)
            told |= {one.id: ids for one, ids in zip(group, found, strict=True)}
        elif self.to.exists():
            before = build_again_from(self.to, group[0].tables, before, entry, lost)
        else:
            rows = torch.float32 if self._rows is None else self._rows
            before = build_from(group[0].tables, self.to, rows, self._tables, entry)
            self._there = rows, self._tables
        self._entry = entry
        return before

    def _fault_in(self, way: Way) -> str | None:
        """Returns why an entry of a way cannot be used; None if nothing is known against them."""
        generation = known_generation(self.to)
        for entry in way.entries:
            fault = self._faults.get(entry.id)
            if fault and fault.generation == generation and time.monotonic() < fault.until:
                before = "" if entry is way.entries[-1] else f"{entry.path.name} before it: "
                return before + fault.text
        return None

    def _changes(
        self, chain: SavedChain, now: Entry, told: Mapping[str, Ids]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]] | tuple[None, None]:
        """Returns the ids that changed and that were removed since the caller's entry."""
        way = None if self.since is None else way_to(chain, now, ServedEntry(0, self.since))
        if way is None or any(one.is_full for one in way.entries):
            return None, None
        try:
            parts = [told[one.id] if one.id in told else self._ids_of(one) for one in way.entries]
        except (ValueError, OSError):  # removed or damaged since they were applied
            return None, None
        joined = {name: _last_of([part[name] for part in parts]) for name in parts[0]}
        return (
            {name: changed for name, (changed, _) in joined.items()},
            {name: removed for name, (_, removed) in joined.items()},
        )

    def _ids_of(self, entry: Entry) -> Ids:
        """Returns the changed and the removed ids of a delta, of the served tables."""
        found = self._read_served()
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        return {
            table.name: (
                table.read("ids") if table.num_rows else nothing,
                table.read("removed") if "removed" in table.names else nothing,
            )
            for table in open_checkpoint(entry.tables).tables.values()
            if found is not None and table.name in found[1].tables
        }


def _last_of(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Joins the changed and removed ids of deltas in order: what came last of each id, [M] int64 each."""
    ids = torch.cat([one for part in parts for one in part])
    is_removed = torch.cat(
        [
            torch.full((len(one),), n == 1, device="cpu")
            for part in parts
            for n, one in enumerate(part)
        ]
    )
    distinct, which = ids.unique(return_inverse=True)
    last = torch.zeros_like(distinct).scatter_reduce_(
        0, which, torch.arange(len(ids), device="cpu"), "amax"
    )
    is_gone = is_removed[last]
    return distinct[~is_gone], distinct[is_gone]


def _is_of_entry(error: Exception, entry: Entry) -> bool:
    """Returns False for an error of the disk, unless it is of a file of the entry, and for lack of memory."""
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
        return True
    return not lacks_memory(error) and entry.path in Path(str(error.filename)).parents


def _entry_of(chain: SavedChain, served: ServedEntry | None) -> Entry | None:
    return next((one for one in chain.entries if served and one.id == served.id), None)


def _entry_by_sums(chain: SavedChain, manifest: Manifest) -> ServedEntry | None:
    """Returns the newest entry with the content sums of served tables that name no entry."""
    for entry in reversed(chain.entries):
        sums = entry.sums_by_tensor()
        if all(
            name in sums and all(sums[name][what] == one.sums[what] for what in ("ids", "weight"))
            for name, one in manifest.tables.items()
        ):
            return ServedEntry(entry.sequence, entry.id)
    return None


def _seconds_since(entry: Entry) -> float:
    return max(0.0, time.time() - entry.time)


def _sequence_of(line: str) -> int:
    """Returns the sequence of the entry that a line of a report begins with."""
    return int(line.partition(":")[0].rpartition("-")[2])
