"""A checkpoint directory: full saves and deltas, each an entry of a chain, in a folder of its own.

An entry is written in a folder whose name begins with a dot, which is renamed when its files are on the disk:
a folder with an entry's name is whole. `entry.json` in it names the entry before by its random id, so an
entry of another chain, or one whose parent is gone, is not taken for the next. The writer is
checkpoint/checkpoints.py.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

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
        id: 32 hexadecimal digits, random.
        parent: id of the save before; None for the first of a chain.
        step: the step that the caller gave.
        time: seconds since 1970 when the save began; the rows are of this moment.
        world_size: number of ranks that saved.
        sums: the content sums of each table and of its optimizer state, as text, by key.
        extra: by name True if all ranks gave the same value.
        version: version of torchrec_dyn.
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

    def row_sums(self) -> dict[str, tuple[int, int]]:
        """Returns the content sums of the ids and of the weights of each table, by name."""
        words = {
            name: [int(word, 16) for word in text.split()[:2]] for name, text in self.sums.items()
        }
        return {name: (ids, weight) for name, (ids, weight) in words.items()}

    def extra_of(self, rank: int) -> Path:
        """Returns the file of the further values of a rank."""
        return self.path / f"extra-{rank}.pt"

    def as_json(self) -> str:
        """Returns the contents of `entry.json`."""
        return json.dumps({"format": FORMAT, **asdict(self), "path": None}, sort_keys=True)


@dataclass(frozen=True)
class SavedChain:
    """The entries of a checkpoint directory.

    Attributes:
        path: the directory.
        entries: the whole entries by sequence.
        skipped: for each folder that is no whole entry a line that says why.
        highest: the highest sequence of a folder, 0 without one.
    """

    path: Path
    entries: list[Entry]
    skipped: list[str]
    highest: int

    def line_of(self, entry: Entry) -> list[Entry] | None:
        """Returns the full save and the deltas that lead to an entry, in order; None if one is missing."""
        by_id = {one.id: one for one in self.entries}
        line = [entry]
        while not line[-1].is_full:
            parent = by_id.get(line[-1].parent or "")
            if parent is None or parent.sequence >= line[-1].sequence:
                return None
            line.append(parent)
        return line[::-1]


def read_chain(path: str | os.PathLike[str]) -> SavedChain:
    """Returns the entries of a checkpoint directory; of a directory that does not exist, none.

    Raises:
        OSError: if the directory cannot be read.
    """
    folder = Path(path)
    entries, skipped, highest = [], [], 0
    for one in sorted(folder.iterdir()) if folder.is_dir() else []:
        if name := _NAME.fullmatch(one.name):
            highest = max(highest, int(name[2]))
            try:
                entries.append(_read_entry(one))
            except (OSError, ValueError) as error:
                skipped.append(f"{one.name}: {error}")
    return SavedChain(folder, sorted(entries, key=lambda entry: entry.sequence), skipped, highest)


def _read_entry(folder: Path) -> Entry:
    """Returns the entry of a folder; raises ValueError if its `entry.json` is none of this format."""
    file = folder / ENTRY
    try:
        values = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"expected {ENTRY}, got none. The entry is torn or foreign.") from None
    except ValueError as error:
        raise ValueError(f"expected JSON in {ENTRY}, got {error}. The entry is damaged.") from None
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"expected format {FORMAT} in {ENTRY}, got {found}. Read it with the version that wrote it."
        )
    names = {one.name for one in fields(Entry)}
    if not names <= values.keys() or not _are_sound(folder, values):
        raise ValueError(f"expected the fields of an entry in {ENTRY}, got others. It is damaged.")
    return Entry(**{name: values[name] for name in names} | {"path": folder})


def _are_sound(folder: Path, values: dict[str, Any]) -> bool:
    kind, sequence = _NAME.fullmatch(folder.name).groups()  # type: ignore[union-attr]
    ids = (values["id"], *([] if values["parent"] is None else [values["parent"]]))
    numbers = (values["step"], values["world_size"], values["sequence"], values["time"])
    sums, extra = values["sums"], values["extra"]
    return (
        (values["kind"], values["sequence"]) == (kind, int(sequence))
        and all(isinstance(one, str) and _ID.fullmatch(one) is not None for one in ids)
        and isinstance(values["version"], str)
        and all(isinstance(one, (int, float)) and math.isfinite(one) for one in numbers)
        and isinstance(sums, dict)
        and all(isinstance(one, str) and _SUMS.fullmatch(one) is not None for one in sums.values())
        and isinstance(extra, dict)
    )
