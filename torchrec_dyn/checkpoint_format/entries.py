"""A checkpoint directory: full saves and deltas, each an entry in a folder of its own.

The files of an entry are written first, its commit file `entry.json` last. So a folder is in one of three
states: committed; unfinished (no commit file), which the next save clears away; or not to be judged (a read
error, another format, not ours), which is never removed. The commit file names the entry before by its random
id.
The writer is checkpoint/checkpoints.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from torchrec_dyn.checkpoint_format.checkpoint_reader import file_inside
from torchrec_dyn.checkpoint_format.content_sums import DAMAGED, SUMMED
from torchrec_dyn.checkpoint_format.file_writer import replace_file, sync_to_disk

FORMAT = 2
LOCK = "writer.lock"
ENTRY = "entry.json"
_FAILED, _RESTORED = "failed_to_load", "restored_from"  # files in the folder of an entry
_NAME = re.compile(r"(full|delta)-(\d{8,})")
_DIGEST_BYTES = 16
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One save of a checkpoint directory.

    Attributes:
        path: folder of the entry.
        kind: "full" or "delta".
        sequence: number of the save; later saves have higher numbers.
        id: 32 hexadecimal digits, random.
        parent: id of the previous save; None for the first save of a chain.
        chain: id of the first save of the chain.
        step: the step that the caller passed.
        time: start of the save in seconds since 1970; the rows are those of that moment.
        world_size: number of ranks that saved.
        sums: the content sums of each table and of its optimizer state, as text, by key.
        extra: by name, True if the value fits any number of ranks: all ranks passed the same value, and it is
            not a position in a source that belongs to a single rank.
        version: version of torchrec_dyn.
        plan: the sharding type of each table by name, or "unsharded"; for people to read.
        digests: BLAKE2b digests of the files without content sums, by path in the folder.
        has_failed: True if the last `restore` of the entry failed.
        restored_at: highest sequence in the directory when the entry was restored; None if it was not
            restored.
    """

    path: Path
    kind: str
    sequence: int
    id: str
    parent: str | None
    chain: str
    step: int
    time: float
    world_size: int
    sums: Mapping[str, str]
    extra: Mapping[str, bool]
    version: str
    plan: Mapping[str, str]
    digests: Mapping[str, str]
    has_failed: bool = False
    restored_at: int | None = None

    @property
    def is_full(self) -> bool:
        """True for a full save."""
        return self.kind == "full"

    @property
    def tables(self) -> Path:
        """Folder of the DCP checkpoint of the dynamic tables: full tables, or their changes (a delta)."""
        return self.path / ("state" if self.is_full else "changes")

    @property
    def dense(self) -> Path:
        """Folder of the DCP checkpoint of everything but the dynamic tables."""
        return self.path / "dense"

    def sums_by_tensor(self) -> dict[str, dict[str, int]]:
        """Returns the content sums by table and tensor."""
        return {
            table: {name: int(word, 16) for name, word in zip(SUMMED, text.split(), strict=True)}
            for table, text in self.sums.items()
        }

    def extra_of(self, rank: int) -> Path:
        """Returns the file of the `extra` values of a rank."""
        return self.path / f"extra-{rank}.pt"

    def as_json(self) -> str:
        """Returns the contents of the commit file."""
        values = {"format": FORMAT, "name": self.path.name, **asdict(self)}
        for name in ("path", "has_failed", "restored_at"):  # these are not of the save
            del values[name]
        return json.dumps({**values, "digest": _digest_of(values)}, sort_keys=True)

    def check_file(self, name: str) -> None:
        """Raises ValueError unless a file of the entry matches its digest."""
        digest = digest_of_file(file_inside(self.path, name, DAMAGED))
        if digest != self.digests.get(name):
            raise ValueError(
                f"{self.path / name}: expected digest {self.digests.get(name)}, got {digest}. {DAMAGED}"
            )

    def note_failed(self) -> None:
        """Records in the directory that a restore of the entry failed."""
        with suppress(OSError):  # readers may have a directory that they cannot write
            (self.path / _FAILED).touch()

    def note_restored(self, highest: int) -> None:
        """Records in the directory that the entry was restored when `highest` was the highest sequence."""
        with suppress(OSError):
            (self.path / _FAILED).unlink(missing_ok=True)
            (self.path / _RESTORED).write_text(str(highest))


@dataclass(frozen=True)
class SavedChain:
    """The folders of a checkpoint directory.

    Attributes:
        path: the directory.
        entries: the committed entries by sequence.
        skipped: for each folder that cannot be judged a line that says why.
        unfinished: folders of saves without a commit file.
        highest: the highest sequence of a folder that is not unfinished, 0 without one.
    """

    path: Path
    entries: Sequence[Entry] = ()
    skipped: Sequence[str] = ()
    unfinished: Sequence[Path] = ()
    highest: int = 0

    @cached_property
    def _by_id(self) -> dict[str, Entry]:
        return {entry.id: entry for entry in self.entries}

    def at(self, step: int) -> Entry:
        """Returns the newest entry of a step."""
        entries = [entry for entry in self.entries if entry.step == step]
        if not entries:
            steps = sorted({entry.step for entry in self.entries})
            raise ValueError(f"{self.path}: expected a step among {steps}, got {step}.")
        return entries[-1]

    def backward(self, entry: Entry) -> Iterator[Entry]:
        """Yields an entry and those before it, newest first, as far as they are there."""
        current: Entry | None = entry
        while current is not None:
            yield current
            parent = self._by_id.get(current.parent or "")
            current = parent if parent is not None and parent.sequence < current.sequence else None

    def line_of(self, entry: Entry) -> list[Entry] | None:
        """Returns the full save and the deltas that lead to an entry, in order; None if one is missing."""
        line: list[Entry] = []
        for before in self.backward(entry):
            line.append(before)
            if before.is_full:
                return line[::-1]
        return None


def read_chain(path: str | os.PathLike[str]) -> SavedChain:
    """Returns the entries of a checkpoint directory; of a directory that does not exist, none."""
    folder = Path(path)
    entries, skipped, unfinished, highest = [], [], [], 0
    for place in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = _NAME.fullmatch(place.name)
        if name is None:
            continue
        try:
            entry = _read_entry(place)
        except FileNotFoundError:
            unfinished.append(place)
            continue
        except (OSError, ValueError) as error:
            skipped.append(f"{place.name}: {str(error).rstrip('.')}.")
        else:
            entries.append(entry)
        highest = max(highest, int(name[2]))
    entries.sort(key=lambda entry: entry.sequence)
    return SavedChain(folder, entries, skipped, unfinished, highest)


def _read_entry(folder: Path) -> Entry:
    """Returns the entry of a folder; raises ValueError if its commit file is none of this format."""
    values = json.loads((folder / ENTRY).read_text())
    number = values.get("format") if isinstance(values, dict) else None
    if number != FORMAT:
        raise ValueError(
            f"expected format {FORMAT} in {ENTRY}, got {number}. Read it with the version that wrote it."
        )
    digest, names = values.pop("digest", None), {field.name for field in fields(Entry)}
    if digest != _digest_of(values) or folder.name != values.get("name"):
        raise ValueError(f"expected {ENTRY} with digest {digest}, got another. {DAMAGED}")
    restored_at = folder / _RESTORED
    text = restored_at.read_text() if restored_at.exists() else ""
    return Entry(
        **{name: values[name] for name in names & values.keys()},
        path=folder,
        has_failed=(folder / _FAILED).exists(),
        restored_at=int(text) if text.isdigit() else None,
    )


def _digest_of(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def digest_of_file(path: Path) -> str:
    """Returns the digest of a file: BLAKE2b, as hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def commit_entry(entry: Entry) -> None:
    """Makes the folder of an entry an entry, when all of its files are on the disk."""
    inside = [path for path in entry.path.iterdir() if path.is_dir()]
    for folder in [*inside, entry.path, entry.path.parent]:
        sync_to_disk(folder)
    replace_file(entry.path / ENTRY, entry.as_json().encode())


def outdated(entries: Sequence[Entry], keep: int) -> list[Entry]:
    """Returns the entries to remove, newest first.

    The newest `keep` full saves stay, with all that came after the oldest of them, and the newest entry; so
    does an entry from which training was restored, until `keep` full saves came after that. Those that failed
    to load are not counted, and nothing goes until `keep` full saves came after them. What leads to an entry
    that stays, stays, too.
    """
    oldest = _oldest_counted(entries, keep)
    removed: list[Entry] = []
    needed: set[str | None] = {entries[-1].id} if entries else set()
    for entry in reversed(entries):
        if max(entry.sequence, entry.restored_at or 0) < oldest and entry.id not in needed:
            removed.append(entry)
        elif not entry.is_full:
            needed.add(entry.parent)
    return removed


def _oldest_counted(entries: Sequence[Entry], keep: int) -> int:
    """Returns the sequence of the oldest full save that is counted; 0 if nothing may go."""
    counted = [entry.sequence for entry in entries if entry.is_full and not entry.has_failed]
    oldest = counted[-keep] if len(counted) >= keep else 0
    failed = max((entry.sequence for entry in entries if entry.has_failed), default=0)
    return 0 if failed > oldest else oldest


def remove_folders(folders: Iterable[Path], ignore_errors: bool = True) -> None:
    """Removes folders of entries: the commit file first, so that a reader sees a whole entry or none."""
    for folder in folders:
        (folder / ENTRY).unlink(missing_ok=True)
        sync_to_disk(folder)
        shutil.rmtree(folder, ignore_errors=ignore_errors)
