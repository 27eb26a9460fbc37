"""Writes served tables: builds them from a checkpoint and the deltas after it, and applies later deltas.

Each writer holds the lock, writes a generation aside, a chunk of rows at a time, and switches to it.

Rows of a delta are appended to the rows file, and copies of the id maps point to them. Id maps and rows of
the current generation are only read, so its readers see no change. When less than half of the rows file is in
use, the rows in use are written to a new file.

Legend: M ids.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import (
    MergedTable,
    PlaceLike,
    SavedTable,
    content_sum,
    open_checkpoint,
    replace_file,
    sync_to_disk,
)
from torchrec_dyn.serving.files import (
    Appender,
    DamagedTables,
    SecondWriter,
    mapped,
    new_mapped,
    only_writer,
)
from torchrec_dyn.serving.generation import mapped_files, write_index
from torchrec_dyn.serving.id_maps import (
    SLOT_BYTES,
    ServedMap,
    checked_maps,
    has_room,
    maps_of,
    slots_for,
)
from torchrec_dyn.serving.manifest import (
    CURRENT,
    GENERATION,
    MANIFEST,
    ROWS_FILE,
    SLOTS,
    Manifest,
    ServedEntry,
    ServedTable,
    current_generation,
    known_generation,
    laid_out,
    new_generation,
    new_rows_file,
    read_manifest,
    served_manifest,
    without_files,
)
from torchrec_dyn.serving.row_format import RowFormat, rows_of_width, sum_of_rows
from torchrec_dyn.storage import new_key, unsigned

Folder = str | os.PathLike[str]


def build(
    checkpoint: PlaceLike,
    out: Folder,
    rows: torch.dtype = torch.float32,
    tables: Sequence[str] | None = None,
) -> None:
    """Builds a directory of served tables from a checkpoint of `torch.distributed.checkpoint`.

    The directory is written beside `out` and renamed once it is complete. Rows are read in chunks and checked
    against the content sums of the checkpoint; the memory used does not grow with the tables.

    Args:
        checkpoint: directory or URL of the checkpoint.
        out: the directory to make.
        rows: dtype of the served rows: float32, float16, int8 or int4 (row_format.py).
        tables: names of the tables to serve; None: all dynamic tables of the checkpoint.

    Raises:
        ValueError: if `out` exists or is a broken link, the checkpoint is a delta, is damaged or lacks a
            table, or rows do not fit the dtype. No new directory is left then.
        OSError: if the disk is full, or fails. No new directory is left then.
    """
    build_new([checkpoint], Path(out), rows, tables)


def build_new(
    checkpoints: Sequence[PlaceLike],
    target: Path,
    rows: torch.dtype,
    tables: Sequence[str] | None,
    entry: ServedEntry | None = None,
) -> str:
    """Builds a directory from a full checkpoint and the deltas after it; returns its generation."""
    row_format = RowFormat(rows)
    if os.path.lexists(target):
        raise ValueError(
            f"serving.build: expected nothing at {target}, got something. "
            f"Build at a path that does not exist, such as {target / 'tables'}, or remove it first."
        )
    saved = _merged_tables(checkpoints, tables, f"serving.build({checkpoints[0]})")
    beside = target.with_name(f".{target.name}.unfinished")
    beside.mkdir(parents=True, exist_ok=True)
    with only_writer(beside):
        _remove_all_but(beside, set())  # what a killed build has left takes room
        try:
            generation = _serve(beside, saved, row_format, entry)
            os.rename(beside, target)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
    sync_to_disk(target.parent)
    return generation


def build_again(folder: Folder, checkpoint: PlaceLike) -> None:
    """Replaces served tables with those of a checkpoint, in a new generation.

    The files of all other generations are removed. Processes that have mapped these can still read them.

    Args:
        folder: directory that `build` made; the dtype and names of its tables stay the same.
        checkpoint: directory or URL of a full checkpoint.

    Raises:
        ValueError: if the checkpoint is a delta, is damaged or lacks a table, another process writes, or the
            manifest, which has the dtype and names, is damaged. The old rows are still served then.
        OSError: if the disk is full, or fails. The old rows are still served then.
    """
    path = Path(folder)
    before, manifest = served_manifest(path)
    build_instead([checkpoint], path, manifest.row_format.dtype, tuple(manifest.tables), before)


def build_instead(
    checkpoints: Sequence[PlaceLike],
    path: Path,
    rows: torch.dtype,
    tables: Sequence[str] | None,
    before: str | None,
    entry: ServedEntry | None = None,
) -> str:
    """Replaces generation `before` by a full checkpoint and the deltas after it; returns the new one."""
    saved = _merged_tables(checkpoints, tables, f"serving.build_again({checkpoints[0]})")
    with _replacing(path, before):
        return _serve(path, saved, RowFormat(rows), entry)


def _merged_tables(
    checkpoints: Sequence[PlaceLike], names: Sequence[str] | None, where: str
) -> dict[str, MergedTable]:
    """Returns the tables by name as they are after a full checkpoint and the deltas after it."""
    saved = _chosen_tables(open_checkpoint(checkpoints[0]).tables, names, where)
    for name, table in saved.items():
        if table.is_delta:
            raise ValueError(
                f"{where}: expected a checkpoint, got a delta of table '{name}'. Build from the full "
                "checkpoint, then call serving.apply_delta."
            )
    deltas = [
        _chosen_tables(open_checkpoint(folder).tables, tuple(saved), f"{where}, {folder}")
        for folder in checkpoints[1:]
    ]
    return {
        name: MergedTable([table, *(delta[name] for delta in deltas)])
        for name, table in saved.items()
    }


def _serve(
    folder: Path,
    saved: Mapping[str, MergedTable],
    row_format: RowFormat,
    entry: ServedEntry | None,
) -> str:
    """Writes a generation with these tables and serves it; returns its name."""
    new = {
        name: ServedTable(
            embedding_dim=table.embedding_dim,
            trained_as=str(table.last.config["rows"]),
            initializer=dict(table.last.config["initializer"]),
            seed=int(table.last.config["seed"]),
            pooling=str(table.last.config.get("pooling", "")),
            num_rows=table.num_rows,
            capacity=slots_for(table.num_rows),
            key=new_key(),
            sums={kind: table.sums[kind] for kind in ("ids", "weight")},
        )
        for name, table in saved.items()
    }
    tables = laid_out(new)
    generation, rows_file = new_generation(folder), new_rows_file()
    maps = maps_of(new_slots(folder / generation, tables), tables)
    with closing(Appender(folder / rows_file)) as appender:
        for name, table in saved.items():
            row_sum = 0
            for chunk in table.chunks(("ids", "weight"), chunk_bytes=knobs.SERVED_CHUNK_BYTES):
                written = row_format.encode(chunk["weight"], f"serving.build(table='{name}')")
                maps[name].put(chunk["ids"], appender.append(written))
                row_sum += sum_of_rows(name, chunk["ids"], written)
            tables[name] = replace(tables[name], row_sum=unsigned(row_sum))
        dtype = str(row_format.dtype).removeprefix("torch.")
        manifest = Manifest(dtype, rows_file, appender.used, tables, entry)
        appender.finish(manifest.file_bytes())
    complete(folder, generation, manifest)
    # Older generations go at once: they may have rows that were forgotten since.
    switch(folder, generation)
    return generation


@contextmanager
def _replacing(folder: Path, before: str | None) -> Iterator[None]:
    """Holds the lock of a directory while generation `before`, which the caller read, is replaced.

    If another generation is served by now, it raises SecondWriter. After an error no new file is left.
    """
    with only_writer(folder):
        if (now := known_generation(folder)) != before:
            raise SecondWriter(
                f"{folder}: expected generation {before} as before, got {now} of another writer. Try again."
            )
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        try:
            yield
        except BaseException:
            if known_generation(folder) == before:
                _remove_all_but(folder, sizes.keys())
                for name, size in sizes.items():
                    if re.fullmatch(
                        ROWS_FILE, name
                    ):  # gives back the room of rows that were appended
                        with suppress(OSError):
                            os.truncate(folder / name, size)
            raise


def _chosen_tables(
    saved: Mapping[str, SavedTable], names: Sequence[str] | None, where: str
) -> dict[str, SavedTable]:
    """Returns the named tables (None: all tables) by name, in the order of their names."""
    known = sorted(table.name for table in saved.values())
    wanted = sorted(set(known if names is None else names))
    missing = [name for name in wanted if name not in known]
    if missing or not wanted:
        raise ValueError(f"{where}: expected tables among {known}, got {missing or 'none'}.")
    chosen: dict[str, SavedTable] = {}
    for key, table in saved.items():
        if table.name in chosen and table.name in wanted:
            raise ValueError(
                f"{where}: expected one table named '{table.name}', got '{chosen[table.name].key}' and "
                f"'{key}'. Save one of the two collections alone."
            )
        chosen[table.name] = table
    return {name: chosen[name] for name in wanted}


def new_slots(
    generation: Path, tables: Mapping[str, ServedTable], copied: Tensor | None = None
) -> Tensor:
    """Creates the directory of a generation and its file of id maps, [bytes] uint8, writable.

    copied: [bytes] uint8, id maps of the same ranges of slots as those of `tables`; None: the maps are empty.
    """
    generation.mkdir()
    size = SLOT_BYTES * sum(table.capacity for table in tables.values())
    return new_mapped(generation / SLOTS, size, copied)


def complete(folder: Path, generation: str, manifest: Manifest) -> None:
    """Commits a generation to the disk, all but its name in `current`."""
    sync_to_disk(folder / generation / SLOTS)
    write_index(folder, generation, manifest)
    replace_file(folder / generation / MANIFEST, manifest.to_json().encode())
    sync_to_disk(folder)


def switch(folder: Path, generation: str, before: str | None = None) -> None:
    """Serves a complete generation from now on, and removes all others but `before`."""
    replace_file(folder / CURRENT, f"{generation}\n".encode())
    kept = [name for name in (generation, before) if name is not None]
    files = [read_manifest(folder, name).rows_file for name in kept]
    _remove_all_but(folder, {*kept, *files})


def _remove_all_but(folder: Path, names: Set[str]) -> None:
    """Removes the generations and rows files, unfinished ones too, that do not have one of these names."""
    for path in folder.iterdir():
        if path.name in names or not re.fullmatch(f"{GENERATION}|{ROWS_FILE}", path.name):
            continue
        if path.is_dir():
            # First: a reader that misses another file misses this one too, and opens the next generation.
            with suppress(OSError):
                (path / SLOTS).unlink()
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def apply_delta(folder: Folder, delta: Folder) -> None:
    """Applies a delta to served tables; collections serve it after their next `refresh()`.

    All tables change at once: a reader sees the old or the new rows, never a mix. If the process is killed
    before the end, the old rows are still served.

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
    deltas: Sequence[Folder],
    before: str,
    entry: ServedEntry | None = None,
) -> str:
    """Applies deltas in order, all of them in one new generation after `before`; returns its name."""
    with _replacing(path, before):
        generation = _write_changes(path, before, deltas, entry)
        switch(path, generation, before)
    return generation


def _write_changes(
    path: Path,
    before: str,
    deltas: Sequence[Folder],
    entry: ServedEntry | None,
) -> str:
    """Writes the generation that deltas make of generation `before`; returns its name."""
    try:
        manifest = read_manifest(path, before)
        slots, rows = mapped_files(path, before, manifest)
    except FileNotFoundError:
        raise without_files(path, before) from None
    rows_file = path / manifest.rows_file
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
    deltas: Sequence[Folder], served: Mapping[str, ServedTable]
) -> list[tuple[str, dict[str, SavedTable]]]:
    """Returns each delta, with its name for messages, after checking that they continue the served tables."""
    opened, tables = [], dict(served)
    for delta in deltas:
        where = f"serving.apply_delta({delta})"
        saved = _chosen_tables(open_checkpoint(delta).tables, tuple(served), where)
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
        ("pooling", delta.config.get("pooling", ""), served.pooling),
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
