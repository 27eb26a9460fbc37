"""A table in Arrow: its columns, batches of them, and files of Parquet or Arrow's IPC format.

Numbers are not copied, but bfloat16: Arrow has none, so such rows become float32, which is exact.

Legend: M rows of a batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import RowSource, write_beside
from torchrec_dyn.life import Clock
from torchrec_dyn.optimizers import STATE_NAMES

FORMATS = ("parquet", "arrow")
_FORMAT = "torchrec_dyn_table_1"
_TENSORS = {"id": "ids", "row": "weight", "last_seen_time": "last_seen"}  # by column
_NUMBERS = ("id", "last_seen", "last_seen_time", "count")  # one int64 a row
WAITING = ("id", "last_seen", "count")
_DEFAULT = ("id", "row", "last_seen", "count")


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
        if name in _NUMBERS:
            return self._arrow.int64()
        is_half = name == "row" and source.dtype == torch.float16
        number = self._arrow.float16() if is_half else self._arrow.float32()
        width = source.columns_of(_TENSORS.get(name, name))
        if width == 1 and name in STATE_NAMES:
            return number
        return self._arrow.list_(self._arrow.field("item", number, False), width)

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
        arrow = self._arrow
        if values.dtype == torch.bfloat16:
            values = values.float()
        numbers = arrow.py_buffer(values.contiguous().numpy())
        is_list = arrow.types.is_fixed_size_list(kind)
        flat = arrow.Array.from_buffers(
            kind.value_type if is_list else kind, values.numel(), [None, numbers]
        )
        return arrow.FixedSizeListArray.from_arrays(flat, type=kind) if is_list else flat


def _known(source: RowSource) -> tuple[str, ...]:
    """Returns the names of the columns that a table has."""
    by_tensor = {tensor: column for column, tensor in _TENSORS.items() if column in _DEFAULT}
    names = [by_tensor.get(name, name) for name in source.names]
    return tuple(names + ["last_seen_time"] * ("last_seen" in names and source.clock.numel() > 0))


class ArrowFile:
    """A file that is written batch by batch, each a row group; Arrow writes to it as to a file of Python.

    `schema` is that of its batches, and `kind` is "parquet" or "arrow" (the IPC file format, also named
    Feather 2). It is written beside `path`.
    """

    closed = False  # Arrow closes its own object; `finish` and `drop` close the file

    def __init__(self, arrow: Any, path: Path, schema: Any, kind: str) -> None:
        self._path = path
        self._file = write_beside(path)
        self._end = self.rows = 0
        self._is_dropped = False
        try:
            self._writer = _writer(arrow, self, schema, kind)
        except BaseException:
            self._file.drop()
            raise

    def add(self, batch: Any) -> None:
        """Writes a batch."""
        self._writer.write_batch(batch)
        self.rows += batch.num_rows

    def finish(self) -> None:
        """Writes the end of the file, waits until all of it is on the disk, and renames it to its path."""
        self._writer.close()
        self._file.publish(self._path)

    def drop(self) -> None:
        """Removes the unfinished file; does nothing after `finish`."""
        self._is_dropped = True
        self._file.drop()
        with suppress(Exception):
            self._writer.close()  # else it writes the end of the file when it is collected

    def write(self, data: Any) -> int:
        """Writes what Arrow encoded."""
        if not self._is_dropped:
            self._file.write(self._end, data)
        self._end += len(data)
        return len(data)

    def tell(self) -> int:
        """Returns the number of bytes that Arrow has written."""
        return self._end

    def flush(self) -> None:
        """Does nothing: `FileWriter` has no buffer."""

    close = flush


def _writer(arrow: Any, file: Any, schema: Any, kind: str) -> Any:
    file = arrow.PythonFile(file, mode="w")
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
