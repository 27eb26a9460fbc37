"""The index of a generation: what a program without Python reads to map the served tables.

The file `tensors` of a generation is text, one line for each tensor: its name, its dtype, its file in the
directory of served tables, its first byte in the file, and its dimensions:

    item.slots int64 000001-51ab20fe/slots 0 148 2      the id map
    item.key int64 000001-51ab20fe/keys 0 1 2           -1, and the secret key of the map
    item.rows float32 rows-51ab20fe 0 106 16            rows of the table's own width, from byte 0 on
    rows uint8 rows-51ab20fe 0 6800                     the bytes in use of all tables

Rows of int8 are bytes: D + 4 for each row. A name is written as in a URL: `my%20table.slots`. The file `keys`
is [T, 2] int64. Both files follow from the manifest.

These tensors are inputs of each call of a compiled program. A program that holds tables as constants would
copy them, and fix the sizes of the id maps and of the rows; as inputs they are mapped files of any
generation, so a delta that grows a table needs no new program.

Legend: T tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import replace_file
from torchrec_dyn.serving.files import DamagedTables, mapped
from torchrec_dyn.serving.id_maps import SLOT_BYTES
from torchrec_dyn.serving.manifest import SLOTS, Manifest

TENSORS, KEYS = "tensors", "keys"
ALL_ROWS = "rows"
# Rows are in blocks of 2^31 rows, the most that a layout can name; the last block may have fewer.
BLOCK_SHIFT = 31


# A line of an index: name, dtype, file, first byte and shape of a tensor.
IndexedTensor = tuple[str, torch.dtype, str, int, tuple[int, ...]]


def name_in_index(table: str, part: str) -> str:
    """Returns the name of a table's tensor; `part` is "slots", "key" or "rows"."""
    return f"{quote(table, safe='')}.{part}"


def is_key(name: str) -> bool:
    """Returns True if a name in an index names the key of a table."""
    return name.endswith(".key")


def indexed(generation: str, manifest: Manifest) -> Iterator[IndexedTensor]:
    """Yields the lines of the index of a generation."""
    row_format, rows_file = manifest.row_format, manifest.rows_file
    for number, (name, table) in enumerate(manifest.tables.items()):
        slots, first = f"{generation}/{SLOTS}", table.first_slot * SLOT_BYTES
        yield name_in_index(name, "slots"), torch.int64, slots, first, (table.capacity, 2)
        keys, first = f"{generation}/{KEYS}", number * SLOT_BYTES
        yield name_in_index(name, "key"), torch.int64, keys, first, (1, 2)
        stored = row_format.stored_dtype
        columns = row_format.row_bytes(table.embedding_dim) // stored.itemsize
        yield (
            name_in_index(name, "rows"),
            stored,
            rows_file,
            0,
            (manifest.whole_rows(name), columns),
        )
    yield ALL_ROWS, torch.uint8, rows_file, 0, (manifest.rows_bytes,)


def write_index(folder: Path, generation: str, manifest: Manifest) -> None:
    """Writes the keys of a generation, then the index that names them; both are on the disk then."""
    for name, data in _contents(generation, manifest).items():
        replace_file(folder / generation / name, data)


def check_index(folder: Path, generation: str, manifest: Manifest) -> int:
    """Returns the bytes of the index and keys; DamagedTables unless they are those of the manifest."""
    contents = _contents(generation, manifest)
    for name, expected in contents.items():
        path = folder / generation / name
        if path.read_bytes() != expected:
            raise DamagedTables(
                f"{path}: expected the {name} of the manifest beside it, got other bytes. It is damaged. "
                "Build it again."
            )
    return sum(map(len, contents.values()))


def mapped_tensors(folder: Path, generation: str, manifest: Manifest) -> dict[str, Tensor]:
    """Maps the tensors of the index of a generation, by name; FileNotFoundError if it was removed."""
    files: dict[str, Tensor] = {}
    tensors = {}
    for name, dtype, file, first, shape in indexed(generation, manifest):
        path = folder / file
        if file not in files:
            files[file] = mapped(path, path.stat().st_size)
        data = files[file].narrow(0, first, dtype.itemsize * prod(shape))
        tensors[name] = data.view(dtype).view(shape)
    return tensors


def _contents(generation: str, manifest: Manifest) -> dict[str, bytes]:
    lines = ""
    for name, kind, file, first, shape in indexed(generation, manifest):
        words = [name, str(kind).removeprefix("torch."), file, first, *shape]
        lines += " ".join(map(str, words)) + "\n"
    pairs = torch.tensor([(-1, table.key) for table in manifest.tables.values()], device="cpu")
    return {KEYS: pairs.numpy().tobytes(), TENSORS: lines.encode()}
