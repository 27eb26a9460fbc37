"""A checkpoint directory, on a disk or in a store: full saves and deltas, each in a folder of its own.

The files of an entry are written first, its commit file last: `commits/<sequence>`, which is created only
if there is none, so one of two writers gets the sequence. A folder is in one of three states: committed;
unfinished (no commit file names it), which the next save clears away; or not to be judged (a read error,
another format, not ours), which is never removed. The commit file names the entry before by its random id.
Beside it are empty files whose names say that a restore of the entry failed, or succeeded.
The writer is checkpoint/checkpoints.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import chain, count
from typing import Any

from torchrec_dyn.checkpoint_format.checkpoint_reader import file_inside
from torchrec_dyn.checkpoint_format.content_sums import DAMAGED, SUMMED
from torchrec_dyn.checkpoint_format.file_writer import sync_to_disk
from torchrec_dyn.checkpoint_format.places import (
    Place,
    PlaceLike,
    create_file,
    names_in,
    place_of,
    remove_all,
    sizes_in,
    write_file,
)
from torchrec_dyn.checkpoint_format.store_path import StorePath

FORMAT = 3
LOCK = "writer.lock"
COMMITS = "commits"
# The name of a folder ends with a part of its random id where no lock keeps out a second writer.
_NAME = re.compile(r"(full|delta)-(\d{8,})(-[0-9a-f]{8})?")
_COMMIT = re.compile(r"(\d{8,})(?:\.(failed|restored-(\d+)))?")
_OLDER = "entry.json"  # the commit file of formats 1 and 2, in the folder of an entry
_DIGEST_BYTES = 16
_READ_BYTES = 32 << 20


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

    path: Place
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
    def commit(self) -> Place:
        """The commit file."""
        return commit_of(self.path.parent, self.sequence)

    @property
    def tables(self) -> Place:
        """Folder of the DCP checkpoint of the dynamic tables: full tables, or their changes (a delta)."""
        return self.path / ("state" if self.is_full else "changes")

    @property
    def dense(self) -> Place:
        """Folder of the DCP checkpoint of everything but the dynamic tables."""
        return self.path / "dense"

    def sums_by_tensor(self) -> dict[str, dict[str, int]]:
        """Returns the content sums by table and tensor."""
        return {
            table: {name: int(word, 16) for name, word in zip(SUMMED, text.split(), strict=True)}
            for table, text in self.sums.items()
        }

    def extra_of(self, rank: int) -> Place:
        """Returns the file of the `extra` values of a rank."""
        return self.path / f"extra-{rank}.pt"

    def as_json(self) -> str:
        """Returns the contents of the commit file."""
        values = {"format": FORMAT, "name": self.path.name, **asdict(self)}
        for name in ("path", "has_failed", "restored_at"):  # these are not of the save
            del values[name]
        return json.dumps({**values, "digest": _digest_of(values)}, sort_keys=True)

    def check_file(self, name: str) -> bytes:
        """Returns the bytes of a file; raises ValueError unless they match the digest in the entry."""
        with self._present(name):
            data = file_inside(self.path, name, DAMAGED).read_bytes()
        self._compare(name, digest_of(data))
        return data

    def check_long_file(self, name: str) -> None:
        """As `check_file`, in little memory."""
        with self._present(name):
            digest = digest_of_file(file_inside(self.path, name, DAMAGED))
        self._compare(name, digest)

    @contextmanager
    def _present(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise ValueError(f"{self.path / name}: expected a file, got none. {DAMAGED}") from error

    def _compare(self, name: str, digest: str) -> None:
        if digest != self.digests.get(name):
            raise ValueError(
                f"{self.path / name}: expected digest {self.digests.get(name)}, got {digest}. {DAMAGED}"
            )

    def note_failed(self) -> None:
        """Records in the directory that a restore of the entry failed."""
        with suppress(OSError):  # readers may have a directory that they cannot write
            write_file(self._mark("failed"), b"")

    def note_restored(self, highest: int) -> None:
        """Records in the directory that the entry was restored when `highest` was the highest sequence."""
        with suppress(OSError):
            self._mark("failed").unlink(missing_ok=True)
            write_file(self._mark(f"restored-{highest}"), b"")

    def _mark(self, text: str) -> Place:
        return self.commit.parent / f"{self.commit.name}.{text}"


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

    path: Place
    entries: Sequence[Entry] = ()
    skipped: Sequence[str] = ()
    unfinished: Sequence[Place] = ()
    highest: int = 0

    def is_newest(self) -> bool:
        """Returns True if the last entry is there, and none after it."""
        if not self.entries or self.skipped:
            return False
        last = self.entries[-1]
        try:
            read = _read_entry(self.path, last.sequence, ())
        except (OSError, ValueError):
            return False
        is_there = read is not None and read.id == last.id
        return is_there and not commit_of(self.path, last.sequence + 1).is_file()

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


def commit_of(path: Place, sequence: int) -> Place:
    """Returns the commit file of an entry of a directory."""
    return path / COMMITS / f"{sequence:08}"


def read_chain(path: PlaceLike) -> SavedChain:
    """Returns the entries of a checkpoint directory; of a directory that does not exist, none."""
    folder = place_of(path)
    listed, last, marks = _listed_commits(folder)
    folders = _listed_folders(folder)
    entries: list[Entry] = []
    skipped: dict[int, str] = {}
    # A listing may be older than the last commits, which are found by their names.
    for number in chain(listed, count(last + 1)):
        try:
            entry = _read_again(folder, number, marks[number])
        except FileNotFoundError:
            if number > last:
                break
            continue
        except (OSError, ValueError) as error:
            is_read = not isinstance(error, OSError)
            if not is_read and (number > last or isinstance(folder, StorePath)):
                raise  # there may be one, or none; the next call of a store may have an answer
            name = (folders.pop(number, []) or [f"{COMMITS}/{number:08}"])[0]
            skipped[number] = f"{name}: {str(error).rstrip('.')}."
        else:
            if entry is not None and _has_folder(entry, folders[number]):
                entries.append(entry)
    unfinished, older = _uncommitted(folder, folders)
    lines = [line for _, line in sorted({**skipped, **older}.items())]
    return SavedChain(folder, entries, lines, unfinished, max(number - 1, *older, 0))


def _uncommitted(
    folder: Place, folders: Mapping[int, Sequence[str]]
) -> tuple[list[Place], dict[int, str]]:
    """Returns the folders of saves without a commit file, and lines for those of older formats."""
    unfinished: list[Place] = []
    older: dict[int, str] = {}
    for number, names in folders.items():
        for name in names:
            if not (folder / name / _OLDER).exists():
                unfinished.append(folder / name)
                continue
            older[number] = (
                f"{name}: expected format {FORMAT}, got an older one. Read it with the version that wrote it."
            )
    return unfinished, older


def _listed_commits(folder: Place) -> tuple[list[int], int, dict[int, list[re.Match[str]]]]:
    """Returns the sequences in a listing but for removed entries, the last of all, and marks by sequence."""
    sequences: list[int] = []
    last = 0
    marks: dict[int, list[re.Match[str]]] = defaultdict(list)
    for name, size in sizes_in(folder / COMMITS).items():
        match = _COMMIT.fullmatch(name)
        if match is None:
            continue
        if match[2]:
            marks[int(match[1])].append(match)
            continue
        last = max(last, int(match[1]))
        if size:
            sequences.append(int(match[1]))
    return sorted(sequences), last, marks


def _listed_folders(folder: Place) -> dict[int, list[str]]:
    """Returns the names of the folders in a listing, by sequence."""
    folders: dict[int, list[str]] = defaultdict(list)
    for match in filter(None, map(_NAME.fullmatch, sorted(names_in(folder)))):
        folders[int(match[2])].append(match[0])
    return folders


def _has_folder(entry: Entry, names: list[str]) -> bool:
    """Returns True unless the folder was removed by hand; takes its name from those that are listed."""
    if entry.path.name in names:
        names.remove(entry.path.name)
        return True
    return entry.extra_of(0).exists()  # the listing may be older


def _read_again(folder: Place, sequence: int, marks: Sequence[re.Match[str]]) -> Entry | None:
    """As `_read_entry`; asks a store twice before the file counts as damaged."""
    try:
        return _read_entry(folder, sequence, marks)
    except ValueError:
        if not isinstance(folder, StorePath):
            raise
        return _read_entry(folder, sequence, marks)


def _read_entry(folder: Place, sequence: int, marks: Sequence[re.Match[str]]) -> Entry | None:
    """Returns the entry of a commit file, None if it was removed; raises ValueError if of another format."""
    data = commit_of(folder, sequence).read_bytes()
    if not data:
        return None
    values = _checked_values(json.loads(data), sequence)
    names = {field.name for field in fields(Entry)}
    restored = [int(mark[3]) for mark in marks if mark[3]]
    return Entry(
        **{name: values[name] for name in names & values.keys()},
        path=folder / values["name"],
        has_failed=any(mark[2] == "failed" for mark in marks),
        restored_at=max(restored, default=None),
    )


def _checked_values(values: Any, sequence: int) -> dict[str, Any]:
    number = values.get("format") if isinstance(values, dict) else None
    if number != FORMAT:
        raise ValueError(
            f"expected format {FORMAT}, got {number}. Read it with the version that wrote it."
        )
    digest = values.pop("digest", None)
    is_of_file = sequence == values.get("sequence") and _NAME.fullmatch(str(values.get("name")))
    if digest != _digest_of(values) or not is_of_file:
        raise ValueError(f"expected a commit with digest {digest}, got another. {DAMAGED}")
    return dict(values)


def _digest_of(values: Mapping[str, Any]) -> str:
    return digest_of(json.dumps(values, sort_keys=True).encode())


def digest_of(data: bytes) -> str:
    """Returns the digest of bytes: BLAKE2b, as hexadecimal digits."""
    return new_digest(data).hexdigest()


def new_digest(data: bytes = b"") -> hashlib.blake2b:
    """Returns a digest of bytes, to which more bytes may be added."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES)


def digest_of_file(path: Place) -> str:
    """Returns the digest of a file."""
    digest = new_digest()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def commit_entry(entry: Entry) -> None:
    """Makes the folder of an entry an entry, when all of its files are there.

    Raises:
        ValueError: if another writer has the sequence.
    """
    if not isinstance(entry.path, StorePath):
        inside = [path for path in entry.path.iterdir() if path.is_dir()]
        for folder in [*inside, entry.path, entry.path.parent]:
            sync_to_disk(folder)
    data = entry.as_json().encode()
    try:
        create_file(entry.commit, data)
    except OSError as error:
        # Of a store it may be there whatever the error: ours, after an answer that was lost.
        if not isinstance(error, FileExistsError) and not isinstance(entry.path, StorePath):
            raise
        with suppress(FileNotFoundError):
            if entry.commit.read_bytes() == data:
                return
            raise ValueError(
                f"{entry.path.parent}: expected to write save {entry.sequence}, got one of another writer. "
                "End one of the two jobs, and restore."
            ) from None
        raise


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


def remove_entries(entries: Iterable[Entry], ignore_errors: bool = True) -> None:
    """Removes entries: empties the commit file first, so that a reader sees a whole entry or none.

    The file stays: no other writer gets the sequence, and readers pass over it to the entries after it.
    """
    removed = [*entries]
    names = names_in(removed[0].commit.parent) if removed else []
    for entry in removed:
        write_file(entry.commit, b"")
        for name in names:
            if name.startswith(f"{entry.commit.name}."):  # its marks
                (entry.commit.parent / name).unlink(missing_ok=True)
        remove_all(entry.path, ignore_errors)
