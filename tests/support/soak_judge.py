"""The judge of the soak: what is saved and served must be what the model without faults has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from soak_disk import Disk
from soak_oracle import Oracle, digest_of_generation, digest_of_rows
from soak_readers import Seen
from soak_trainer import KEEP, Event

from torchrec_dyn import serving
from torchrec_dyn.checkpoint import verify_checkpoint
from torchrec_dyn.checkpoint_format import Entry, read_chain
from torchrec_dyn.serving.manifest import GENERATION, ROWS_FILE

# What `python -m torchrec_dyn follow` prints of a generation.
_FOLLOWED = re.compile(r"\S+ \(step (\d+)\): generation (\S+), .* rows, ([\d.]+) s after")


class _Later(NamedTuple):
    """A comparison that waits until the model without faults has come to the step."""

    where: str
    step: int  # 0: that of the digest
    digest: str  # of the rows; "" of an entry
    follower: str
    sums: Mapping[str, str]  # of an entry
    by: int  # the model has come to the step if it is here


class Judge:
    """Compares, counts, and notes faults.

    Attributes:
        faults: what was wrong, one line each.
        counts: what was done, by name.
        lags: seconds from the moment of rows until they were served, by follower.
        latest: the newest entry that was seen.
    """

    def __init__(self, path: Path, served: dict[str, Path], oracle: Oracle, disk: Disk) -> None:
        self._path, self._served, self._oracle, self._disk = path, served, oracle, disk
        self._entries: set[str] = set()
        self._sequences: set[int] = set()
        self._later: list[_Later] = []
        self._generations: dict[str, set[str]] = {name: set() for name in served}
        self._steps: dict[str, int] = {}
        self._told: set[str] = set()
        self._must_restore: Entry | None = None
        self._failed_in_a_row = 0
        self.latest: Entry | None = None
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self.lags: dict[str, list[float]] = {name: [] for name in served}

    def fault(self, text: str) -> None:
        """Notes a fault."""
        self.faults.append(text)
        print(f"FAULT: {text}", flush=True)

    # The directory of Checkpoints

    def look_at_entries(self) -> None:
        """Judges the entries that are new."""
        for entry in read_chain(self._path).entries:
            self._judge_entry(entry)

    def note_restart(self) -> None:
        """Notes, while no rank runs, what the next start must restore."""
        self.look_at_entries()
        self._must_restore = self.latest

    def judge_event(self, event: Event) -> None:
        """Judges what the training job tells."""
        match event.what:
            case "restored":
                must = self._must_restore
                if (event.entry and event.entry.id) != (must and must.id) or event.text:
                    self.fault(
                        f"restored {event.entry}, {event.text}; expected {must} with nothing skipped"
                    )
            case "saved":
                assert event.entry is not None
                self._judge_entry(event.entry)
            case "failed":
                self.counts["failed saves"] += 1
                if not self._disk.may_fail(event.began, event.ended):
                    self.fault(f"a save failed, though the disk was not full: {event.text}")
            case "started":
                self.counts["saves in the background"] += 1
            case "replanned":
                self.counts["replans"] += 1

    def _judge_entry(self, entry: Entry) -> None:
        if entry.id in self._entries:
            return
        self._entries.add(entry.id)
        self._sequences.add(entry.sequence)
        self.counts[entry.kind] += 1
        if len(self._sequences) != len(self._entries):
            self.fault(f"{entry}: its sequence was there before")
        latest = self.latest
        if latest is None or entry.sequence > latest.sequence:
            self.latest = entry
            is_next = latest is None or entry.step > latest.step
            if not entry.is_full and (latest is None or entry.parent != latest.id):
                is_next = False
            if not is_next:
                self.fault(f"{entry}: expected what follows {latest}")
        where = f"{entry.path.name}, step {entry.step}, {entry.world_size} ranks"
        self._later.append(_Later(where, entry.step, "", "", entry.sums, entry.step))

    # The served tables

    def judge_line(self, line: str) -> None:
        """Judges a line of the follower that is a command."""
        if found := _FOLLOWED.match(line):
            if found[2] not in self._told:  # one that starts again may tell what was served before
                self.lags["command"].append(float(found[3]))
                self.counts["generations told by the command"] += 1
            self._told.add(found[2])
            self._judge_generation("command", found[2], int(found[1]))
        elif line.startswith("  skipped"):
            self.counts["entries skipped by a follower"] += 1
        else:
            self.fault(f"python -m torchrec_dyn follow: {line}")

    def judge_seen(self, seen: Seen) -> None:
        """Judges what the serving process tells."""
        match seen.what:
            case "generation":
                self.lags["process"].append(seen.lag)
                self.counts["generations compared by the process"] += 1
                self.counts["dense parts compared"] += seen.compared - 1
                self.counts["entries skipped by a follower"] += bool(seen.text)
            case "retry":
                self.counts["polls tried again"] += 1
                self.counts[f"polls tried again, {seen.text}"] += 1
            case "reads":
                self.counts["rows read and compared"] += seen.compared
                self.counts["reads between two generations"] += seen.step
            case _:
                self.fault(seen.text)

    def look_at_generations(self) -> None:
        """Judges what is served now."""
        for name, folder in self._served.items():
            current = folder / "current"
            if current.exists():
                self._judge_generation(name, current.read_text().strip(), 0)

    def _judge_generation(self, follower: str, generation: str, step: int) -> None:
        if generation in self._generations[follower]:
            return
        try:
            digest = digest_of_generation(self._served[follower], generation)
        except FileNotFoundError:
            self.counts[f"generations missed, {follower}"] += step > 0
            return
        self._generations[follower].add(generation)
        by = self.latest.step if self.latest else 0
        self._later.append(_Later(f"{follower}, {generation}", step, digest, follower, {}, by))

    # The model without faults

    def compare(self) -> None:
        """Makes the comparisons for which the model without faults has come far enough."""
        ready = [one for one in self._later if one.by <= self._oracle.step]
        self._later = [one for one in self._later if one.by > self._oracle.step]
        for one in ready:
            if not one.follower:
                self.counts["entries compared"] += 1
                if other := self._oracle.differences(one.step, one.sums):
                    self.fault(f"{one.where}: not as in the model without faults: {other}")
                continue
            self.counts[f"generations compared, {one.follower}"] += 1
            step, before = self._oracle.step_of(one.digest), self._steps.get(one.follower, 0)
            if step is None or (one.step and step != one.step):
                self.fault(f"{one.where}: expected rows of step {one.step or 'any'}, got {step}")
            elif step < before:
                self.fault(f"{one.where}: step {step} came after {before}")
            else:
                self._steps[one.follower] = step

    def are_served(self) -> bool:
        """Returns True if both followers serve the newest entry."""
        if self.latest is None:
            return False
        sums = self.latest.sums_by_tensor().items()
        digest = digest_of_rows({name: (one["ids"], one["weight"]) for name, one in sums})
        return all(
            (folder / "current").exists()
            and digest_of_generation(folder, (folder / "current").read_text().strip()) == digest
            for folder in self._served.values()
        )

    # The end

    def judge_end(self, temporary: Path) -> None:
        """Judges what is left when all processes have ended."""
        self.compare()
        if self._later:
            self.fault(f"not compared: {self._later}")
        if self._sequences != set(range(1, len(self._sequences) + 1)):
            self.fault(f"expected all sequences from 1 on, got {sorted(self._sequences)}")
        chain = read_chain(self._path)
        others = {one.name for one in self._path.iterdir()} - {e.path.name for e in chain.entries}
        if others != {"writer.lock"} or chain.skipped:
            self.fault(f"left in {self._path}: {sorted(others)} {chain.skipped}")
        if sum(entry.is_full for entry in chain.entries) > KEEP:
            self.fault(f"expected {KEEP} full saves, got {[e.path.name for e in chain.entries]}")
        beside = {one.name for one in self._path.parent.iterdir()}
        if others := beside - {self._path.name, *(one.name for one in self._served.values())}:
            self.fault(f"left in {self._path.parent}: {sorted(others)}")
        for entry in chain.entries:
            verify_checkpoint(entry.tables)
        for name, folder in self._served.items():
            left = [one.name for one in folder.iterdir() if one.name not in ("current", "lock")]
            if len([one for one in left if re.fullmatch(GENERATION, one)]) > 2:
                self.fault(f"{name}: expected two generations, got {left}")
            if len([one for one in left if re.fullmatch(ROWS_FILE, one)]) > 2:
                self.fault(f"{name}: expected at most two rows files, got {left}")
            others = {one for one in left if not re.fullmatch(f"{GENERATION}|{ROWS_FILE}", one)}
            if others:
                self.fault(f"left in {folder}: {sorted(others)}")
            serving.verify(folder)
        if left := sorted(one.name for one in temporary.iterdir()):
            self.fault(f"left in the temporary folder: {left}")
