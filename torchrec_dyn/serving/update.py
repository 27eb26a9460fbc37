"""apply_delta: puts a delta into a directory of served tables, while they are served.

Rows that changed are appended to the rows file; the id maps are copied and point there. What the current
generation is made of is only read, so a reader of it sees nothing of this. When less than half of the rows
file is in use, the rows in use are written to a new one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    MODEL_TENSORS,
    SavedTable,
    add_sums,
    content_sum,
    from_words,
    open_checkpoint,
)
from torchrec_dyn.serving.builder import chosen_tables, maps_of, new_maps, publish
from torchrec_dyn.serving.files import Appender, mapped, only_writer
from torchrec_dyn.serving.id_maps import SLOT_BYTES, ServedMap, has_room, slots_for
from torchrec_dyn.serving.manifest import (
    SLOTS,
    Manifest,
    ServedTable,
    current_generation,
    new_generation,
    new_rows_file,
    read_manifest,
)
from torchrec_dyn.serving.row_format import RowFormat

_CHUNK_BYTES = 8 << 20
# Room that a rows file may waste before it is written anew, beside as much as is in use.
_WASTE_BYTES = 1 << 20


def apply_delta(folder: str | os.PathLike[str], delta: str | os.PathLike[str]) -> None:
    """Puts a delta into served tables; `refresh()` of the collections that serve them then shows it.

    All tables change at once: a reader sees the old or the new rows, never a mix. A process that is killed
    on the way leaves the old ones.

    Args:
        folder: made by `build`.
        delta: directory of the delta.

    Raises:
        ValueError: if the delta is damaged, does not begin where the served tables are (one before it was
            missed, or it was applied already), or another process is applying one. Nothing has changed then.
    """
    path = Path(folder)
    current_generation(path)  # no lock file in a directory that is none of ours
    with only_writer(path):
        before = current_generation(path)
        manifest = read_manifest(path, before)
        where = f"serving.apply_delta({delta})"
        saved = chosen_tables(open_checkpoint(delta).tables, tuple(manifest.tables), where)
        for name, table in saved.items():
            _check_begins_here(f"{where}(table='{name}')", table, manifest.tables[name])
        generation = new_generation(before)
        created = [path / generation]
        try:
            after = _write(path, generation, before, manifest, saved, where, created)
            publish(path, generation, after)
        except BaseException:
            if current_generation(path) == before:
                for one in created:
                    _remove(one)
            raise
        _remove_all_but(path, {before: manifest, generation: after})


def _check_begins_here(where: str, delta: SavedTable, served: ServedTable) -> None:
    if not delta.is_delta:
        raise ValueError(
            f"{where}: expected a delta, got a full checkpoint. Build from it instead."
        )
    for what, is_here, was_served in (
        ("embedding_dim", delta.embedding_dim, served.embedding_dim),
        ("rows", delta.config["rows"], served.trained_as),
        ("seed", delta.config["seed"], served.seed),
        ("initializer", delta.config["initializer"], served.initializer),
    ):
        if is_here != was_served:
            raise ValueError(
                f"{where}: expected {what} {was_served!r} as served, got {is_here!r}. "
                "Build from a checkpoint of the same model."
            )
    base, result = (
        {name: from_words(delta.read(which), MODEL_TENSORS)[name] for name in served.sums}
        for which in ("base", "result")
    )
    if base != served.sums:
        reason = (
            "It was applied already."
            if result == served.sums
            else "Apply the deltas in between first, or build from the last checkpoint."
        )
        raise ValueError(
            f"{where}: expected a delta that begins at content sums {_hex(served.sums)}, which are served, "
            f"got one that begins at {_hex(base)}. {reason}"
        )


def _hex(sums: Mapping[str, int]) -> str:
    return " ".join(f"{name} {total:016x}" for name, total in sums.items())


def _write(
    path: Path,
    generation: str,
    before: str,
    manifest: Manifest,
    saved: Mapping[str, SavedTable],
    where: str,
    created: list[Path],
) -> Manifest:
    """Writes the new generation, all but its name in `current`; appends to `created` what it makes."""
    tables = _with_room(manifest.tables, saved)
    old_slots = mapped(path / before / SLOTS, manifest.slots * SLOT_BYTES)
    old_maps = maps_of(old_slots, manifest.tables)
    maps = new_maps(path / generation, tables)
    appender = Appender(path / manifest.rows_file, manifest.rows_bytes)
    try:
        for name, table in saved.items():
            _copy_map(old_maps[name], maps[name])
            change = _Change(
                f"{where}(table='{name}')",
                name,
                manifest,
                mapped(path / manifest.rows_file, manifest.rows_bytes),
            )
            change.apply(table, maps[name], appender)
            tables[name] = replace(tables[name], num_rows=change.num_rows, sums=change.result)
        after = replace(manifest, tables=tables, rows_bytes=appender.used)
    finally:
        appender.close(0)
    widths = after.widths()
    in_use = sum(table.num_rows * widths[name] for name, table in tables.items())
    if after.rows_bytes > 2 * in_use + _WASTE_BYTES:
        created.append(path / new_rows_file())
        after = _compacted(path, after, maps, created[-1])
    Appender(path / after.rows_file, after.rows_bytes).close(after.mapped_bytes())
    return after


def _with_room(
    served: Mapping[str, ServedTable], saved: Mapping[str, SavedTable]
) -> dict[str, ServedTable]:
    """Places the maps anew, larger ones where the rows of the delta may not fit."""
    tables: dict[str, ServedTable] = {}
    first_slot = 0
    for name, table in served.items():
        most = table.num_rows + saved[name].num_rows
        slots = table.capacity if has_room(table.capacity, most) else slots_for(most)
        tables[name] = replace(table, first_slot=first_slot, capacity=slots)
        first_slot += slots
    return tables


def _copy_map(old: ServedMap, new: ServedMap) -> None:
    if old.slots.shape == new.slots.shape:
        new.slots.copy_(old.slots)
        return
    for ids, rows, _ in old.pieces():
        new.put(ids, rows)


@dataclass
class _Change:
    """The change of one table, and the sums that it leads to.

    Attributes:
        where: the table, for messages.
        name: of the table.
        manifest: of the generation before.
        rows: [bytes] uint8 of that generation.
    """

    where: str
    name: str
    manifest: Manifest
    rows: Tensor

    def __post_init__(self) -> None:
        table = self.manifest.tables[self.name]
        self._format: RowFormat = self.manifest.row_format
        self._dtype = table.trained_dtype
        self._width = self._format.row_bytes(table.embedding_dim)
        self._sums = dict(table.sums)
        self.num_rows = table.num_rows
        self.result: dict[str, int] = {}

    def apply(self, delta: SavedTable, served: ServedMap, appender: Appender) -> None:
        """Takes the removed ids out and puts the changed ones in."""
        removed = delta.read("removed") if "removed" in delta.names else torch.empty(0).long()
        rows = served.take(removed)
        if bool((rows < 0).any()):
            raise self._does_not_fit(
                "removed ids that are served", f"{int((rows < 0).sum())} others"
            )
        self._take_from_sums(removed, rows)
        self.num_rows -= len(removed)
        for chunk in delta.chunks(("ids", "weight"), chunk_bytes=_CHUNK_BYTES):
            ids, weight = chunk["ids"], chunk["weight"]
            rows = served.take(ids)
            was_there = rows >= 0
            self._take_from_sums(ids[was_there], rows[was_there])
            written = self._format.encode(weight, self.where)
            served.put(ids, appender.append(written))
            self._add("ids", content_sum(self.name, "ids", ids, ids))
            self._add("weight", content_sum(self.name, "weight", ids, weight))
            self.num_rows += len(ids) - int(was_there.sum())
        self.result = {
            name: from_words(delta.read("result"), MODEL_TENSORS)[name] for name in self._sums
        }
        # Of rows that were rounded the old numbers are gone, and their sum with them.
        known = ["ids", "weight"] if self._format.is_exact_for(self._dtype) else ["ids"]
        if any(self._sums[name] != self.result[name] for name in known):
            raise self._does_not_fit(
                f"a delta that leads to content sums {_hex(self.result)}, as it says",
                _hex(self._sums),
            )

    def _take_from_sums(self, ids: Tensor, rows: Tensor) -> None:
        """Subtracts rows of the generation before."""
        self._add("ids", -content_sum(self.name, "ids", ids, ids))
        if self._format.is_exact_for(self._dtype):
            usable = len(self.rows) // self._width * self._width
            old = self._format.decode(self.rows[:usable].view(-1, self._width)[rows])
            weight = old.to(self._dtype)
            self._add("weight", -content_sum(self.name, "weight", ids, weight))

    def _add(self, name: str, total: int) -> None:
        self._sums = add_sums(self._sums, {name: total})

    def _does_not_fit(self, expected: str, got: str) -> ValueError:
        return ValueError(
            f"{self.where}: expected {expected}, got {got}. The delta is not of the tables that are served; "
            "build from a checkpoint."
        )


def _compacted(
    path: Path, manifest: Manifest, maps: Mapping[str, ServedMap], rows_file: Path
) -> Manifest:
    """Writes the rows in use to a new file."""
    old = mapped(path / manifest.rows_file, manifest.rows_bytes)
    appender = Appender(rows_file, 0)
    try:
        for name, width in manifest.widths().items():
            rows_of_table = old[: len(old) // width * width].view(-1, width)
            for _, rows, slots in maps[name].pieces():
                maps[name].renumber(slots, appender.append(rows_of_table[rows]))
    finally:
        appender.close(0)
    return replace(manifest, rows_file=rows_file.name, rows_bytes=appender.used)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_all_but(folder: Path, kept: Mapping[str, Manifest]) -> None:
    """Removes generations and rows files that nobody opens any more, and what was left half done."""
    names = {*kept, *(manifest.rows_file for manifest in kept.values())}
    for path in folder.iterdir():
        is_generation = path.is_dir() and path.name[:6].isdigit()
        if path.name not in names and (is_generation or path.name.startswith("rows-")):
            _remove(path)
