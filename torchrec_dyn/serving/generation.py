"""One generation of served tables: its id maps and rows, mapped into this process.

Legend: T tables, N ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from torchrec_dyn import ops
from torchrec_dyn.checkpoint_format import FileSums, Pace
from torchrec_dyn.name_lists import listed
from torchrec_dyn.serving.checksums import CHECKSUMS, check_last_chunk, warn_of_no_checksums
from torchrec_dyn.serving.files import mapped
from torchrec_dyn.serving.id_maps import SLOT_BYTES, maps_of, without_its_key
from torchrec_dyn.serving.manifest import (
    SLOTS,
    Manifest,
    ServedTable,
    read_manifest,
    with_current,
)
from torchrec_dyn.serving.verification import verify_generation


class Generation(nn.Module):
    """The id maps and rows of one generation, which never change.

    `slots` and `rows`, [bytes] uint8 each, hold all tables of the generation. `tables` are the names of T
    tables, in the order of the ids of a call.
    """

    slots: Tensor
    rows: Tensor
    layout: Tensor
    _at_rest: Tensor

    def __init__(
        self, name: str, manifest: Manifest, slots: Tensor, rows: Tensor, tables: Sequence[str]
    ) -> None:
        super().__init__()
        self.name = name
        self.verified: Mapping[str, FileSums] = {}  # sums of the rows file, if it was verified
        self.row_dtype = manifest.row_format.dtype
        self.nbit = manifest.rows if manifest.row_format.is_nbit else ""  # "int8" or "int4"
        self.tables: list[ServedTable] = [manifest.tables[table] for table in tables]
        cut = manifest.blocks()
        layout = []
        self._cuts: list[tuple[int, int, int]] = []  # columns, rows of a block, blocks
        for name_of, table in zip(tables, self.tables, strict=True):
            shift, blocks = cut[name_of]
            one = table.embedding_dim, 1 << shift, blocks
            if one not in self._cuts:  # tables of the same width share blocks
                self._cuts.append(one)
            first = sum(number for _, _, number in self._cuts[: self._cuts.index(one)])
            layout.append([first, blocks, shift, table.embedding_dim])
        self.register_buffer("slots", slots.view(torch.int64).view(-1, 2), persistent=False)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("layout", torch.tensor(layout, device="cpu"), persistent=False)
        at_rest = torch.tensor([(-1, table.key) for table in self.tables], device="cpu").view(-1, 2)
        self.register_buffer("_at_rest", at_rest, persistent=False)
        # Views of `slots` and `rows`, made once. An exported program makes views of its own two buffers.
        self._maps_once = self._maps()
        self._blocks_once = self._blocks()

    def find(self, ids: Tensor, table_offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Finds the rows of ids, [N] int64 in table order with table_offsets [T + 1] int64.

        Returns:
            rows: [N] int64, -1 where the id is absent.
            absent: [T] int64, the number of absent ids of each table.
        """
        maps = self._maps() if torch.compiler.is_exporting() else self._maps_once
        return ops.lookup(ids, table_offsets, maps, self._at_rest)

    def ids_of(self, table: int) -> Tensor:
        """Returns the ids with a row of the table of a number, [N] int64."""
        one = self._maps_once[table]
        return one[one[:, 1] > 0, 0].contiguous()

    def blocks(self) -> list[Tensor]:
        """Returns rows of float32 or float16 as blocks for `ops.gather_pool`; [] for rows of int8 and int4.

        `layout` has the blocks of each table.
        """
        return self._blocks() if torch.compiler.is_exporting() else self._blocks_once

    def _maps(self) -> list[Tensor]:
        return [self.slots.narrow(0, one.first_slot, one.capacity) for one in self.tables]

    def _blocks(self) -> list[Tensor]:
        if self.nbit:
            return []
        blocks = []
        for columns, rows, count in self._cuts:
            elements = rows * columns * count
            numbers = self.rows[: elements * self.row_dtype.itemsize].view(self.row_dtype)
            blocks += list(numbers.view(count, rows, columns).unbind()) if elements else []
        return blocks


def open_generation(
    folder: Path, tables: Sequence[str], before: Generation | None = None, verify: bool = False
) -> Generation | None:
    """Maps and returns the current generation; returns None if it is `before`.

    With `verify` it is verified first; chunks of rows that were verified for `before` are not read again.

    Raises:
        ValueError: if `serving.build` did not make the directory, or it is damaged or lacks a table.
    """

    def open_named(name: str) -> Generation | None:
        if before is not None and name == before.name:
            return None
        return _open(folder, name, tables, before.verified if before else {}, verify)

    return with_current(folder, open_named)


def _open(
    folder: Path, name: str, tables: Sequence[str], verified: Mapping[str, FileSums], verify: bool
) -> Generation:
    # Before the slots are mapped: a delta may remove both.
    has_checksums = (folder / name / CHECKSUMS).exists()
    manifest = read_manifest(folder, name)
    missing = [table for table in tables if table not in manifest.tables]
    if missing:
        raise ValueError(
            f"{folder}: expected tables among {listed(sorted(manifest.tables))}, got {listed(missing)}. "
            "Build with these tables too."
        )
    slots = mapped(folder / name / SLOTS, manifest.slots * SLOT_BYTES, is_whole=True)
    chosen = {table: manifest.tables[table] for table in tables}
    for table, served in maps_of(slots, chosen).items():
        if not served.has_its_key():
            raise without_its_key(folder / name, table)
    path = folder / manifest.rows_file
    rows = mapped(path, manifest.mapped_bytes(), readable=manifest.read_bytes())
    if has_checksums:
        check_last_chunk(folder / name, path, rows[: manifest.rows_bytes])
    found = Generation(name, manifest, slots, rows, tables)
    if verify:
        found.verified = verify_generation(folder, name, Pace(), verified).rows
    elif not has_checksums:
        warn_of_no_checksums(folder)
    return found
