"""What every writer of served tables does: hold the lock, write a generation aside, switch to it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from torchrec_dyn.checkpoint_format import SavedTable, replace_file, sync_to_disk
from torchrec_dyn.serving.files import SecondWriter, new_mapped, only_writer
from torchrec_dyn.serving.id_maps import SLOT_BYTES
from torchrec_dyn.serving.manifest import (
    CURRENT,
    GENERATION,
    MANIFEST,
    ROWS_FILE,
    SLOTS,
    Manifest,
    ServedTable,
    known_generation,
    read_manifest,
)
from torchrec_dyn.serving.tensor_index import write_index


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
        lengths = {path.name: path.stat().st_size for path in folder.iterdir()}
        try:
            yield
        except BaseException:
            if known_generation(folder) == before:
                remove_all_but(folder, lengths.keys())
                _cut_rows_files(folder, lengths)
            raise


def _cut_rows_files(folder: Path, lengths: Mapping[str, int]) -> None:
    """Gives back the room of rows that were appended; readers may have mapped a file as long as it was."""
    for name, length in lengths.items():
        if re.fullmatch(ROWS_FILE, name):
            with suppress(OSError):
                os.truncate(folder / name, length)


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
    remove_all_but(folder, {*kept, *files})


def remove_all_but(folder: Path, names: Set[str]) -> None:
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
