"""Builds served tables from a full checkpoint and the deltas after it, a chunk of rows at a time.

Each writer holds the lock, writes a generation aside, and switches to it.
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
    SavedTable,
    open_checkpoint,
    replace_file,
    sync_to_disk,
)
from torchrec_dyn.serving.files import Appender, SecondWriter, new_mapped, only_writer
from torchrec_dyn.serving.generation import write_index
from torchrec_dyn.serving.id_maps import SLOT_BYTES, maps_of, slots_for
from torchrec_dyn.serving.manifest import (
    CURRENT,
    GENERATION,
    MANIFEST,
    ROWS_FILE,
    SLOTS,
    Manifest,
    ServedEntry,
    ServedTable,
    known_generation,
    laid_out,
    new_generation,
    new_rows_file,
    read_manifest,
    served_manifest,
)
from torchrec_dyn.serving.row_format import RowFormat, sum_of_rows
from torchrec_dyn.storage import new_key, unsigned

Folder = str | os.PathLike[str]


def build(
    checkpoint: Folder,
    out: Folder,
    rows: torch.dtype = torch.float32,
    tables: Sequence[str] | None = None,
) -> None:
    """Builds a directory of served tables from a checkpoint of `torch.distributed.checkpoint`.

    The directory is written beside `out` and renamed when it is complete. Rows are read in chunks and checked
    against the content sums of the checkpoint; memory does not grow with the tables.

    Args:
        checkpoint: directory of the checkpoint.
        out: the directory to make.
        rows: dtype of the served rows: float32, float16, int8 or int4 (row_format.py).
        tables: names of the tables to serve; None: all dynamic tables of the checkpoint.

    Raises:
        ValueError: if `out` exists or is a link to nothing, the checkpoint is a delta, is damaged or lacks a
            table, or rows do not fit the dtype. No new directory is left then.
        OSError: if the disk is full, or fails. No new directory is left then.
    """
    build_new([checkpoint], Path(out), rows, tables)


def build_new(
    checkpoints: Sequence[Folder],
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


def build_again(folder: Folder, checkpoint: Folder) -> None:
    """Replaces served tables by those of a checkpoint, in a new generation.

    The files of all other generations are removed. Processes that have mapped these can still read them.

    Args:
        folder: directory that `build` made; dtype and names of its tables stay.
        checkpoint: directory of a full checkpoint.

    Raises:
        ValueError: if the checkpoint is a delta, is damaged or lacks a table, or another process writes, or
            the manifest is damaged, which has dtype and names. What was served still is.
        OSError: if the disk is full, or fails. What was served still is.
    """
    path = Path(folder)
    before, manifest = served_manifest(path)
    build_instead([checkpoint], path, manifest.row_format.dtype, tuple(manifest.tables), before)


def build_instead(
    checkpoints: Sequence[Folder],
    path: Path,
    rows: torch.dtype,
    tables: Sequence[str] | None,
    before: str | None,
    entry: ServedEntry | None = None,
) -> str:
    """Replaces generation `before` by a full checkpoint and the deltas after it; returns the new one."""
    saved = _merged_tables(checkpoints, tables, f"serving.build_again({checkpoints[0]})")
    with replacing(path, before):
        return _serve(path, saved, RowFormat(rows), entry)


def _merged_tables(
    checkpoints: Sequence[Folder], names: Sequence[str] | None, where: str
) -> dict[str, MergedTable]:
    """Returns the tables by name as they are after a full checkpoint and the deltas after it."""
    saved = chosen_tables(open_checkpoint(checkpoints[0]).tables, names, where)
    for name, table in saved.items():
        if table.is_delta:
            raise ValueError(
                f"{where}: expected a checkpoint, got a delta of table '{name}'. Build from the full "
                "checkpoint, then call serving.apply_delta."
            )
    deltas = [
        chosen_tables(open_checkpoint(folder).tables, tuple(saved), f"{where}, {folder}")
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
    tables = laid_out({name: _new_table(table) for name, table in saved.items()})
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


def _new_table(table: MergedTable) -> ServedTable:
    return ServedTable(
        embedding_dim=table.embedding_dim,
        trained_as=str(table.last.config["rows"]),
        initializer=dict(table.last.config["initializer"]),
        seed=int(table.last.config["seed"]),
        num_rows=table.num_rows,
        capacity=slots_for(table.num_rows),
        key=new_key(),
        sums={name: table.sums[name] for name in ("ids", "weight")},
    )


@contextmanager
def replacing(folder: Path, before: str | None) -> Iterator[None]:
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


def chosen_tables(
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
