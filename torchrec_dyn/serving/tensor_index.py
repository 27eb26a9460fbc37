"""The index of a generation: what a program without Python reads to map the served tables.

The file `tensors` of a generation is text, one line for each tensor: its name, its dtype, its file in the
directory of served tables, its first byte in the file, and its dimensions:

    item.slots int64 000001-51ab20fe/slots 0 148 2      the id map
    item.key int64 000001-51ab20fe/keys 0 1 2           -1, and the secret key of the map
    item.rows float32 rows-51ab20fe 0 106 16            rows of the table's own width, from byte 0 on
    rows uint8 rows-51ab20fe 0 6800                     the bytes in use of all tables

Rows of int8 are bytes: D + 4 for each row. A name is written as in a URL: `my%20table.slots`. The file `keys`
is [T, 2] int64. Both files follow from the manifest; generations of an older version have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import replace_file
from torchrec_dyn.serving.files import mapped
from torchrec_dyn.serving.id_maps import SLOT_BYTES
from torchrec_dyn.serving.manifest import SLOTS, Manifest

TENSORS, KEYS = "tensors", "keys"
ALL_ROWS = "rows"


class IndexedTensor(NamedTuple):
    """A line of an index."""

    name: str
    dtype: torch.dtype
    file: str
    first_byte: int
    shape: tuple[int, ...]

    def line(self) -> str:
        """Returns the text of the line."""
        dtype = str(self.dtype).removeprefix("torch.")
        return " ".join(map(str, [self.name, dtype, self.file, self.first_byte, *self.shape]))


def name_in_index(table: str, part: str) -> str:
    """Returns the name of a table's tensor; `part` is "slots", "key" or "rows"."""
    return f"{quote(table, safe='')}.{part}"


def is_key(name: str) -> bool:
    """Returns True for a name in an index that is of the key of a table."""
    return name.endswith(".key")


def indexed(generation: str, manifest: Manifest) -> Iterator[IndexedTensor]:
    """Yields the lines of the index of a generation."""
    row_format, rows_file = manifest.row_format, manifest.rows_file
    for number, (name, table) in enumerate(manifest.tables.items()):
        slots = f"{generation}/{SLOTS}"
        first = table.first_slot * SLOT_BYTES
        yield IndexedTensor(
            name_in_index(name, "slots"), torch.int64, slots, first, (table.capacity, 2)
        )
        keys = f"{generation}/{KEYS}"
        yield IndexedTensor(
            name_in_index(name, "key"), torch.int64, keys, number * SLOT_BYTES, (1, 2)
        )
        shape = manifest.whole_rows(name), row_format.stored_columns(table.embedding_dim)
        yield IndexedTensor(
            name_in_index(name, "rows"), row_format.stored_dtype, rows_file, 0, shape
        )
    yield IndexedTensor(ALL_ROWS, torch.uint8, rows_file, 0, (manifest.rows_bytes,))


def write_index(folder: Path, generation: str, manifest: Manifest) -> None:
    """Writes the keys of a generation, then the index that names them; both are on the disk then."""
    for name, data in _contents(generation, manifest).items():
        replace_file(folder / generation / name, data)


def check_index(folder: Path, generation: str, manifest: Manifest) -> None:
    """Raises ValueError if the index or the keys of a generation differ from the manifest.

    A generation of an older version has no index, which is no error.
    """
    for name, expected in _contents(generation, manifest).items():
        path = folder / generation / name
        if path.exists() and path.read_bytes() != expected:
            raise ValueError(
                f"{path}: expected the {name} of the manifest beside it, got other bytes. It is damaged. "
                "Build it again."
            )


def mapped_tensors(folder: Path, generation: str, manifest: Manifest) -> dict[str, Tensor]:
    """Maps the tensors of the index of a generation; returns these by name.

    Raises:
        ValueError: if the generation has no index, because an older version made it.
        FileNotFoundError: if the generation was removed.
    """
    if not (folder / generation / TENSORS).is_file():
        (folder / generation / SLOTS).stat()  # FileNotFoundError if the generation was removed
        raise ValueError(
            f"{folder}: expected an index of tensors in generation {generation}, got a directory of an older "
            f"version without one. Run `python -m torchrec_dyn verify --add {folder}`, or build it again."
        )
    files: dict[str, Tensor] = {}
    found = {}
    for one in indexed(generation, manifest):
        path = folder / one.file
        if one.file not in files:
            files[one.file] = mapped(path, path.stat().st_size)
        size = one.dtype.itemsize * prod(one.shape)
        data = files[one.file].narrow(0, one.first_byte, size)
        found[one.name] = data.view(one.dtype).view(one.shape)
    return found


def _contents(generation: str, manifest: Manifest) -> dict[str, bytes]:
    lines = "".join(one.line() + "\n" for one in indexed(generation, manifest))
    pairs = torch.tensor([(-1, table.key) for table in manifest.tables.values()], device="cpu")
    return {KEYS: pairs.numpy().tobytes(), TENSORS: lines.encode()}
