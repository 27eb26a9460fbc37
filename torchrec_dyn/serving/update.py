"""Applies deltas to a directory of served tables, while they are served.

Changed rows are appended to the rows file, and copies of the id maps point to them. The id maps and the rows
of the current generation are only read, so its readers see no change. When less than half of the rows file is
in use, the rows in use are written to a new file.

Legend: M ids.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    FileSums,
    RunningSums,
    SavedTable,
    add_sums,
    content_sum,
    from_words,
    open_checkpoint,
)
from torchrec_dyn.serving.builder import (
    CHUNK_BYTES,
    chosen_tables,
    new_slots,
    publish,
    write_tables,
)
from torchrec_dyn.serving.checksums import (
    Checksums,
    read_checksums,
    warn_of_no_checksums,
    write_checksums,
)
from torchrec_dyn.serving.files import Appender, SecondWriter, extend, mapped, only_writer
from torchrec_dyn.serving.id_maps import (
    SLOT_BYTES,
    ServedMap,
    has_room,
    maps_of,
    slots_for,
    without_its_key,
)
from torchrec_dyn.serving.manifest import (
    GENERATION,
    MANIFEST,
    ROWS_FILE,
    SLOTS,
    LostManifest,
    Manifest,
    ServedEntry,
    ServedTable,
    current_generation,
    known_generation,
    laid_out,
    last_generation,
    new_generation,
    new_rows_file,
    read_manifest,
    served_manifest,
    without_files,
)
from torchrec_dyn.serving.row_format import RowFormat
from torchrec_dyn.storage import new_key

Ids = dict[str, tuple[Tensor, Tensor]]  # by table: the changed and the removed ids, [M] int64 each
Choice = tuple[torch.dtype, Sequence[str] | None]  # dtype and names (None: all) of served tables

# A rows file is rewritten when it has more unused bytes than bytes in use plus this number.
_WASTE_BYTES = 1 << 20


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
) -> tuple[str, list[Ids]]:
    """Applies deltas as `apply_delta` does, all of them in one new generation.

    Each delta begins where the one before it ends; `entry` is the entry of `Checkpoints` of the last.
    `before` is the generation that the caller saw.

    Returns:
        The new generation, and the changed and the removed ids of each delta.
    """
    with _writer_after(path, before):
        try:
            manifest = replace(read_manifest(path, before), entry=entry)
            slots = mapped(path / before / SLOTS, manifest.slots * SLOT_BYTES, is_whole=True)
            rows = mapped(path / manifest.rows_file, manifest.rows_bytes)
            length = (path / manifest.rows_file).stat().st_size
        except FileNotFoundError:
            raise without_files(path, before) from None
        maps = maps_of(slots, manifest.tables)
        for name, width in manifest.widths().items():
            check_map(path / before, name, manifest.tables[name], maps[name], len(rows) // width)
        sums = _checked_sums(path, before, manifest, slots)
        saved = _opened(deltas, manifest.tables)
        generation = new_generation(before)
        created = [path / generation]
        told: list[Ids] = []
        try:
            after = _write_generation(
                path, generation, slots, maps, rows, manifest, sums, saved, created, told
            )
            publish(path, generation, after)
        except BaseException:
            if current_generation(path) == before:
                for one in created:
                    _remove(one)
                with suppress(OSError):  # readers may have mapped `length` bytes, but no more
                    os.truncate(path / manifest.rows_file, length)
            raise
        _remove_all_but(path, _names_of({before: manifest, generation: after}))
        return generation, told


def build_again(folder: str | os.PathLike[str], checkpoint: str | os.PathLike[str]) -> None:
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
    build_again_from(Path(folder), checkpoint, current_generation(Path(folder)))


def build_again_from(
    path: Path,
    checkpoint: str | os.PathLike[str],
    before: str | None,
    entry: ServedEntry | None = None,
    lost: Choice | None = None,
) -> str:
    """Replaces served tables as `build_again` does, and returns the new generation.

    `before` is the generation that the caller saw, `entry` the entry of the checkpoint, `lost` the choice of
    the tables where no manifest says it.
    """
    with _writer_after(path, before):
        if lost is None:
            manifest = served_manifest(path)[1]
            lost = manifest.row_format.dtype, tuple(manifest.tables)
        where = f"serving.build_again({checkpoint})"
        saved = chosen_tables(open_checkpoint(checkpoint).tables, lost[1], where)
        for name, table in saved.items():
            if table.is_delta:
                raise ValueError(f"{where}: expected a checkpoint, got a delta of table '{name}'.")
        there = {one.name for one in path.iterdir()}
        try:
            return write_tables(path, saved, RowFormat(lost[0]), last_generation(path), entry)
        finally:  # the former rows and ids go at once: some of them may have been forgotten
            try:
                kept = _names_of(dict([served_manifest(path)]))
            except LostManifest:  # nothing was published
                kept = there
            _remove_all_but(path, kept)


@contextmanager
def _writer_after(path: Path, before: str | None) -> Iterator[None]:
    """Holds the lock as `only_writer`; raises SecondWriter, too, if another generation is served by now."""
    with only_writer(path):
        if (now := known_generation(path)) != before:
            raise SecondWriter(
                f"{path}: expected generation {before} as before, got {now} of another writer. Try again."
            )
        yield


def check_map(where: Path, name: str, table: ServedTable, served: ServedMap, rows: int) -> None:
    """Raises ValueError unless a map has as many ids as its manifest says, with rows in the rows file."""
    taken, low, high = served.extent()
    if taken != table.num_rows or low < 0 or high > rows:
        raise ValueError(
            f"{where}: expected a map of {table.num_rows} ids of table '{name}' to rows in [0, {rows}), got "
            f"{taken} ids and rows up to {high - 1}. It is damaged. Build it again."
        )
    if not served.has_its_key():
        raise without_its_key(where, name)


def _checked_sums(
    path: Path, generation: str, manifest: Manifest, slots: Tensor
) -> Checksums | None:
    """Returns the checksums of a generation after checking its manifest and slots; None if it has none."""
    folder = path / generation
    sums = read_checksums(folder, manifest.rows_file)
    if sums is None:
        warn_of_no_checksums(path)
        return None
    text = bytearray((folder / MANIFEST).read_bytes())
    sums.check(folder / MANIFEST, torch.frombuffer(text, dtype=torch.uint8))
    sums.check(folder / SLOTS, slots)
    sums.check_length(path / manifest.rows_file, manifest.rows_bytes)
    return sums


def _opened(
    deltas: Sequence[str | os.PathLike[str]], served: Mapping[str, ServedTable]
) -> list[tuple[str, dict[str, SavedTable]]]:
    """Returns each delta, with its name for messages, after checking that they continue the served tables."""
    found, now = [], dict(served)
    for delta in deltas:
        where = f"serving.apply_delta({delta})"
        saved = chosen_tables(open_checkpoint(delta).tables, tuple(served), where)
        for name, table in saved.items():
            _check_begins_here(f"{where}(table='{name}')", table, now[name])
            now[name] = replace(now[name], sums=_sums_of(table, "result", now[name].sums))
        found.append((where, saved))
    return found


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
    base, result = _sums_of(delta, "base", served.sums), _sums_of(delta, "result", served.sums)
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


def _sums_of(delta: SavedTable, when: str, names: Iterable[str]) -> dict[str, int]:
    sums = from_words(delta.read(when))
    return {name: sums[name] for name in names}


def _hex(sums: Mapping[str, int]) -> str:
    return " ".join(f"{name} {total:016x}" for name, total in sums.items())


def _write_generation(
    path: Path,
    generation: str,
    old_slots: Tensor,
    old_maps: Mapping[str, ServedMap],
    old_rows: Tensor,
    manifest: Manifest,
    sums: Checksums | None,
    deltas: Sequence[tuple[str, Mapping[str, SavedTable]]],
    created: list[Path],
    told: list[Ids],
) -> Manifest:
    """Writes the new generation, without its name in `current`, and returns its manifest.

    New files are appended to `created`, the ids of each delta to `told`.
    """
    tables = _with_room(manifest.tables, [saved for _, saved in deltas])
    # Maps that keep their places are copied by a write: cheaper than page by page through the mapping.
    keep = all(tables[name].capacity == table.capacity for name, table in manifest.tables.items())
    slots = new_slots(path / generation, tables, old_slots if keep else None)
    maps = maps_of(slots, tables)
    rows_sums = None if sums is None else RunningSums(sums.files[manifest.rows_file])
    appender = Appender(path / manifest.rows_file, manifest.rows_bytes, rows_sums)

    def check() -> None:
        if sums is not None:
            sums.check(path / manifest.rows_file, old_rows)

    try:
        for name in tables if not keep else ():
            _copy_map(old_maps[name], maps[name])
        rows = old_rows
        for number, (where, saved) in enumerate(deltas):
            if number:  # with the rows of the deltas before this one
                rows = mapped(path / manifest.rows_file, appender.used)
            told.append({})
            for name, table in saved.items():
                where_in = f"{where}(table='{name}')"
                change = _Change(where_in, name, tables[name], manifest.row_format, rows, check)
                change.apply(table, maps[name], appender)
                tables[name] = replace(tables[name], num_rows=change.num_rows, sums=change.result)
                told[-1][name] = torch.cat(change.changed), change.removed
            appender.flush()
        after = replace(manifest, tables=tables, rows_bytes=appender.used)
    finally:
        appender.close()
    of_rows = None if rows_sums is None else rows_sums.sums()
    widths = after.widths()
    in_use = sum(table.num_rows * widths[name] for name, table in tables.items())
    if after.rows_bytes > 2 * in_use + _WASTE_BYTES:
        created.append(path / new_rows_file())
        after, of_rows = _compacted(path, after, maps, created[-1], of_rows)
    extend(path / after.rows_file, after.file_bytes())
    if of_rows is not None:
        write_checksums(path / generation, after.to_json(), slots, after.rows_file, of_rows)
    return after


def _with_room(
    served: Mapping[str, ServedTable], deltas: Sequence[Mapping[str, SavedTable]]
) -> dict[str, ServedTable]:
    """Returns the tables with larger maps where the rows of the deltas may not fit."""
    tables: dict[str, ServedTable] = {}
    for name, table in served.items():
        changed = [saved[name] for saved in deltas]
        most = table.num_rows + sum(one.num_rows for one in changed)
        if len(changed) > 1 and not has_room(table.capacity, most):
            # The same ids change again and again.
            ids = torch.cat([one.read("ids") for one in changed if one.num_rows])
            most = table.num_rows + len(ids.unique())
        if not has_room(table.capacity, most):
            table = replace(table, capacity=slots_for(most), key=new_key())
        tables[name] = table
    return laid_out(tables)


def _copy_map(old: ServedMap, new: ServedMap) -> None:
    if old.key == new.key and old.slots.shape == new.slots.shape:
        new.slots.copy_(old.slots)
        return
    for ids, rows, _ in old.pieces():
        new.put(ids, rows)


class _Change:
    """The change of one table by a delta: its new map, and the content sums of its rows.

    `table` and `rows`, [bytes] uint8, are from before the delta. After `apply`, `num_rows` and the content
    sums in `result` are those after the delta; `changed`, chunks of [M] int64, and `removed` are its ids.
    """

    def __init__(
        self,
        where: str,
        name: str,
        table: ServedTable,
        row_format: RowFormat,
        rows: Tensor,
        check_rows: Callable[[], None],
    ) -> None:
        self._where, self._name, self._rows = where, name, rows
        self._check_rows = check_rows
        self._format = row_format
        self._dtype = table.trained_dtype
        self._width = self._format.row_bytes(table.embedding_dim)
        self._sums = dict(table.sums)
        self.num_rows = table.num_rows
        self.result: dict[str, int] = {}
        self.removed = torch.empty(0, device="cpu").long()
        self.changed = [self.removed]

    def apply(self, delta: SavedTable, served: ServedMap, appender: Appender) -> None:
        """Removes ids, appends the changed rows, and maps the ids to the appended rows."""
        removed = delta.read("removed") if "removed" in delta.names else self.removed
        self.removed = removed
        rows = served.take(removed)
        if bool((rows < 0).any()):
            raise self._does_not_fit(
                "removed ids that are served", f"{int((rows < 0).sum())} ids without a row"
            )
        size = max(1, CHUNK_BYTES // self._width)
        for some, their_rows in zip(removed.split(size), rows.split(size), strict=True):
            self._subtract(some, their_rows)
        self.num_rows -= len(removed)
        for chunk in delta.chunks(("ids", "weight"), chunk_bytes=CHUNK_BYTES):
            ids, weight = chunk["ids"], chunk["weight"]
            self.changed.append(ids)
            rows = served.take(ids)
            was_there = rows >= 0
            self._subtract(ids[was_there], rows[was_there])
            written = self._format.encode(weight, self._where)
            served.put(ids, appender.append(written))
            self._add("ids", content_sum(self._name, "ids", ids, ids))
            self._add("weight", content_sum(self._name, "weight", ids, weight))
            self.num_rows += len(ids) - int(was_there.sum())
        self.result = _sums_of(delta, "result", self._sums)
        # The sum of rounded rows cannot be updated: the exact numbers of the old rows are not known.
        known = ["ids", "weight"] if self._format.is_exact_for(self._dtype) else ["ids"]
        if any(self._sums[name] != self.result[name] for name in known):
            self._check_rows()  # damage of the old rows has the same effect as a wrong delta
            raise self._does_not_fit(
                f"a delta that leads to content sums {_hex(self.result)}, which it names",
                _hex(self._sums),
            )

    def _subtract(self, ids: Tensor, rows: Tensor) -> None:
        """Subtracts ids [M] int64 from the sums, with rows [M] int64: their rows before the delta."""
        self._add("ids", -content_sum(self._name, "ids", ids, ids))
        if self._format.is_exact_for(self._dtype):
            usable = len(self._rows) // self._width * self._width
            old = self._rows[:usable].view(-1, self._width)[rows]
            weight = self._format.as_trained(old, self._dtype)
            self._add("weight", -content_sum(self._name, "weight", ids, weight))

    def _add(self, name: str, total: int) -> None:
        self._sums = add_sums(self._sums, {name: total})

    def _does_not_fit(self, expected: str, got: str) -> ValueError:
        return ValueError(
            f"{self._where}: expected {expected}, got {got}. The delta does not belong to the served tables; "
            "build from a checkpoint."
        )


def _compacted(
    path: Path,
    manifest: Manifest,
    maps: Mapping[str, ServedMap],
    rows_file: Path,
    sums: FileSums | None,
) -> tuple[Manifest, FileSums | None]:
    """Writes the rows in use to a new file and renumbers them in the maps.

    `sums` are the sums of the old file, which is checked, or None.

    Returns:
        The new manifest, and the sums of the new file, or None.
    """
    old = mapped(path / manifest.rows_file, manifest.rows_bytes)
    if sums is not None:
        Checksums({manifest.rows_file: sums}).check(path / manifest.rows_file, old)
    rows_sums = None if sums is None else RunningSums(FileSums())
    appender = Appender(rows_file, 0, rows_sums)
    try:
        for name, width in manifest.widths().items():
            rows_of_table = old[: len(old) // width * width].view(-1, width)
            for _, rows, slots in maps[name].pieces(width):
                maps[name].renumber(slots, appender.append(rows_of_table[rows]))
        appender.flush()
    finally:
        appender.close()
    after = replace(manifest, rows_file=rows_file.name, rows_bytes=appender.used)
    return after, None if rows_sums is None else rows_sums.sums()


def _remove(path: Path) -> None:
    if path.is_dir():
        # First: a reader that misses another file then misses this one too, and opens the next generation.
        with suppress(OSError):
            (path / SLOTS).unlink()
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _names_of(kept: Mapping[str, Manifest]) -> set[str]:
    """Returns the names of generations and of their rows files."""
    return {*kept, *(manifest.rows_file for manifest in kept.values())}


def _remove_all_but(folder: Path, names: Set[str]) -> None:
    """Removes old and unfinished generations and rows files: all that do not have one of these names."""
    for path in folder.iterdir():
        if path.name not in names and re.fullmatch(f"{GENERATION}|{ROWS_FILE}", path.name):
            _remove(path)
