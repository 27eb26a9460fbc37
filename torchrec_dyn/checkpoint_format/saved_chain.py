"""A checkpoint directory: full saves and deltas, each an entry of a chain, in a folder of its own.

An entry is written in a folder whose name begins with a dot, which is renamed when its files are on the disk:
a folder with an entry's name is whole. `entry.json` in it names the entry before by its random id, so an
entry of another chain, or one whose parent is gone, is not taken for the next. The writer is
checkpoint/checkpoints.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from torchrec_dyn.checkpoint_format.content_sums import SUMMED
from torchrec_dyn.storage import lacks_memory

FORMAT = 1
LOCK = "writer.lock"
ENTRY = "entry.json"
_NAME = re.compile(r"(full|delta)-(\d{8,})")
_ID = re.compile(r"[0-9a-f]{32}")
_SUMS = re.compile(r"[0-9a-f]{1,16}( [0-9a-f]{1,16})+")


@dataclass(frozen=True)
class Entry:
    """One save of a checkpoint directory.

    Attributes:
        path: folder of the entry.
        kind: "full" or "delta".
        sequence: number of the save; later saves have higher numbers.
        id: 32 hexadecimal digits, random; the first 16 are those of the chain, unless an older version wrote
            the entry (`new_id`).
        parent: id of the save before; None for the first of a chain.
        step: the step that the caller gave.
        time: seconds since 1970 when the save began; the rows are of this moment.
        world_size: number of ranks that saved.
        sums: the content sums of each table and of its optimizer state, as text, by key.
        extra: by name True if the value fits any number of ranks: all ranks gave the same, and it is no
            position in a source that each rank has for itself.
        version: version of torchrec_dyn.
        plan: by name the sharding type of each table, or "unsharded", to be read by people.
        digests: BLAKE2b digests of the small files, by path in the folder. Rows have `sums`.
    """

    path: Path
    kind: str
    sequence: int
    id: str
    parent: str | None
    step: int
    time: float
    world_size: int
    sums: Mapping[str, str]
    extra: Mapping[str, bool]
    version: str
    plan: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """True for a full save."""
        return self.kind == "full"

    @property
    def tables(self) -> Path:
        """Folder of the DCP checkpoint: of the whole state, or of the changes (a delta)."""
        return self.path / ("state" if self.is_full else "changes")

    @property
    def dense(self) -> Path:
        """Folder of the DCP checkpoint of what is not of a dynamic table."""
        return self.path / ("state" if self.is_full else "dense")

    def sums_by_tensor(self) -> dict[str, dict[str, int]]:
        """Returns the content sums by table and tensor."""
        return {
            table: {name: int(word, 16) for name, word in zip(SUMMED, text.split(), strict=True)}
            for table, text in self.sums.items()
        }

    def extra_of(self, rank: int) -> Path:
        """Returns the file of the further values of a rank."""
        return self.path / f"extra-{rank}.pt"

    def as_json(self) -> str:
        """Returns the contents of `entry.json`."""
        values = {"format": FORMAT, **asdict(self), "path": None}
        return json.dumps({**values, "digest": _digest_of(values)}, sort_keys=True)


@dataclass(frozen=True)
class SavedChain:
    """The entries of a checkpoint directory.

    Attributes:
        path: the directory.
        entries: the whole entries by sequence.
        skipped: for each folder that is no whole entry a line that says why.
        highest: the highest sequence of a folder, 0 without one.
        torn: by sequence the folders that are torn or damaged.
        unread: sequences of folders that the file system failed to read: each may be whole.
    """

    path: Path
    entries: list[Entry]
    skipped: list[str]
    highest: int
    torn: Mapping[int, Path] = field(default_factory=dict)
    unread: Collection[int] = ()

    @cached_property
    def _by_id(self) -> dict[str, Entry]:
        return {one.id: one for one in self.entries}

    @cached_property
    def fulls(self) -> dict[str, Entry]:
        """By id of each entry the full save that leads to it; entries without one are not there."""
        found: dict[str, Entry] = {}
        for entry in self.entries:  # parents come first
            full = entry if entry.is_full else found.get(entry.parent or "")
            if full is not None:
                found[entry.id] = full
        return found

    def at(self, step: int) -> Entry:
        """Returns the newest entry of a step.

        Raises:
            ValueError: no entry is of this step.
        """
        found = [entry for entry in self.entries if entry.step == step]
        if not found:
            steps = sorted({entry.step for entry in self.entries})
            raise ValueError(f"{self.path}: expected a step among {steps}, got {step}.")
        return found[-1]

    def backward(self, entry: Entry) -> Iterator[Entry]:
        """Yields an entry and those before it, newest first, as far as they are there."""
        one: Entry | None = entry
        while one is not None:
            yield one
            before = self._by_id.get(one.parent or "")
            one = before if before is not None and before.sequence < one.sequence else None

    def line_of(self, entry: Entry) -> list[Entry] | None:
        """Returns the full save and the deltas that lead to an entry, in order; None if one is missing."""
        line: list[Entry] = []
        for one in self.backward(entry):
            line.append(one)
            if one.is_full:
                return line[::-1]
        return None


def new_id(before: str | None) -> str:
    """Returns the id of an entry; `before` is that of the entry before, None for the first of a chain.

    It begins with 16 digits of the chain, 8 random ones and their digest, so that each entry, and what is
    served of it, tells its chain when the others are gone. Entries of older versions have random digits
    there: the chain gets its digits with the next entry, and others if an older version writes in between.
    Copies of a directory have the same.
    """
    number = secrets.token_hex(4)
    known = None if before is None else chain_of(before)
    return (known or number + _digest_of_number(number)) + secrets.token_hex(8)


def chain_of(identity: str) -> str | None:
    """Returns the digits of the chain in the id of an entry; None if an older version wrote the entry."""
    is_known = identity[8:16] == _digest_of_number(identity[:8])
    return identity[:16] if is_known else None


def _digest_of_number(number: str) -> str:
    return hashlib.blake2b(number.encode(), digest_size=4).hexdigest()


def read_chain(path: str | os.PathLike[str]) -> SavedChain:
    """Returns the entries of a checkpoint directory; of a directory that does not exist, none.

    Raises:
        OSError: if the directory cannot be read.
        OSError, MemoryError: if there is no memory or file number to read an entry.
    """
    folder = Path(path)
    entries, skipped, highest = [], [], 0
    torn: dict[int, Path] = {}
    unread: list[int] = []
    for one in sorted(folder.iterdir()) if folder.is_dir() else []:
        if name := _NAME.fullmatch(one.name):
            highest = max(highest, int(name[2]))
            try:
                entries.append(_read_entry(one))
            except (OSError, ValueError) as error:
                if lacks_memory(error):  # else an older entry would be taken for the newest
                    raise
                skipped.append(f"{one.name}: {str(error).rstrip('.')}.")
                if isinstance(error, OSError):
                    unread.append(int(name[2]))
                elif not isinstance(error, _ForeignError):
                    torn[int(name[2])] = one
    entries.sort(key=lambda entry: entry.sequence)
    return SavedChain(folder, entries, skipped, highest, torn, unread)


class _ForeignError(ValueError):
    """An entry that another version wrote, or a file: it is not damaged."""


def _read_entry(folder: Path) -> Entry:
    """Returns the entry of a folder; raises ValueError if its `entry.json` is none of this format."""
    file = folder / ENTRY
    try:
        values = json.loads(file.read_text())
    except NotADirectoryError:
        raise _ForeignError("expected a folder, got a file. Give it another name.") from None
    except FileNotFoundError:
        raise ValueError(f"expected {ENTRY}, got none. The entry is torn or foreign.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {ENTRY}, got {error}. The entry is damaged.") from None
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise _ForeignError(
            f"expected format {FORMAT} in {ENTRY}, got {found}. Read it with the version that wrote it."
        )
    digest = values.pop("digest", None)  # entries of earlier versions have none
    if digest is not None and digest != _digest_of(values):
        raise ValueError(f"expected {ENTRY} with digest {digest}, got another. It is damaged.")
    names = {one.name for one in fields(Entry)}
    needed = {one.name for one in fields(Entry) if one.default_factory is MISSING}
    if not needed <= values.keys() or not _are_sound(folder, values):
        raise ValueError(f"expected the fields of an entry in {ENTRY}, got others. It is damaged.")
    return Entry(**{name: values[name] for name in names & values.keys()} | {"path": folder})


def _digest_of(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _are_sound(folder: Path, values: dict[str, Any]) -> bool:
    kind, sequence = _NAME.fullmatch(folder.name).groups()  # type: ignore[union-attr]
    ids = (values["id"], *([] if values["parent"] is None else [values["parent"]]))
    numbers = (values["step"], values["world_size"], values["sequence"], values["time"])
    sums = values["sums"]
    maps = (sums, values["extra"], values.get("plan", {}), values.get("digests", {}))
    return (
        (values["kind"], values["sequence"]) == (kind, int(sequence))
        and all(isinstance(one, str) and _ID.fullmatch(one) is not None for one in ids)
        and isinstance(values["version"], str)
        and all(isinstance(one, (int, float)) and math.isfinite(one) for one in numbers)
        and all(isinstance(one, dict) for one in maps)
        and all(isinstance(one, str) and _SUMS.fullmatch(one) is not None for one in sums.values())
    )
