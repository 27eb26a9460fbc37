"""The contents of a directory of served tables.

    current                    name of the served generation: a small file, replaced by a rename
    rows-51ab20fe              rows of all tables, as row_format.py encodes them; row r of a table is at
                               byte r * row_bytes. Rows are only appended
    000001-51ab20fe/           a generation: it never changes, and is complete before `current` names it
        slots                  [C, 2] int64: the id maps of all tables one after another, id and row + 1
                               (csrc/storage/id_map.h)
        manifest.json
        tensors, keys          the same for programs without Python (generation.py)
    lock                       held by the process that writes

manifest.json, keys sorted:

    {"digest": "90ab...", "entry": {"chain": "07c2...", "id": "51ab20fe...", "sequence": 12}, "format": 4,
     "rows": "int8", "rows_bytes": 6800, "rows_file": "rows-51ab20fe", "tables": {"user": {
        "capacity": 148, "embedding_dim": 64, "first_slot": 0, "initializer": {...}, "key": 51966,
        "num_rows": 100, "row_sum": 789, "seed": 0, "sums": {"ids": 123, "weight": 456},
        "trained_as": "float32"}}}

`digest` is the digest of all other fields. `entry` is the entry of `Checkpoints` whose rows are served, null
for another checkpoint. `sums` are the content sums of the saved table: a delta must begin at these sums.
`row_sum` is the content sum of the encoded rows. `key` is the secret key of the hash that gives the ids of a
table their slots (csrc/slot_hash.h): who reads it can make ids that share slots.

Files with names of other forms are neither read nor removed. A generation or a rows file is removed when
neither the current generation nor the generation before needs it, or when the tables were built again and the
current generation does not need it; a process that has mapped the files can still read them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchrec_dyn.checkpoint_format import file_inside
from torchrec_dyn.serving.files import DamagedTables
from torchrec_dyn.serving.row_format import RowFormat

T = TypeVar("T")

_FORMAT = 4
SLOTS, MANIFEST, CURRENT = "slots", "manifest.json", "current"
GENERATION, ROWS_FILE = r"[0-9]{6,18}-[0-9a-f]{8}", r"rows-[0-9a-f]{8}"  # patterns of names
_REMOVE = "Remove the directory, then build it."


@dataclass(frozen=True)
class ServedEntry:
    """The entry of a directory of `Checkpoints` whose rows are served."""

    sequence: int
    id: str
    chain: str  # id of the first save of its chain


@dataclass(frozen=True)
class ServedTable:
    """One table of a generation."""

    embedding_dim: int
    trained_as: str  # dtype of its rows in training
    initializer: dict[str, Any]  # as in the config of the checkpoint
    seed: int
    capacity: int  # slots of its map
    key: int  # of the hash of its map
    sums: dict[str, int]  # content sums of "ids" and "weight" as saved
    row_sum: int = 0  # content sum of the encoded rows
    num_rows: int = 0  # ids with a row
    first_slot: int = 0  # of its map in `slots`
    pooling: str = ""  # "max"; else that of the config with which it is served


@dataclass(frozen=True)
class Manifest:
    """The manifest of a generation."""

    rows: str  # dtype of the encoded rows
    rows_file: str
    rows_bytes: int  # in use
    tables: Mapping[str, ServedTable]
    entry: ServedEntry | None = None  # None: of another checkpoint

    @property
    def row_format(self) -> RowFormat:
        """The format of the rows."""
        return RowFormat(getattr(torch, self.rows))

    def widths(self) -> dict[str, int]:
        """Returns the number of bytes of a row of each table."""
        return {
            name: self.row_format.row_bytes(table.embedding_dim)
            for name, table in self.tables.items()
        }

    def whole_rows(self, table: str) -> int:
        """Returns the number of whole rows of a table's width in the rows file, at least 1."""
        return max(1, self.rows_bytes // self.widths()[table])

    def file_bytes(self) -> int:
        """Returns the bytes of the rows file that lookups may read: at least one row of each table."""
        spare = self.row_format.spare_bytes
        behind = max(spare(table.embedding_dim) for table in self.tables.values())
        return max([self.rows_bytes + behind, *self.widths().values()])

    def to_json(self) -> str:
        """Returns the text of the manifest file."""
        values = {"format": _FORMAT, **dataclasses.asdict(self)}
        for table in values["tables"].values():
            if not table["pooling"]:  # a version before max pooling can read the others
                del table["pooling"]
        return json.dumps({"digest": _digest_of(values), **values}, indent=1, sort_keys=True)


def _digest_of(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def laid_out(tables: Mapping[str, ServedTable]) -> dict[str, ServedTable]:
    """Returns the tables with new first slots, so that their maps follow each other in `slots`."""
    ends = accumulate((table.capacity for table in tables.values()), initial=0)
    return {
        name: dataclasses.replace(table, first_slot=first)
        for (name, table), first in zip(tables.items(), ends, strict=False)
    }


def new_generation(folder: Path) -> str:
    """Returns a new, unique name for a generation, with a higher number than those in the folder."""
    names = [path.name for path in folder.iterdir() if re.fullmatch(GENERATION, path.name)]
    last = max((int(name.partition("-")[0]) for name in names), default=0)
    return f"{last + 1:06d}-{secrets.token_hex(4)}"


def new_rows_file() -> str:
    """Returns a new, unique name for a rows file."""
    return f"rows-{secrets.token_hex(4)}"


def current_generation(folder: Path) -> str:
    """Returns the name of the served generation; ValueError if `serving.build` did not make the directory."""
    try:
        return file_inside(folder, (folder / CURRENT).read_text().strip(), "", GENERATION).name
    except (FileNotFoundError, NotADirectoryError, ValueError):
        got = f"one without the name of a generation in {CURRENT}"
    if folder.is_dir() and any(re.fullmatch(GENERATION, path.name) for path in folder.iterdir()):
        raise DamagedTables(
            f"{folder}: expected served tables, got {got}. It is damaged. {_REMOVE}"
        )
    raise ValueError(
        f"{folder}: expected a directory made by serving.build, got {got}. Build it first, at a path that "
        f"does not exist, such as {folder / 'tables'}; a follower builds it there, too."
    )


def known_generation(folder: Path) -> str | None:
    """Returns the name of the served generation; None if nothing is served, or `current` is damaged."""
    with suppress(DamagedTables):
        return current_generation(folder) if folder.exists() else None
    return None


def with_current(folder: Path, read: Callable[[str], T]) -> T:
    """Calls `read` with the name of the current generation, and again if its files were removed meanwhile.

    `read` opens the files of a generation, and raises FileNotFoundError if one is missing.
    """
    while True:
        name = current_generation(folder)
        try:
            return read(name)
        except FileNotFoundError:
            # If the name is no longer current, it was replaced since it was read.
            if current_generation(folder) == name:
                raise without_files(folder, name) from None


def served_manifest(folder: Path) -> tuple[str, Manifest]:
    """Returns the name of the current generation, and its manifest."""
    return with_current(folder, lambda name: (name, read_manifest(folder, name)))


def without_files(folder: Path, generation: str) -> DamagedTables:
    """Returns the error of a generation that lacks files."""
    has_manifest = (folder / generation / MANIFEST).exists()
    return DamagedTables(
        f"{folder}: expected all files of generation {generation}, got only some. "
        + ("Build it again." if has_manifest else _REMOVE)
    )


def read_manifest(folder: Path, generation: str) -> Manifest:
    """Reads the manifest of a generation; FileNotFoundError if the generation was removed."""
    path = folder / generation / MANIFEST
    try:
        values = json.loads(path.read_bytes())
        number, digest = values["format"], values.pop("digest", None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedTables(
            f"{path}: expected a manifest, got {type(error).__name__}: {error}. It is damaged. {_REMOVE}"
        ) from error
    if number != _FORMAT:
        raise ValueError(
            f"{path}: expected a manifest of format {_FORMAT}, got format {number!r:.40}. Use the version "
            "that wrote it, or remove the directory, then build it."
        )
    if digest != (got := _digest_of(values)):
        raise DamagedTables(
            f"{path}: expected a manifest with digest {digest!r:.40}, got {got}. It is damaged. {_REMOVE}"
        )
    # The one name that becomes a path: who can write the manifest can write its digest.
    file_inside(folder, values["rows_file"], f"{path} is damaged. {_REMOVE}", ROWS_FILE)
    tables = {name: ServedTable(**table) for name, table in values["tables"].items()}
    entry = None if values["entry"] is None else ServedEntry(**values["entry"])
    return Manifest(values["rows"], values["rows_file"], values["rows_bytes"], tables, entry)
