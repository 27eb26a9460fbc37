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

Legend: T tables, N ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor, nn

from torchrec_dyn import ops
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


class GivenTables(nn.Module):
    """The counterpart of Generation while a program is traced. It has tensors inside of `given` only.

    `tables` are the names of T tables with their columns, in the order of the ids of a call.
    """

    def __init__(self, tables: Mapping[str, int], nbit: str) -> None:
        super().__init__()
        self.nbit = nbit
        self._names = list(tables)
        self._columns = list(tables.values())
        self._given: Mapping[str, Tensor] = {}

    def tensor_names(self) -> list[str]:
        """Returns the names in the index of the tensors that the tables consist of."""
        parts = "slots", "key", "rows"
        names = [name_in_index(table, part) for table in self._names for part in parts]
        return [*names, ALL_ROWS] if self.nbit else names

    @contextmanager
    def given(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Has the tensors of the tables, by the names of `tensor_names`, until the context ends."""
        self._given = tensors
        try:
            yield
        finally:  # torch.export warns of a module that keeps traced tensors
            self._given = {}

    @property
    def rows(self) -> Tensor:
        """The rows of all tables, [bytes] uint8, for rows of int8 and int4."""
        return self._given[ALL_ROWS]

    @property
    def layout(self) -> Tensor:
        """The layout of `blocks`, [T, 4] int64: each table has one block."""
        return torch.tensor(
            [[t, 1, BLOCK_SHIFT, width] for t, width in enumerate(self._columns)], device="cpu"
        )

    def find(self, ids: Tensor, table_offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Finds the rows of ids as Generation does."""
        return ops.lookup(ids, table_offsets, self._of("slots"), torch.cat(self._of("key")))

    def blocks(self) -> Sequence[Tensor]:
        """Returns the rows of each table, for rows of float32 or float16."""
        # The file may have more rows of this width, of other tables.
        return [
            rows.narrow(0, 0, torch.sym_min(rows.shape[0], 1 << BLOCK_SHIFT))
            for rows in self._of("rows")
        ]

    def _of(self, part: str) -> list[Tensor]:
        return [self._given[name_in_index(table, part)] for table in self._names]
