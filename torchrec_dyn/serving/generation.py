"""One generation of served tables: its id maps and rows, mapped into this process, and their verification.

A program without Python maps the tables by an index. The file `tensors` of a generation is text, one line for
each tensor: its name, its dtype, its file in the directory of served tables, its first byte in the file, and
its dimensions:

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

import os
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import torch
from torch import Tensor, nn

from torchrec_dyn import ops
from torchrec_dyn.checkpoint_format import content_sum, naming, replace_file
from torchrec_dyn.name_lists import listed
from torchrec_dyn.serving.files import DamagedTables, mapped
from torchrec_dyn.serving.id_maps import SLOT_BYTES, checked_maps
from torchrec_dyn.serving.manifest import (
    SLOTS,
    Manifest,
    ServedTable,
    read_manifest,
    with_current,
)
from torchrec_dyn.serving.row_format import rows_of_width, sum_of_rows
from torchrec_dyn.storage import unsigned

TENSORS, KEYS = "tensors", "keys"
ALL_ROWS = "rows"
# Rows are in blocks of 2^31 rows, the most that a layout can name; the last block may have fewer.
BLOCK_SHIFT = 31


# A line of an index: name, dtype, file, first byte and shape of a tensor.
IndexedTensor = tuple[str, torch.dtype, str, int, tuple[int, ...]]


class ServedTensors(NamedTuple):
    """The tensors of T tables that a call reads: those of a generation, or those that a program gets."""

    maps: list[Tensor]  # [C, 2] int64 each
    keys: Tensor  # [T, 2] int64, as `ops.lookup` takes them
    rows: Tensor  # [bytes] uint8, of all tables
    blocks: list[Tensor]  # rows of float32 or float16 as blocks for `ops.gather_pool`
    layout: Tensor  # [T, 4] int64, of `blocks`
    nbit: str  # "int8" or "int4", which have no blocks; else ""

    def find(self, ids: Tensor, table_offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Finds the rows of ids, [N] int64 in table order with table_offsets [T + 1] int64.

        Returns:
            rows: [N] int64, -1 where the id is absent.
            absent: [T] int64, the number of absent ids of each table.
        """
        return ops.lookup(ids, table_offsets, self.maps, self.keys)


class Generation(nn.Module):
    """The id maps and rows of one generation, which never change.

    `slots` and `rows`, [bytes] uint8 each, hold all tables of the generation. `tables` are the names of T
    tables, in the order of the ids of a call.
    """

    slots: Tensor
    rows: Tensor

    def __init__(
        self, name: str, manifest: Manifest, slots: Tensor, rows: Tensor, tables: Sequence[str]
    ) -> None:
        super().__init__()
        self.name = name
        self._row_dtype = manifest.row_format.dtype
        self.nbit = manifest.rows if manifest.row_format.is_nbit else ""
        self.tables: list[ServedTable] = [manifest.tables[table] for table in tables]
        # By number of columns: tables of the same width share blocks.
        self._row_counts = {
            manifest.tables[table].embedding_dim: manifest.whole_rows(table) for table in tables
        }
        layout: dict[int, list[int]] = {}
        for columns, count in self._row_counts.items():
            first = sum(blocks for _, blocks, *_ in layout.values())
            layout[columns] = [first, -(-count >> BLOCK_SHIFT), BLOCK_SHIFT, columns]
        self.register_buffer("slots", slots.view(torch.int64).view(-1, 2), persistent=False)
        self.register_buffer("rows", rows, persistent=False)
        lines = [layout[table.embedding_dim] for table in self.tables]
        self._layout = torch.tensor(lines, device="cpu")
        keys = [(-1, table.key) for table in self.tables]
        self._keys = torch.tensor(keys, device="cpu").view(-1, 2)
        self._made_once = self._tensors()
        self.unseen: list[Callable[[Tensor], Tensor]] = []  # of each table, if they are served

    def tensors(self) -> ServedTensors:
        """Returns the tensors of the tables; an exported program makes views of its own two buffers."""
        return self._tensors() if torch.compiler.is_exporting() else self._made_once

    def ids_of(self, table: int) -> Tensor:
        """Returns the ids with a row of the table of a number, [N] int64."""
        pairs = self._made_once.maps[table]
        return pairs[pairs[:, 1] > 0, 0].contiguous()

    def _tensors(self) -> ServedTensors:
        maps = [self.slots.narrow(0, table.first_slot, table.capacity) for table in self.tables]
        blocks: list[Tensor] = []
        if not self.nbit:
            numbers = self.rows.view(self._row_dtype)
            for columns, count in self._row_counts.items():
                rows = numbers[: columns * count].view(count, columns)
                blocks += rows.split(1 << BLOCK_SHIFT)
        return ServedTensors(maps, self._keys, self.rows, blocks, self._layout, self.nbit)


def open_generation(
    folder: Path, tables: Sequence[str], before: Generation | None = None, verify: bool = False
) -> Generation | None:
    """Maps and returns the current generation, verified first with `verify`; None if it is `before`."""

    def open_named(name: str) -> Generation | None:
        if before is not None and name == before.name:
            return None
        if verify:
            _verify(folder, name)
        manifest = read_manifest(folder, name)
        missing = [table for table in tables if table not in manifest.tables]
        if missing:
            raise ValueError(
                f"{folder}: expected tables among {listed(sorted(manifest.tables))}, got {listed(missing)}. "
                "Build with these tables too."
            )
        slots, rows = mapped_files(folder, name, manifest)
        return Generation(name, manifest, slots, rows, tables)

    return with_current(folder, open_named)


def mapped_files(folder: Path, name: str, manifest: Manifest) -> tuple[Tensor, Tensor]:
    """Maps the id maps and rows of a generation, [bytes] uint8 each."""
    size = SLOT_BYTES * sum(table.capacity for table in manifest.tables.values())
    slots = mapped(folder / name / SLOTS, size, is_whole=True)
    return slots, mapped(folder / manifest.rows_file, manifest.file_bytes())


def name_in_index(table: str, part: str) -> str:
    """Returns the name of a table's tensor; `part` is "slots", "key" or "rows"."""
    return f"{quote(table, safe='')}.{part}"


def indexed(generation: str, manifest: Manifest) -> Iterator[IndexedTensor]:
    """Yields the lines of the index of a generation."""
    slots, keys, rows = f"{generation}/{SLOTS}", f"{generation}/{KEYS}", manifest.rows_file
    stored, widths = manifest.row_format.stored_dtype, manifest.widths()
    for number, (name, table) in enumerate(manifest.tables.items()):
        first, shape = table.first_slot * SLOT_BYTES, (table.capacity, 2)
        yield name_in_index(name, "slots"), torch.int64, slots, first, shape
        yield name_in_index(name, "key"), torch.int64, keys, number * SLOT_BYTES, (1, 2)
        shape = manifest.whole_rows(name), widths[name] // stored.itemsize
        yield name_in_index(name, "rows"), stored, rows, 0, shape
    yield ALL_ROWS, torch.uint8, rows, 0, (manifest.rows_bytes,)


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


def verify(folder: str | os.PathLike[str]) -> int:
    """Reads all files of the served generation, and checks ids and rows against their content sums.

    It may run beside serving and beside `apply_delta`, in a thread or in another process. It verifies the
    generation that was current when it began, or the next if two deltas remove its files meanwhile.

    Args:
        folder: directory that `build` made.

    Returns:
        The number of bytes that were read.

    Raises:
        ValueError: if a file is damaged; the message names the file.
        OSError: if a file cannot be read.
    """
    path = Path(folder)
    return with_current(path, lambda name: _verify(path, name))


def _verify(folder: Path, generation: str) -> int:
    manifest = read_manifest(folder, generation)
    slots_file, rows_file = folder / generation / SLOTS, folder / manifest.rows_file
    # Mapped first: a delta may remove the files meanwhile.
    slots, rows = mapped_files(folder, generation, manifest)
    size = check_index(folder, generation, manifest)
    # A disk that fails is an OSError of a plain read, where a mapped page would end the process.
    size += sum(_read_through(path) for path in (slots_file, rows_file))
    widths = manifest.widths()
    for name, served in checked_maps(slots_file, slots, manifest).items():
        width, table = widths[name], manifest.tables[name]
        rows_of_table = rows_of_width(rows, width)
        ids_sum = row_sum = 0
        for ids, numbers, _ in served.pieces(width):
            if not torch.equal(served.find(ids), numbers):
                raise DamagedTables(
                    f"{slots_file}: expected the ids of table '{name}' in slots by the key in the manifest, "
                    "got ids that are not found. It is damaged. Build it again."
                )
            ids_sum += content_sum(name, "ids", ids, ids)
            row_sum += sum_of_rows(name, ids, rows_of_table[numbers])
        for path, what, total, expected in (
            (slots_file, "ids", unsigned(ids_sum), table.sums["ids"]),
            (rows_file, "rows", unsigned(row_sum), table.row_sum),
        ):
            if total != expected:
                raise DamagedTables(
                    f"{path}: expected {what} of table '{name}' with content sum {expected:016x}, got "
                    f"{total:016x}. It is damaged. Build it again."
                )
    return size


def _read_through(path: Path) -> int:
    """Reads all bytes of a file, and returns their number."""
    size, buffer = 0, bytearray(1 << 20)
    with naming(path), open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size += count
    return size
