"""Applies deltas to a directory of served tables, while they are served.

Changed rows are appended to the rows file, and copies of the id maps point to them. The id maps and the rows
of the current generation are only read, so its readers see no change. When less than half of the rows file is
in use, the rows in use are written to a new file.

Legend: M ids.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import (
    SavedTable,
    content_sum,
    open_checkpoint,
)
from torchrec_dyn.serving.builder import (
    chosen_tables,
    complete,
    new_slots,
    replacing,
    switch,
)
from torchrec_dyn.serving.files import Appender, DamagedTables, mapped
from torchrec_dyn.serving.id_maps import (
    SLOT_BYTES,
    ServedMap,
    checked_maps,
    has_room,
    maps_of,
    slots_for,
)
from torchrec_dyn.serving.manifest import (
    SLOTS,
    Manifest,
    ServedEntry,
    ServedTable,
    current_generation,
    laid_out,
    new_generation,
    new_rows_file,
    read_manifest,
    without_files,
)
from torchrec_dyn.serving.row_format import RowFormat, rows_of_width, sum_of_rows
from torchrec_dyn.storage import new_key, unsigned


def apply_delta(folder: str | os.PathLike[str], delta: str | os.PathLike[str]) -> None:
    """Applies a delta to served tables; collections serve it after their `refresh()`.

    All tables change at once: a reader sees the old or the new rows, never a mix. If the process is killed
    before the end, the old rows stay served.

    Args:
        folder: directory that `build` made.
        delta: directory of the delta.

    Raises:
        ValueError: if the delta is damaged, or does not begin at the contents of the served tables (an
            earlier delta is missing, or this delta was applied already), or the served tables are damaged,
            or another process is applying a delta. Nothing has changed then.
        OSError: if the disk is full, or fails. Nothing has changed then.
    """
    apply_deltas(Path(folder), [delta], current_generation(Path(folder)))


def apply_deltas(
    path: Path,
    deltas: Sequence[str | os.PathLike[str]],
    before: str,
    entry: ServedEntry | None = None,
) -> str:
    """Applies deltas in order, all of them in one new generation after `before`; returns its name."""
    with replacing(path, before):
        generation = _write_changes(path, before, deltas, entry)
        switch(path, generation, before)
    return generation


def _write_changes(
    path: Path,
    before: str,
    deltas: Sequence[str | os.PathLike[str]],
    entry: ServedEntry | None,
) -> str:
    """Writes the generation that deltas make of generation `before`; returns its name."""
    try:
        manifest = read_manifest(path, before)
        slots = mapped(path / before / SLOTS, manifest.slots * SLOT_BYTES, is_whole=True)
        rows_file = path / manifest.rows_file
        rows = mapped(rows_file, manifest.rows_bytes)
    except FileNotFoundError:
        raise without_files(path, before) from None
    old_maps = checked_maps(path / before / SLOTS, slots, manifest)
    opened = _opened(deltas, manifest.tables)
    tables = _with_room(manifest.tables, [saved for _, saved in opened])
    generation = new_generation(path)
    maps = _copied_maps(path / generation, tables, old_maps, slots)
    with closing(Appender(rows_file, manifest.rows_bytes)) as appender:
        for where, saved in opened:
            for name, delta in saved.items():
                tables[name] = _changed(
                    f"{where}(table='{name}')", delta, tables[name], maps[name],
                    manifest.row_format, rows, appender,
                )  # fmt: skip
            appender.flush()
            rows = mapped(rows_file, appender.used)
        after = replace(manifest, tables=tables, rows_bytes=appender.used, entry=entry)
        widths = after.widths()
        in_use = sum(table.num_rows * widths[name] for name, table in tables.items())
        if after.rows_bytes > 2 * in_use + knobs.WASTE_BYTES:
            after = _compacted(path, after, maps, rows)
        else:
            appender.finish(after.file_bytes())
        complete(path, generation, after)
    return generation


def _opened(
    deltas: Sequence[str | os.PathLike[str]], served: Mapping[str, ServedTable]
) -> list[tuple[str, dict[str, SavedTable]]]:
    """Returns each delta, with its name for messages, after checking that they continue the served tables."""
    opened, tables = [], dict(served)
    for delta in deltas:
        where = f"serving.apply_delta({delta})"
        saved = chosen_tables(open_checkpoint(delta).tables, tuple(served), where)
        for name, table in saved.items():
            _check_begins_here(f"{where}(table='{name}')", table, tables[name])
            tables[name] = replace(tables[name], sums=_sums_of(table, "result"))
        opened.append((where, saved))
    return opened


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
    base, result = _sums_of(delta, "base"), _sums_of(delta, "result")
    if base != served.sums:
        reason = (
            "It was applied already."
            if result == served.sums
            else "Apply the deltas in between first, or build from the last checkpoint."
        )
        raise ValueError(
            f"{where}: expected a delta that begins at the served content sums {_hex(served.sums)}, got a "
            f"delta that begins at {_hex(base)}. {reason}"
        )


def _sums_of(delta: SavedTable, when: str) -> dict[str, int]:
    sums = delta.sums_at(when)
    return {name: sums[name] for name in ("ids", "weight")}


def _hex(sums: Mapping[str, int]) -> str:
    return " ".join(f"{name} {total:016x}" for name, total in sums.items())


def _with_room(
    served: Mapping[str, ServedTable], deltas: Sequence[Mapping[str, SavedTable]]
) -> dict[str, ServedTable]:
    """Returns the tables with larger maps, of new keys, where the rows of the deltas may not fit."""
    tables: dict[str, ServedTable] = {}
    for name, table in served.items():
        most = table.num_rows + sum(saved[name].num_rows for saved in deltas)
        if not has_room(table.capacity, most):
            table = replace(table, capacity=slots_for(most), key=new_key())
        tables[name] = table
    return laid_out(tables)


def _copied_maps(
    generation: Path,
    tables: Mapping[str, ServedTable],
    old_maps: Mapping[str, ServedMap],
    slots: Tensor,
) -> dict[str, ServedMap]:
    """Creates the id maps of a generation with the contents of the old ones, slots [bytes] uint8."""
    # Maps that keep their places are copied by a write: cheaper than page by page through the mapping.
    if all(tables[name].key == old.key for name, old in old_maps.items()):
        return maps_of(new_slots(generation, tables, slots), tables)
    maps = maps_of(new_slots(generation, tables), tables)
    for name, old in old_maps.items():
        if tables[name].key == old.key:
            maps[name].slots.copy_(old.slots)
            continue
        for ids, rows, _ in old.pieces():
            maps[name].put(ids, rows)
    return maps


def _changed(
    where: str,
    delta: SavedTable,
    table: ServedTable,
    served: ServedMap,
    row_format: RowFormat,
    rows: Tensor,
    appender: Appender,
) -> ServedTable:
    """Removes ids, appends the changed rows, and maps the ids to them; returns the table after it.

    `rows` are those before it, [bytes] uint8.
    """
    name, num_rows = delta.name, table.num_rows
    rows = rows_of_width(rows, row_format.row_bytes(table.embedding_dim))
    ids_sum, row_sum = table.sums["ids"], table.row_sum

    def take(ids: Tensor) -> int:
        """Removes ids [M] int64 from the map and from the sums; returns how many had a row."""
        nonlocal ids_sum, row_sum
        places = served.take(ids)
        ids, places = ids[places >= 0], places[places >= 0]
        ids_sum -= content_sum(name, "ids", ids, ids)
        row_sum -= sum_of_rows(name, ids, rows[places])
        return len(ids)

    removed = torch.empty(0, dtype=torch.int64, device="cpu")
    if "removed" in delta.names:
        removed = delta.read("removed")
    for ids in removed.split(max(1, knobs.SERVED_CHUNK_BYTES // rows.shape[1])):
        if absent := len(ids) - take(ids):
            raise _does_not_fit(where, "removed ids that are served", f"{absent} ids without a row")
    num_rows -= len(removed)
    for chunk in delta.chunks(("ids", "weight"), chunk_bytes=knobs.SERVED_CHUNK_BYTES):
        ids = chunk["ids"]
        num_rows += len(ids) - take(ids)
        written = row_format.encode(chunk["weight"], where)
        served.put(ids, appender.append(written))
        ids_sum += content_sum(name, "ids", ids, ids)
        row_sum += sum_of_rows(name, ids, written)
    sums, ids_sum = _sums_of(delta, "result"), unsigned(ids_sum)
    if ids_sum != sums["ids"]:
        expected = f"a delta that leads to content sums {_hex(sums)}, which it names"
        raise _does_not_fit(where, expected, _hex({"ids": ids_sum}))
    return replace(table, num_rows=num_rows, sums=sums, row_sum=unsigned(row_sum))


def _does_not_fit(where: str, expected: str, got: str) -> DamagedTables:
    return DamagedTables(
        f"{where}: expected {expected}, got {got}. The delta does not belong to the served tables, or these "
        "are damaged; build from a checkpoint."
    )


def _compacted(
    path: Path, manifest: Manifest, maps: Mapping[str, ServedMap], rows: Tensor
) -> Manifest:
    """Writes the rows in use, of rows [bytes] uint8, to a new file, and renumbers them in the maps."""
    rows_file = new_rows_file()
    with closing(Appender(path / rows_file)) as appender:
        for name, width in manifest.widths().items():
            for _, numbers, slots in maps[name].pieces(width):
                written = rows_of_width(rows, width)[numbers]
                maps[name].renumber(slots, appender.append(written))
        after = replace(manifest, rows_file=rows_file, rows_bytes=appender.used)
        appender.finish(after.file_bytes())
    return after
