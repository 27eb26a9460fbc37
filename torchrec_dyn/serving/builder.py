"""Builds a directory of served tables from a checkpoint, with one chunk of rows in memory at a time."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    FileSums,
    RunningSums,
    SavedTable,
    commit,
    open_checkpoint,
    replace_file,
)
from torchrec_dyn.serving.checksums import write_checksums
from torchrec_dyn.serving.files import (
    LOCK,
    Appender,
    SecondWriter,
    extend,
    new_mapped,
    only_writer,
)
from torchrec_dyn.serving.id_maps import SLOT_BYTES, maps_of, slots_for
from torchrec_dyn.serving.manifest import (
    CURRENT,
    MANIFEST,
    SLOTS,
    Manifest,
    ServedEntry,
    ServedTable,
    laid_out,
    new_generation,
    new_rows_file,
)
from torchrec_dyn.serving.row_format import RowFormat
from torchrec_dyn.serving.tensor_index import write_index
from torchrec_dyn.storage import new_key

# Bytes of rows that are encoded at once; a few copies of these rows are in memory.
CHUNK_BYTES = 8 << 20


def build(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
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
        ValueError: if `out` exists, is a link to nothing or has a zero byte, the checkpoint is a delta, is
            damaged or lacks a table, or rows do not fit the dtype. No new directory is left then.
        OSError: if the disk is full, or fails. No new directory is left then.
    """
    build_from(checkpoint, Path(out), rows, tables)


def build_from(
    checkpoint: str | os.PathLike[str],
    target: Path,
    rows: torch.dtype,
    tables: Sequence[str] | None,
    entry: ServedEntry | None = None,
) -> str:
    """Builds as `build` does, and returns the generation; `entry` is the entry of the checkpoint."""
    row_format = RowFormat(rows)
    check_target(target)
    if target.exists():
        raise ValueError(
            f"serving.build: expected nothing at {target}, got something. "
            f"Build at a path that does not exist, such as {target / 'tables'}, or remove it first."
        )
    saved = chosen_tables(
        open_checkpoint(checkpoint).tables, tables, f"serving.build({checkpoint})"
    )
    for name, table in saved.items():
        if table.is_delta:
            raise ValueError(
                f"serving.build: expected a checkpoint, got a delta of table '{name}' in {checkpoint}. "
                "Build from the full checkpoint, then call serving.apply_delta."
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(target)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        beside.chmod(0o755)
        with only_writer(beside):  # so that `remove_unfinished` sees that the folder is in use
            generation = write_tables(beside, saved, row_format, entry=entry)
            os.rename(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    commit(target.parent)
    return generation


def check_target(target: Path) -> None:
    """Raises ValueError for a zero byte or a link to nothing: no directory can be renamed to such a path.

    A link that leads to itself is one to nothing.
    """
    if "\0" in str(target):
        raise ValueError(
            f"{str(target)!r}: expected the path of a directory of served tables or of nothing, got one with "
            "a zero byte. Give a path without it."
        )
    if target.is_symlink() and not target.exists():
        end = os.path.realpath(target)
        got = (
            "that leads to itself. Remove it, or give another path."
            if os.path.islink(end)
            else f"to {end}, where nothing is. Give that path instead: the build makes the directory."
        )
        raise ValueError(
            f"{target}: expected a directory of served tables or nothing, got a link {got}"
        )


def remove_unfinished(target: Path) -> None:
    """Removes what killed builds of a directory left beside it.

    A build that runs holds the lock of its folder. A folder without a lock is left: its build may have just
    begun.
    """
    name = re.compile(re.escape(f".{target.name}.") + "[a-z0-9_]{8}")
    found: list[Path] = []
    with suppress(OSError):  # there is no parent yet, or it cannot be listed
        found += [one for one in target.parent.iterdir() if name.fullmatch(one.name)]
    for one in found:
        if (one / LOCK).is_file():
            with suppress(SecondWriter, OSError), only_writer(one):
                shutil.rmtree(one, ignore_errors=True)


def chosen_tables(
    found: Mapping[str, SavedTable], names: Sequence[str] | None, where: str
) -> dict[str, SavedTable]:
    """Returns the named tables (None: all tables) by name, in the order of their names.

    Raises:
        ValueError: if a table is missing, or two have the same name.
    """
    chosen: dict[str, SavedTable] = {}
    for key, table in found.items():
        if names is not None and table.name not in names:
            continue
        if table.name in chosen:
            raise ValueError(
                f"{where}: expected one table named '{table.name}', got '{chosen[table.name].key}' and "
                f"'{key}'. Save one of the two collections alone."
            )
        chosen[table.name] = table
    missing = [name for name in names or () if name not in chosen]
    if missing or not chosen:
        known = sorted(table.name for table in found.values())
        raise ValueError(f"{where}: expected tables among {known}, got {missing or 'none'}.")
    return dict(sorted(chosen.items()))


def write_tables(
    folder: Path,
    saved: Mapping[str, SavedTable],
    row_format: RowFormat,
    after: str | None = None,
    entry: ServedEntry | None = None,
) -> str:
    """Writes a generation with these tables, publishes and returns it; `after` is the generation before."""
    tables = laid_out(
        {
            name: ServedTable(
                embedding_dim=table.embedding_dim,
                trained_as=str(table.config["rows"]),
                initializer=dict(table.config["initializer"]),
                seed=int(table.config["seed"]),
                num_rows=table.num_rows,
                first_slot=0,
                capacity=slots_for(table.num_rows),
                key=new_key(),
                sums={one: table.sums[one] for one in ("ids", "weight")},
            )
            for name, table in saved.items()
        }
    )
    generation, rows_file = new_generation(after), new_rows_file()
    slots = new_slots(folder / generation, tables)
    maps = maps_of(slots, tables)
    rows_sums = RunningSums(FileSums())
    appender = Appender(folder / rows_file, 0, rows_sums)
    try:
        for name, table in saved.items():
            for chunk in table.chunks(("ids", "weight"), chunk_bytes=CHUNK_BYTES):
                written = row_format.encode(chunk["weight"], f"serving.build(table='{name}')")
                maps[name].put(chunk["ids"], appender.append(written))
        appender.flush()
    finally:
        appender.close()
    dtype = str(row_format.dtype).removeprefix("torch.")
    manifest = Manifest(dtype, rows_file, appender.used, tables, entry)
    extend(folder / rows_file, manifest.file_bytes())
    write_checksums(folder / generation, manifest.to_json(), slots, rows_file, rows_sums.sums())
    publish(folder, generation, manifest)
    return generation


def new_slots(
    generation: Path, tables: Mapping[str, ServedTable], copied: Tensor | None = None
) -> Tensor:
    """Creates the directory of a generation and its file of id maps, [bytes] uint8, writable.

    copied: [bytes] uint8, id maps of the same ranges of slots as those of `tables`; None: the maps are empty.
    """
    generation.mkdir()
    size = SLOT_BYTES * sum(table.capacity for table in tables.values())
    return new_mapped(generation / SLOTS, size, copied)


def publish(folder: Path, generation: str, manifest: Manifest) -> None:
    """Commits a generation to the disk, then writes its name to `current`; from then on it is served."""
    commit(folder / generation / SLOTS)
    write_index(folder, generation, manifest)
    replace_file(folder / generation / MANIFEST, manifest.to_json().encode())
    commit(folder)
    replace_file(folder / CURRENT, f"{generation}\n".encode())
