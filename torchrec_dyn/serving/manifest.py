"""The contents of a directory of served tables.

    current                    name of the served generation: a small file, replaced by a rename
    rows-51ab20fe              rows of all tables, as row_format.py encodes them; row r of a table is at
                               byte r * row_bytes. Rows are only appended; after the last row it is sparse
    000001-51ab20fe/           a generation: it never changes, and is complete before `current` names it
        slots                  [C, 2] int64: the id maps of all tables one after another, id and row + 1
                               (csrc/storage/id_map.h)
        manifest.json
        checksums.json         sums of the bytes of these files and of the rows (checksums.py)
        tensors, keys          the same for programs without Python (tensor_index.py)
    lock                       held by the process that writes

manifest.json, keys sorted:

    {"format": 2, "rows": "int8", "rows_bytes": 6800, "rows_file": "rows-51ab20fe", "tables": {"user": {
        "capacity": 148, "embedding_dim": 64, "first_slot": 0, "initializer": {...}, "key": 51966,
        "num_rows": 100, "seed": 0, "sums": {"ids": 123, "weight": 456}, "trained_as": "float32"}}}

`key` is the secret key of the hash that gives the ids of a table their slots (csrc/slot_hash.h): who reads it
can make ids that share slots. Directories of format 1 have no keys: they are read as key 0. Format 3 has the
entry of `Checkpoints` whose rows are served: "entry": {"id": "51ab20fe...", "sequence": 12}.

Rows files and generations with names of other forms are neither read nor removed. `sums` are the content sums
of the saved table, not of the encoded rows: a delta must begin at these sums. A generation or a rows file is
removed when neither the current generation nor the generation before needs it, or when the tables were built
again and the current generation does not need it; a process that has mapped the files can still read them.
"""

from __future__ import annotations

import dataclasses
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

from torchrec_dyn.checkpoint_format import INITIALIZERS, file_inside, named_initializer
from torchrec_dyn.serving.row_format import ROW_DTYPES, RowFormat

T = TypeVar("T")

# Read. The last is written for the rows of an entry of `Checkpoints`, the one before it for others, which
# versions that know no entries read, too.
_FORMATS = (1, 2, 3)
SLOTS, MANIFEST, CURRENT = "slots", "manifest.json", "current"
GENERATION, ROWS_FILE = r"[0-9]{6,18}-[0-9a-f]{8}", r"rows-[0-9a-f]{8}"  # patterns of names
REMEDY = "Remove the directory, then build it."
_DAMAGED = f"It is damaged. {REMEDY}"
_ROWS = [str(dtype).removeprefix("torch.") for dtype in ROW_DTYPES]
_TRAINED_AS = ["float32", "float16", "bfloat16"]
_ATTEMPTS = 100  # to open a current generation, while deltas replace and remove generations


class LostManifest(ValueError):
    """The manifest of served tables, or the file `current` that names it, is damaged or gone."""


@dataclass(frozen=True)
class ServedEntry:
    """The entry of a directory of `Checkpoints` whose rows are served."""

    sequence: int
    id: str


@dataclass(frozen=True)
class ServedTable:
    """One table of a generation."""

    embedding_dim: int
    trained_as: str  # dtype of its rows in training
    initializer: dict[str, Any]  # as in the config of the checkpoint
    seed: int
    num_rows: int  # ids with a row
    first_slot: int  # of its map in `slots`
    capacity: int  # slots of its map
    sums: dict[str, int]  # content sums of "ids" and "weight" as saved
    key: int  # of the hash of its map

    @property
    def trained_dtype(self) -> torch.dtype:
        """Dtype of its rows in training."""
        dtype: torch.dtype = getattr(torch, self.trained_as)
        return dtype


@dataclass(frozen=True)
class Manifest:
    """The manifest of a generation."""

    rows: str  # dtype of the encoded rows
    rows_file: str
    rows_bytes: int  # in use
    tables: Mapping[str, ServedTable]
    entry: ServedEntry | None = None  # None: of another checkpoint, or not known

    @property
    def row_format(self) -> RowFormat:
        """The format of the rows."""
        return RowFormat(getattr(torch, self.rows))

    @property
    def slots(self) -> int:
        """Number of slots of all tables."""
        return sum(table.capacity for table in self.tables.values())

    def widths(self) -> dict[str, int]:
        """Returns the number of bytes of a row of each table."""
        return {
            name: self.row_format.row_bytes(table.embedding_dim)
            for name, table in self.tables.items()
        }

    def mapped_bytes(self) -> int:
        """Returns the length of the rows file in bytes: whole blocks of every table."""
        ends = [blocks << shift for shift, blocks in self.blocks().values()]
        widths = self.widths().values()
        return max(
            [self.rows_bytes, *(end * width for end, width in zip(ends, widths, strict=True))]
        )

    def read_bytes(self) -> int:
        """Returns the number of bytes of the rows file that lookups may read.

        The rows files of older versions may be shorter.
        """
        spare = self.row_format.spare_bytes
        behind = max(spare(table.embedding_dim) for table in self.tables.values())
        return max(self.mapped_bytes(), self.rows_bytes + behind)

    def whole_rows(self, table: str) -> int:
        """Returns the number of whole rows of a table's width in the rows file, at least 1."""
        return max(1, self.rows_bytes // self.widths()[table])

    def file_bytes(self) -> int:
        """Returns the length of a rows file that has `read_bytes` and the `whole_rows` of every table."""
        return max([self.read_bytes(), *self.widths().values()])

    def blocks(self) -> dict[str, tuple[int, int]]:
        """Returns shift and number of blocks of each table: the rows file cut into blocks of 2^shift rows.

        A table has at most 16 blocks (csrc/storage/blocks.h).
        """
        cut = {}
        for name, width in self.widths().items():
            rows = -(-self.rows_bytes // width)
            shift = max(0, rows.bit_length() - 4)
            cut[name] = shift, -(-rows >> shift)
        return cut

    def to_json(self) -> str:
        """Returns the text of the manifest file."""
        fields = dataclasses.asdict(self)
        if self.entry is None:
            del fields["entry"]
        number = _FORMATS[-1 if self.entry else -2]
        return json.dumps({"format": number, **fields}, indent=1, sort_keys=True)


def laid_out(tables: Mapping[str, ServedTable]) -> dict[str, ServedTable]:
    """Returns the tables with new first slots, so that their maps follow each other in `slots`."""
    ends = accumulate((table.capacity for table in tables.values()), initial=0)
    return {
        name: dataclasses.replace(table, first_slot=first)
        for (name, table), first in zip(tables.items(), ends, strict=False)
    }


def new_generation(after: str | None = None) -> str:
    """Returns a new, unique name for the generation after `after`; None: for the first generation."""
    number = 0 if after is None else int(after.partition("-")[0])
    return f"{number + 1:06d}-{secrets.token_hex(4)}"


def new_rows_file() -> str:
    """Returns a new, unique name for a rows file."""
    return f"rows-{secrets.token_hex(4)}"


def last_generation(folder: Path) -> str | None:
    """Returns the name of the generation with the highest number, there or in `current`; None without one."""
    names = [one.name for one in folder.iterdir()]
    with suppress(OSError, ValueError):  # `current` is gone, or no text
        names.append((folder / CURRENT).read_text().strip())
    found = [name for name in names if re.fullmatch(GENERATION, name)]
    return max(found, key=lambda name: int(name.partition("-")[0]), default=None)


def current_generation(folder: Path) -> str:
    """Returns the name of the served generation, as read from `current`.

    Raises:
        LostManifest: if `current` is damaged or gone.
        ValueError: if `serving.build` did not make the directory.
    """
    try:
        return file_inside(folder, (folder / CURRENT).read_text().strip(), "", GENERATION).name
    except (FileNotFoundError, NotADirectoryError, ValueError):
        if folder.is_dir() and last_generation(folder) is not None:
            raise LostManifest(
                f"{folder}: expected served tables, got some without the name of a generation in {CURRENT}. "
                f"{_DAMAGED}"
            ) from None
        raise ValueError(
            f"{folder}: expected a directory made by serving.build, got one without the name of a "
            f"generation in {CURRENT}. Build it first, at a path that does not exist, such as "
            f"{folder / 'tables'}; a follower builds it there, too."
        ) from None


def known_generation(folder: Path) -> str | None:
    """Returns the name of the generation that is served; None if nothing is, or `current` is damaged."""
    with suppress(LostManifest):
        return current_generation(folder) if folder.exists() else None
    return None


def with_current(folder: Path, read: Callable[[str], T]) -> T:
    """Calls `read` with the name of the current generation, and again if its files were removed meanwhile.

    `read` opens the files of a generation, and raises FileNotFoundError if one is missing.

    Raises:
        LostManifest: if `current` is damaged or gone, or the manifest of the current generation is gone.
        ValueError: if other files of the current generation are missing, or `serving.build` did not make the
            directory.
    """
    for _ in range(_ATTEMPTS):
        name = current_generation(folder)
        try:
            return read(name)
        except FileNotFoundError:
            # If the name is no longer current, it was replaced since it was read.
            if current_generation(folder) == name:
                raise without_files(folder, name) from None
    raise ValueError(
        f"{folder}: expected a generation whose files exist until they are opened, got {_ATTEMPTS} whose "
        "files were removed before. Try again when fewer deltas are applied."
    )


def served_manifest(folder: Path) -> tuple[str, Manifest]:
    """Returns the name of the current generation, and its manifest; raises as `with_current`."""
    return with_current(folder, lambda name: (name, read_manifest(folder, name)))


def without_files(folder: Path, generation: str) -> ValueError:
    """Returns the error of a current generation that lacks files: LostManifest if the manifest is one."""
    is_lost = not (folder / generation / MANIFEST).exists()
    return (LostManifest if is_lost else ValueError)(
        f"{folder}: expected all files of generation {generation}, got only some. "
        + (REMEDY if is_lost else "Build it again.")
    )


def read_manifest(folder: Path, generation: str) -> Manifest:
    """Reads the manifest of a generation.

    Raises:
        LostManifest: if the manifest is damaged: a field has a value that `build` and `apply_delta` never
            write.
        ValueError: if a later version wrote it.
        FileNotFoundError: if the generation was removed after its name was read.
    """
    path = folder / generation / MANIFEST
    text, is_later = path.read_bytes(), False
    try:
        found = json.loads(text)
        version = found.pop("format")
        if version not in _FORMATS:
            is_later = type(version) is int and version > _FORMATS[-1]
            raise ValueError(f"format {version!r}, this version reads {_FORMATS}")
        # What an older format does not have.
        without: dict[str, Any] = {"key": 0} if version == 1 else {}
        tables = {
            name: ServedTable(**without, **table)
            for name, table in sorted(found.pop("tables").items())
        }
        entry = ServedEntry(**found.pop("entry")) if version == _FORMATS[-1] else None
        manifest = Manifest(tables=tables, entry=entry, **found)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        kind = ValueError if is_later else LostManifest
        raise kind(
            f"{path}: expected a manifest of a format in {_FORMATS}, got {type(error).__name__}: {error}. "
            + ("A later version wrote it: use that, or build elsewhere." if is_later else _DAMAGED)
        ) from error
    _check(folder, path, manifest)
    return manifest


def _check(folder: Path, path: Path, manifest: Manifest) -> None:
    """Raises LostManifest if a manifest has a value that `build` and `apply_delta` never write."""

    def expect(is_right: bool, rule: str, got: Any) -> None:
        if not is_right:
            raise LostManifest(f"{path}: expected {rule}, got {got!r:.100}. {_DAMAGED}")

    try:
        file_inside(folder, manifest.rows_file, f"{path} is damaged. {REMEDY}", ROWS_FILE)
    except ValueError as error:
        raise LostManifest(str(error)) from None
    rows, used = manifest.rows, manifest.rows_bytes
    expect(rows in _ROWS, f"rows among {_ROWS}", rows)
    expect(_is_integer(used), "rows_bytes in [0, 2^63)", used)
    expect(bool(manifest.tables), "at least one table", manifest.tables)
    expect(
        _is_entry(manifest.entry), "entry with a sequence in [0, 2^63) and an id", manifest.entry
    )
    for name, table in manifest.tables.items():
        for field, (rule, is_right) in _RULES.items():
            value = getattr(table, field)
            expect(is_right(value), f"{field} of table '{name}' {rule}", value)
    for name, table in laid_out(manifest.tables).items():
        first, got = table.first_slot, manifest.tables[name].first_slot
        expect(got == first, f"first_slot {first} of table '{name}', after the maps before", got)
    widths = manifest.widths()
    least = sum(table.num_rows * widths[name] for name, table in manifest.tables.items())
    expect(used >= least, f"at least {least} rows_bytes for the rows of the tables", used)


def _is_integer(value: Any, least: int = 0, end: int = 2**63) -> bool:
    return type(value) is int and least <= value < end


def _is_entry(entry: ServedEntry | None) -> bool:
    return entry is None or (_is_integer(entry.sequence) and isinstance(entry.id, str))


def _is_initializer(value: Any) -> bool:
    # A later version may have other initializers: this version then serves zeros for unseen ids.
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    return value["name"] not in INITIALIZERS or named_initializer(value) is not None


def _are_sums(value: Any) -> bool:
    is_named = isinstance(value, dict) and value.keys() == {"ids", "weight"}
    return is_named and all(_is_integer(total, 0, 2**64) for total in value.values())


# By field of a table: its rule, for messages, and the check of the rule.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "embedding_dim": ("in [1, 2^31)", lambda value: _is_integer(value, 1, 2**31)),
    "trained_as": (f"among {_TRAINED_AS}", lambda value: value in _TRAINED_AS),
    "initializer": ("with a name and its numbers", _is_initializer),
    "seed": ("as an integer", lambda value: type(value) is int),
    "num_rows": ("in [0, 2^63)", _is_integer),
    "first_slot": ("in [0, 2^63)", _is_integer),
    "capacity": ("in [0, 2^63)", _is_integer),
    "key": ("in [0, 2^63)", _is_integer),
    "sums": ("of ids and weight, each in [0, 2^64)", _are_sums),
}
