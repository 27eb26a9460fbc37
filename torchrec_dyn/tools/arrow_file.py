"""ArrowFile: a file of Parquet or of Arrow's IPC format, which gets its name when it is complete."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrec_dyn.checkpoint_format import commit, write_beside

FORMATS = ("parquet", "arrow")


class ArrowFile:
    """A file that is written batch by batch; a batch is a row group.

    `schema` is that of its batches, and `kind` is "parquet" or "arrow" (the IPC file format, also named
    Feather 2). It is written beside `path`.

    Raises:
        OSError: if the file cannot be opened; of every method, if the disk is full or fails.
    """

    def __init__(self, arrow: Any, path: Path, schema: Any, kind: str) -> None:
        self._path = path
        self._sink = _Sink(path)
        self.rows = 0
        try:
            self._writer = _writer(arrow, self._sink, schema, kind)
        except BaseException:
            self._sink.drop()
            raise

    def write(self, batch: Any) -> None:
        """Writes a batch."""
        self._writer.write_batch(batch)
        self.rows += batch.num_rows

    def finish(self) -> None:
        """Writes the end of the file, and waits until all of it is on the disk."""
        self._writer.close()
        self._sink.file.commit()

    def publish(self) -> None:
        """Renames the file to its path, after `finish`, and closes it."""
        os.replace(self._sink.file.path, self._path)  # while it is locked
        self._sink.file.close()
        commit(self._path.parent)

    def drop(self) -> None:
        """Removes the unfinished file; does nothing after `publish`."""
        self._sink.drop()
        with suppress(Exception):
            self._writer.close()  # else it writes the end of the file when it is collected


def _writer(arrow: Any, sink: Any, schema: Any, kind: str) -> Any:
    file = arrow.PythonFile(sink, mode="w")
    if kind == "arrow":
        return arrow.ipc.new_file(file, schema)
    # A dictionary of rows would hold all of them; bytes of floats compress better side by side.
    numbers = ("last_seen", "last_seen_time", "count")
    floats = [field.name for field in schema if not arrow.types.is_integer(field.type)]
    paths = [name for name in _leaves(arrow, schema) if name.partition(".")[0] in floats]
    return arrow.parquet.ParquetWriter(
        file,
        schema,
        compression="zstd",
        use_dictionary=[name for name in numbers if name in schema.names],
        use_byte_stream_split=paths,
        write_statistics=[name for name in schema.names if name not in floats],
    )


def _leaves(arrow: Any, schema: Any) -> list[str]:
    """Returns the paths of the columns of Parquet: of a list the path of its numbers."""
    return [
        f"{field.name}.list.element" if arrow.types.is_nested(field.type) else field.name
        for field in schema
    ]


class _Sink:
    """The file as Arrow writes to it: by the methods of a file of Python."""

    def __init__(self, path: Path) -> None:
        self.file = write_beside(path)
        self._end = 0
        self._is_dropped = False
        try:
            self.file.resize(0)
        except OSError:
            self.drop()
            raise

    @property
    def closed(self) -> bool:
        return False  # Arrow closes its own object; `publish` and `drop` close the file

    def write(self, data: Any) -> int:
        if not self._is_dropped:
            self.file.write(self._end, data)
        self._end += len(data)
        return len(data)

    def tell(self) -> int:
        return self._end

    def flush(self) -> None:
        """Does nothing: `FileWriter` has no buffer."""

    def close(self) -> None:
        """Does nothing: the file is closed by `publish` or `drop`."""

    def drop(self) -> None:
        self._is_dropped = True
        self.file.drop()
