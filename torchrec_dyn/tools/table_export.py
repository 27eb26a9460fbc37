"""Exports a table, saved or live, to Parquet and Arrow, with a part of its rows in memory at a time.

Numbers are not copied, but bfloat16: Arrow has none, so such rows become float32, which is exact.

Legend: M rows of a batch, D columns of the table.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_dyn.checkpoint_format import (
    MergedTable,
    PlaceLike,
    RowSource,
    naming,
    open_table,
    place_of,
    read_chain,
    sync_to_disk,
    write_beside,
)
from torchrec_dyn.life import Clock
from torchrec_dyn.optimizers import STATE_NAMES
from torchrec_dyn.ranks import gather_results, run_together
from torchrec_dyn.state_dict import LiveRows, for_each_chunk
from torchrec_dyn.whole_model import table_in

BATCH_BYTES = 32 << 20
FORMATS = ("parquet", "arrow")
_FORMAT = "torchrec_dyn_table_1"
_TENSORS = {"id": "ids", "row": "weight", "last_seen_time": "last_seen"}  # by column
WAITING = ("id", "last_seen", "count")
_DEFAULT = ("id", "row", "last_seen", "count")
_Source = str | os.PathLike[str] | nn.Module


def read_batches(
    source: _Source,
    table: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    ids: range | None = None,
    step: int | None = None,
    waiting: bool = False,
    batch_bytes: int = BATCH_BYTES,
) -> Any:
    """Returns a reader of the rows of a table as Arrow batches.

    The columns are those of `export_table`. For a sharded collection each rank reads its share; the call and
    each batch are then collective: every rank must read its reader to the end. A saved table is checked as it
    is read. If it is damaged, an error is raised after the last batch or before: do not rely on any batch
    until the reader has ended without an error.

    Args:
        source: as in `export_table`.
        table: as in `export_table`.
        columns: as in `export_table`.
        ids: as in `export_table`.
        step: as in `export_table`.
        waiting: as in `export_table`.
        batch_bytes: maximum bytes of a batch; a few times as many are in memory.

    Returns:
        A `pyarrow.RecordBatchReader`: an iterator of batches, which polars, pandas, DuckDB and
        `pyarrow.dataset` accept.

    Raises:
        ImportError, ValueError: as in `export_table`.
    """
    call = "read_batches"
    _, chunks, arrow = _opened(source, table, columns, ids, step, waiting, batch_bytes, call)
    batches = map(arrow.batch, _joined(chunks, batch_bytes))
    return pyarrow(call).RecordBatchReader.from_batches(arrow.schema, batches)


def export_table(
    source: _Source,
    table: str | None,
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    ids: range | None = None,
    step: int | None = None,
    waiting: bool = False,
    kind: str | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> int:
    """Writes the rows of a table to a file of Parquet or Arrow, in canonical order.

    Columns: `id` int64; `row`, a list of D numbers in the table's dtype (bfloat16 becomes float32);
    for a table with a policy, `last_seen` int64, the training step of the last occurrence, and `count` int64,
    as in a checkpoint; for a table with a clock, `last_seen_time` int64, the time at that step; and the
    optimizer state by its names, `momentum1`, `momentum2` and `row_counter`, lists of D float32, or of one
    number per column shard. A file gets its name once it is complete.

    For a sharded collection the call is collective. Each rank writes its share to a file in the directory
    `path`, which all ranks must share; the directory gets its name once all files are complete.

    Args:
        source: a directory of `Checkpoints`, the directory of one full checkpoint, or a collection, which
            must not be trained or edited during the call.
        table: name of the table or, in a checkpoint, its key; None: the only table.
        path: path of the file; an existing file is replaced. For a sharded collection, a directory that does
            not exist.
        columns: names of columns; None: id, row, last_seen and count, if the table has them.
        ids: a range of ids with step 1; None: all ids. All ids are read and checked, but rows only of this
            range.
        step: step of an entry of `Checkpoints`; None: the newest entry.
        waiting: True to write the waiting ids instead of the rows: `id`, `last_seen`, `count`.
        kind: "parquet" or "arrow" (the IPC file format); None: by the suffix of `path`.
        batch_bytes: maximum bytes of a row group before compression; a few times as many are in memory.

    Returns:
        The number of rows written, over all ranks.

    Raises:
        ImportError: if pyarrow is not installed.
        ValueError: if there is no such table, step or column, a save is damaged, or `path` does not fit.
        OSError: if the disk is full, or fails.
        RuntimeError: if the collection changed during the call, or a rank failed. After any error there is no
            new file, and an existing file is unchanged.
    """
    call = "export_table"
    rows, chunks, arrow = _opened(source, table, columns, ids, step, waiting, batch_bytes, call)
    target = place = Path(path)
    kind = run_together(rows.group, rows.where, lambda: _kind_of(kind, target, rows))
    folder = _new_folder(target, rows) if rows.group is not None else None
    if folder is not None and rows.share is not None:
        place = folder / f"{'part-{:05}-of-{:05}'.format(*rows.share)}.{kind}"
    try:
        counts = write_share(
            rows,
            _joined(chunks, batch_bytes),
            lambda: ArrowFile(pyarrow(call), place, arrow.schema, kind),
            lambda file, chunk: file.add(arrow.batch(chunk)),
            ArrowFile.finish,
        )
        if folder is not None:  # no reader sees the folder before all files are in it
            run_together(rows.group, rows.where, lambda: _publish(folder, target, rows))
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return sum(counts)


def write_share(
    rows: RowSource,
    chunks: Iterable[dict[str, Tensor]],
    begin: Callable[[], Any],
    write: Callable[[Any, dict[str, Tensor]], None],
    finish: Callable[[Any], int],
) -> list[int]:
    """Writes a file of this rank's chunks, if it has a share; returns `finish` of all ranks. Collective."""
    file: Any = None

    def write_chunk(chunk: dict[str, Tensor]) -> None:
        if file is not None:
            write(file, chunk)

    try:
        file = run_together(rows.group, rows.where, lambda: begin() if rows.share else None)
        for_each_chunk(rows, chunks, write_chunk)
        return gather_results(rows.group, rows.where, lambda: 0 if file is None else finish(file))
    finally:
        if file is not None:
            file.drop()


def _opened(
    source: _Source,
    table: str | None,
    columns: Sequence[str] | None,
    ids: range | None,
    step: int | None,
    waiting: bool,
    batch_bytes: int,
    call: str,
) -> tuple[RowSource, Iterator[dict[str, Tensor]], ArrowColumns]:
    """Returns the rows of a call, their chunks and columns, after all arguments were checked on all ranks."""
    rows: RowSource
    if isinstance(source, nn.Module):
        rows = LiveRows(table_in(source, table, call), call)
    else:
        rows = saved_rows(source, table, step, call)

    def checked() -> ArrowColumns:
        if isinstance(source, nn.Module) and step is not None:
            raise ValueError(f"{rows.where}: expected no step of a collection, got {step}.")
        if ids is not None and not isinstance(ids, range):
            raise ValueError(
                f"{rows.where}: expected a range of ids, got {type(ids).__name__}. Give "
                "range(first, last + 1)."
            )
        if ids is not None and (ids.step != 1 or waiting):
            raise ValueError(
                f"{rows.where}: expected a range of ids by 1, and none of waiting ids, got {ids}."
            )
        if batch_bytes < 1:
            raise ValueError(
                f"{rows.where}: expected batch_bytes of at least 1, got {batch_bytes}."
            )
        return ArrowColumns(rows, columns, waiting, call)

    arrow = run_together(rows.group, rows.where, checked)
    return rows, rows.chunks(arrow.tensors, batch_bytes, ids=ids, waiting=waiting), arrow


def _joined(chunks: Iterable[dict[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """Yields chunks joined to batches of `most` bytes: a range of few ids would make small ones."""
    held: list[dict[str, Tensor]] = []
    size = 0

    def batch() -> dict[str, Tensor]:
        return {name: torch.cat([chunk[name] for chunk in held]) for name in held[0]}

    for chunk in chunks:
        more = sum(values.nbytes for values in chunk.values())
        if held and size + more > most:
            yield batch()
            held, size = [], 0
        if len(chunk["ids"]):
            held.append(chunk)
            size += more
    if held:
        yield batch()


def saved_rows(path: PlaceLike, table: str | None, step: int | None, call: str) -> MergedTable:
    """Returns a table of a checkpoint, or of a directory of `Checkpoints` at a step; None: the newest."""
    chain = read_chain(path)
    folders, entry_step = [place_of(path)], None
    if chain.entries:
        entry = chain.entries[-1] if step is None else chain.at(step)
        if step is None and chain.highest > entry.sequence:
            warnings.warn(
                f"{call}: expected whole saves in {path}, got newer ones that are not: "
                f"{' '.join(chain.skipped)} Step {entry.step} is read.",
                stacklevel=4,
            )
        if (line := chain.line_of(entry)) is None:
            raise ValueError(
                f"{call}: expected the full save and all deltas before {entry.path}, got a line that is "
                "not whole. Export another step, whose full save is there."
            )
        folders, entry_step = [before.tables for before in line], entry.step
    elif chain.skipped or step is not None:
        raise ValueError(
            f"{call}: expected a directory of Checkpoints with a whole entry, got {path} without one. "
            f"{' '.join(chain.skipped)} Give a step of a directory of Checkpoints only."
        )
    saves = [open_table(folder, table, f"{call}({folder})") for folder in folders]
    if saves[0].is_delta:
        raise ValueError(
            f"{call}: expected a full checkpoint, got {folders[0]}, a delta, which has changes only. "
            "Give the directory of Checkpoints that it is in."
        )
    return MergedTable(saves, f"{call}(table='{saves[-1].name}', {folders[-1]})", entry_step)


def _kind_of(kind: str | None, path: Path, rows: RowSource) -> str:
    name = path.suffix[1:].lower() if kind is None else kind
    if name not in FORMATS:
        ends = " or ".join(f".{form}" for form in FORMATS)
        raise ValueError(
            f"{rows.where}: expected a path that ends in {ends}, or one of {FORMATS} as kind, got {path} "
            f"and {kind}."
        )
    if rows.group is not None and path.exists():
        raise ValueError(
            f"{rows.where}: expected nothing at {path}, since the files of all ranks become a directory, got "
            "something. Export beside it, or remove it first."
        )
    return name


def _new_folder(path: Path, rows: RowSource) -> Path:
    """Makes the folder in which all ranks write, and returns it. Collective."""
    names = gather_results(rows.group, rows.where, lambda: f".{path.name}.{uuid.uuid4().hex}")
    folder = path.with_name(names[0])
    run_together(rows.group, rows.where, lambda: folder.mkdir(exist_ok=True))
    return folder


def _publish(folder: Path, path: Path, rows: RowSource) -> None:
    if rows.share is None or rows.share[0] != 0:
        return
    inside = [*folder.glob("part-*")]
    if len(inside) != rows.share[1]:
        raise RuntimeError(
            f"expected the files of {rows.share[1]} ranks in {folder}, got {len(inside)}. Give a "
            "directory of a file system that all ranks share."
        )
    os.rename(folder, path)
    sync_to_disk(path.parent)


def pyarrow(call: str) -> Any:
    """Returns the package pyarrow."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            f"{call}: expected the package pyarrow, got none. Run `pip install 'pyarrow>=15'`."
        ) from error
    return pyarrow


class ArrowColumns:
    """The columns that are read of one table: their `schema`, and the `tensors` by row that they need."""

    def __init__(
        self, source: RowSource, columns: Sequence[str] | None, waiting: bool, call: str
    ) -> None:
        arrow = self._arrow = pyarrow(call)
        known = WAITING if waiting else _known(source)
        if columns is None:
            columns = [name for name in _DEFAULT if name in known]
        if not columns or not {*columns} <= {*known} or len({*columns}) < len(columns):
            raise ValueError(
                f"{source.where}: expected distinct columns among {', '.join(known)}, got "
                f"{', '.join(columns) or 'none'}."
            )
        self.tensors = tuple(dict.fromkeys(_TENSORS.get(name, name) for name in columns))
        self._clock = Clock.load(source.clock)
        fields = [arrow.field(name, self._type_of(source, name), False) for name in columns]
        facts = {"format": _FORMAT, "table": source.name, "seed": source.seed, "step": source.step}
        self.schema = arrow.schema(fields, metadata={"torchrec_dyn": json.dumps(facts)})

    def _type_of(self, source: RowSource, name: str) -> Any:
        values = source.nothing(_TENSORS.get(name, name))
        number = self._arrow.from_numpy_dtype(_as_numpy(values).dtype)
        if values.dim() == 1 or (values.shape[1] == 1 and name in STATE_NAMES):
            return number
        return self._arrow.list_(self._arrow.field("item", number, False), values.shape[1])

    def batch(self, rows: Mapping[str, Tensor]) -> Any:
        """Returns a RecordBatch of Arrow of the rows of each tensor by name, rows [M, columns] or [M]."""
        arrays = []
        for field in self.schema:
            values = rows[_TENSORS.get(field.name, field.name)]
            if field.name == "last_seen_time":
                values = self._clock.times_of(values)
            arrays.append(self._array(values, field.type))
        return self._arrow.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _array(self, values: Tensor, kind: Any) -> Any:
        flat = self._arrow.array(_as_numpy(values).ravel())
        is_list = self._arrow.types.is_fixed_size_list(kind)
        return self._arrow.FixedSizeListArray.from_arrays(flat, type=kind) if is_list else flat


def _as_numpy(values: Tensor) -> Any:
    """Returns numbers as Arrow takes them, without a copy, but of bfloat16."""
    return (values.float() if values.dtype == torch.bfloat16 else values).contiguous().numpy()


def _known(source: RowSource) -> tuple[str, ...]:
    """Returns the names of the columns that a table has."""
    by_tensor = {tensor: column for column, tensor in _TENSORS.items() if column in _DEFAULT}
    names = [by_tensor.get(name, name) for name in source.names]
    return tuple(names + ["last_seen_time"] * ("last_seen" in names and source.clock.numel() > 0))


class ArrowFile:
    """A file that is written batch by batch, each a row group.

    `schema` is that of its batches, and `kind` is "parquet" or "arrow" (the IPC file format, also named
    Feather 2). It is written beside `path`.
    """

    def __init__(self, arrow: Any, path: Path, schema: Any, kind: str) -> None:
        self._path, self.rows = path, 0
        self._file = write_beside(path)
        self._stream = open(self._file.fileno(), "wb", closefd=False)  # noqa: SIM115
        self._writer = _writer(arrow, self._stream, schema, kind)

    def add(self, batch: Any) -> None:
        """Writes a batch."""
        with naming(self._file.path):
            self._writer.write_batch(batch)
        self.rows += batch.num_rows

    def finish(self) -> int:
        """Writes the end of the file, puts it on the disk under its path, and returns its rows."""
        with naming(self._file.path):
            self._writer.close()
            self._stream.close()
        self._file.publish(self._path)
        return self.rows

    def drop(self) -> None:
        """Removes the unfinished file; does nothing after `finish`."""
        for end in (
            self._writer.close,
            self._stream.close,
        ):  # else they write when they are collected
            with suppress(Exception):
                end()
        self._file.drop()


def _writer(arrow: Any, file: Any, schema: Any, kind: str) -> Any:
    if kind == "arrow":
        return arrow.ipc.new_file(file, schema)
    integers = [field.name for field in schema if arrow.types.is_integer(field.type)]
    # A dictionary of rows would hold all of them; bytes of floats compress better side by side.
    floats = [
        f"{field.name}.list.element" if arrow.types.is_nested(field.type) else field.name
        for field in schema
        if field.name not in integers
    ]
    return arrow.parquet.ParquetWriter(
        file,
        schema,
        compression="zstd",
        use_dictionary=[name for name in integers if name != "id"],
        use_byte_stream_split=floats,
        write_statistics=integers,
    )
