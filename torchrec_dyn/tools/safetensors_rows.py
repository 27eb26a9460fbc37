"""Exports and imports one table as a .safetensors file of plain ids and rows, 32 MiB at a time.

On a sharded collection `export_rows` and `import_rows` are collective; only rank 0 reads or writes the file.
A fault on one rank is raised on every rank.

The format: the first eight bytes are the length of the header. The header is JSON. The tensors follow
without gaps. Files are read by plain reads: if a file were mapped and another program truncated it, this
process would be killed.

Source: https://github.com/huggingface/safetensors, README, "Format".

Legend: R rows, D columns of the table.
"""

from __future__ import annotations

import json
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_dyn.checkpoint_format import RowSource, rows_at, write_beside
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict import LiveRows
from torchrec_dyn.storage import to_host
from torchrec_dyn.table import ROW_DTYPES
from torchrec_dyn.tools.table_export import saved_rows, write_share
from torchrec_dyn.whole_model import assign_rows, lookup_rows, table_in, tables_in

T = TypeVar("T")

_FORMAT = "torchrec_dyn_rows_1"
_SUMS = "content_sums"  # in the metadata: of ids and rows, 16 hexadecimal digits each
_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")
_ROWS = ("rows", "weight")  # the names that the tensor of rows may have in a file
_DTYPES = {
    "I64": torch.int64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # the limit of the format
_DAMAGED = "The file is damaged, or it is no .safetensors file."


# Of a tensor in a file: dtype, shape and the first byte of its numbers.
_Entry = tuple[torch.dtype, tuple[int, ...], int]


class SafetensorsReader:
    """A reader of the rows of a file, which is open as long as the reader lives. It checks the header first.

    `entries` are the tensors by name, `metadata` the strings of the header by name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._where = f"{Path(path)}"
        self.entries, self.metadata = self._read_header()

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Reads the rows [first, last) of a tensor."""
        dtype, shape, begin = self.entries[name]
        values = torch.empty(last - first, *shape[1:], dtype=dtype, device="cpu")
        data = values.flatten().view(torch.uint8)
        self._file.seek(begin + first * math.prod(shape[1:]) * dtype.itemsize)
        if self._file.readinto(data.numpy().data) != data.numel():
            raise self._fault(f"{data.numel()} bytes of '{name}'", "the end of the file")
        return values

    def _read_header(self) -> tuple[dict[str, _Entry], dict[str, str]]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
        longest = min(size - _LENGTH_BYTES, _LONGEST_HEADER)
        if length > longest:  # also true for a file that is shorter than the length field
            raise self._fault(
                "the length of a header that fits", f"{length} in a file of {size} bytes"
            )
        metadata, tensors = self._parsed(self._file.read(length))
        begin = end = _LENGTH_BYTES + length  # of the numbers
        entries = {}
        for name, kind, shape, span in tensors:
            dtype = _DTYPES.get(str(kind))
            if dtype is None:
                raise ValueError(
                    f"{self._where}: expected tensors of {', '.join(_DTYPES)}, got '{name}' of "
                    f"{kind!r:.60}. Convert it."
                )
            entries[name] = dtype, tuple(shape), end
            expected = [end - begin, end - begin + math.prod(shape) * dtype.itemsize]
            if span != expected:
                raise self._fault(f"data_offsets {expected} of '{name}' {shape}", f"{span}")
            end = begin + expected[1]
        if end != size:
            raise self._fault(f"a file of {end} bytes, as its header says", f"{size}")
        return entries, metadata

    def _parsed(self, text: bytes) -> tuple[dict[str, str], list[Any]]:
        """Returns the metadata of a header, and in order name, dtype, shape and data_offsets of tensors."""
        try:
            header = json.loads(text)
            metadata = header.pop(_METADATA, {})
            fields = ("dtype", "shape", "data_offsets")
            tensors = [
                [name, *(given[field] for field in fields)] for name, given in header.items()
            ]
            sizes = [size for *_, shape, span in tensors for size in (*shape, *span)]
            kinds = {*map(type, sizes)}, {*map(type, metadata.values())}
            if kinds[0] - {int} or kinds[1] - {str} or min(sizes, default=0) < 0:
                raise ValueError("a size that is no size, or metadata that are no strings")
            return metadata, sorted(tensors, key=lambda tensor: tensor[3])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._fault("a header that describes tensors", repr(error)) from error

    def _fault(self, expected: str, got: str) -> ValueError:
        return ValueError(f"{self._where}: expected {expected}, got {got}. {_DAMAGED}")


class SafetensorsWriter:
    """A writer of a file, which has a temporary name until it is complete and on the disk.

    `tensors` has dtype and shape by name. Wider numbers are first, so that all are aligned.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str],
    ) -> None:
        self._header: dict[str, Any] = {_METADATA: dict(metadata)}
        self._left: dict[str, range] = {}  # the bytes of each tensor that are not written yet
        end = 0
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            self._left[name] = range(begin, end)
            self._header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        self._path, self._numbers = Path(path), len(self._head())
        self._file = write_beside(self._path)

    def _head(self) -> bytes:
        """Returns the bytes before the numbers."""
        text = json.dumps(self._header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)  # so that numbers are aligned
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    def write(self, name: str, values: Tensor) -> None:
        """Writes the next rows of a tensor, values [M, ...] in its dtype."""
        numbers = to_host(values).contiguous().flatten().view(torch.uint8)
        left = self._left[name]
        self._file.write(self._numbers + left.start, numbers.numpy())
        self._left[name] = left[numbers.numel() :]

    def finish(self, **metadata: str) -> None:
        """Replaces metadata by others of the same length, and renames the file, when all is written."""
        left = sum(map(len, self._left.values()))
        assert not left, f"{left} bytes of {self._path} were not written"
        self._header[_METADATA] |= metadata
        head = self._head()
        assert len(head) == self._numbers
        self._file.write(0, head)
        self._file.publish(self._path)

    def drop(self) -> None:
        """Removes the temporary file; does nothing after `finish`."""
        self._file.drop()


class FileRows(RowSource):
    """The ids and rows of a .safetensors file, in the order of the file, with their sums if it has them.

    Attributes:
        count: R.
    """

    damaged = _DAMAGED
    names = ("ids", "weight")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.where, self._reader = f"{path}", SafetensorsReader(path)
        entries, metadata = self._reader.entries, self._reader.metadata
        names = [name for name in _ROWS if name in entries]
        if len(names) != 1 or entries.keys() != {"ids", *names}:
            raise ValueError(
                f"{self.where}: expected tensors 'ids' and 'rows' (or 'weight'), got {sorted(entries)}. "
                "Optimizer state and scores are saved in checkpoints only."
            )
        (kind, ids, _), (self.dtype, rows, _) = entries["ids"], entries[names[0]]
        if kind != torch.int64 or len(ids) != 1:
            raise ValueError(f"{self.where}: expected ids [R] of I64, got {list(ids)} of {kind}.")
        if self.dtype not in ROW_DTYPES or rows[:1] != ids or len(rows) != 2:
            raise ValueError(
                f"{self.where}: expected {names[0]} [{ids[0]}, D] of F32, F16 or BF16 for {ids[0]} ids, got "
                f"{list(rows)} of {self.dtype}."
            )
        self.count, self.embedding_dim = rows
        self.cuts, self.name = (0, self.embedding_dim), metadata.get("table", "")
        self._entries = {"ids": "ids", "weight": names[0]}
        if (text := metadata.get(_SUMS)) is not None:
            if re.fullmatch("[0-9a-f]{16} [0-9a-f]{16}", text) is None:
                raise ValueError(
                    f"{self.where}: expected {_SUMS} of 16 digits each, got {text!r:.60}. {_DAMAGED}"
                )
            self.sums = dict(zip(self.names, (int(word, 16) for word in text.split()), strict=True))

    def is_rowwise(self, name: str) -> bool:
        """Returns False: a file has no optimizer state."""
        return False

    def _places(
        self, rows: int, mixed: Sequence[range], waiting: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, 0 if waiting else self.count, rows):
            last = min(first + rows, self.count)
            yield self._reader.rows("ids", first, last), torch.arange(first, last, device="cpu")

    def _read(
        self, names: Sequence[str], ids: Tensor, places: Tensor, columns: slice, waiting: bool
    ) -> dict[str, Tensor]:
        read = {name: partial(self._reader.rows, self._entries[name]) for name in names}
        return {name: rows_at(read[name], places)[:, columns] for name in names}


def export_rows(
    collection: nn.Module, table: str, path: str | os.PathLike[str], checksum: bool = False
) -> None:
    """Writes the ids and rows of one table to a .safetensors file, 32 MiB at a time.

    The file has "ids" [R] int64 in canonical order and "rows" [R, D] in the table's dtype. Its metadata
    contains the format, the name of the table and the seed of the initial rows. Only checkpoints contain
    optimizer state and scores. The file gets its name once it is complete. Collective on a sharded
    collection.

    Args:
        collection: the collection, sharded or not; it must not be trained or edited during the call.
        table: name of the table.
        path: path of the file; an existing file is replaced. Only rank 0 reads this argument.
        checksum: True to write the content sums of ids and rows into the metadata, for `import_rows` and for
            `python -m torchrec_dyn verify`. Only rank 0 reads this argument.

    Raises:
        ValueError: if there is no such table.
        OSError: if the file cannot be written because the disk is full or fails; an existing file is
            unchanged.
        RuntimeError: if the table changed during the call, or a rank failed; no new file is left.
    """
    call = "export_rows"
    rows = LiveRows(table_in(collection, table, call), call, on_first_rank=True)
    _write_file(rows, rows.count, path, checksum)


def export_saved_rows(
    checkpoint: str | os.PathLike[str],
    table: str,
    path: str | os.PathLike[str],
    checksum: bool = False,
) -> None:
    """Writes the same file as `export_rows` from a checkpoint, without a model and without other ranks.

    Args:
        checkpoint: a directory that `torch.distributed.checkpoint.save` wrote, or a directory of
            `Checkpoints`.
        table: name of the table, or its key in the checkpoint if several tables have this name.
        path: path of the file; an existing file is replaced.
        checksum: as in `export_rows`.

    Raises:
        ValueError: if there is no such table, or the checkpoint is a delta or damaged; no new file is left.
    """
    rows = saved_rows(checkpoint, table, None, "export_saved_rows")
    _write_file(rows, rows.num_rows, path, checksum)


def _write_file(rows: RowSource, count: int, path: str | os.PathLike[str], has_sums: bool) -> None:
    """Writes the file of a table, from the rank that has all rows. Collective."""
    sums: dict[str, int] = {}

    def begin() -> SafetensorsWriter:
        shape = count, rows.embedding_dim
        tensors = {"ids": (torch.int64, shape[:1]), "rows": (rows.dtype, shape)}
        metadata = {"format": _FORMAT, "table": rows.name, "seed": str(rows.seed)}
        return SafetensorsWriter(path, tensors, metadata | _metadata_of(sums, has_sums))

    def write(writer: SafetensorsWriter, chunk: Mapping[str, Tensor]) -> None:
        writer.write("ids", chunk["ids"])
        writer.write("rows", chunk["weight"])

    def finish(writer: SafetensorsWriter) -> int:
        writer.finish(**_metadata_of(sums, has_sums))
        return count

    chunks = rows.chunks(sums=sums if has_sums else None)
    write_share(rows, chunks, begin, write, finish)


def _metadata_of(sums: Mapping[str, int], has_sums: bool) -> dict[str, str]:
    words = (f"{sums.get(name, 0):016x}" for name in FileRows.names)
    return {_SUMS: " ".join(words)} if has_sums else {}


def import_rows(collection: nn.Module, table: str, path: str | os.PathLike[str]) -> int:
    """Assigns the ids and rows of a .safetensors file to a table, 32 MiB at a time.

    Rows are written as by `torchrec_dyn.assign_rows`; ids that are not in the file keep their rows.
    Collective on a sharded collection.

    Args:
        collection: the collection, sharded or not.
        table: name of the table.
        path: path of a file that `export_rows` wrote, or of any .safetensors file with only "ids" [R] int64
            and "rows" or "weight" [R, D] of float32, float16 or bfloat16. Only rank 0 reads this argument.
            A file with a checksum is verified first.

    Returns:
        R, the number of rows in the file.

    Raises:
        ValueError: on every rank, if the file does not match the table; nothing has changed then.
        OSError: on every rank, if the file cannot be read.
        RuntimeError: on every rank, if the table has no room for the new ids; nothing has changed then.
    """
    no_rows, _ = lookup_rows(collection, table, _NO_IDS)
    held, where = tables_in(collection)[table], f"import_rows(table='{table}')"
    rows: FileRows | None = None

    def begin() -> int:
        nonlocal rows
        rows = FileRows(path)
        if rows.embedding_dim != no_rows.shape[1]:
            raise ValueError(
                f"{path}: expected rows {[rows.count, no_rows.shape[1]]} for a table with "
                f"{no_rows.shape[1]} columns, got {[rows.count, rows.embedding_dim]}."
            )
        if rows.sums:  # before any row changes
            for _ in rows.chunks():
                pass
        return rows.count

    count = _on_first_rank(held, where, begin)
    _check_room(held, where, count, rows)
    for _, chunk in _chunks_of(rows, ("weight",), held, where):
        assign_rows(collection, table, chunk.get("ids", _NO_IDS), chunk.get("weight", no_rows))
    return count


def _chunks_of(
    rows: FileRows | None, names: Sequence[str], table: Table, where: str
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yields the length of each chunk of a file and, on rank 0, the chunk; elsewhere {}. Collective."""
    chunks = iter(()) if rows is None else rows.chunks(names)
    chunk: dict[str, Tensor] = {}

    def read() -> int:
        nonlocal chunk
        chunk = next(chunks, {})
        return len(chunk.get("ids", _NO_IDS))

    while count := _on_first_rank(table, where, read):
        yield count, chunk


def _check_room(table: Table, where: str, count: int, rows: FileRows | None) -> None:
    """Raises RuntimeError on every rank if the new ids of a file exceed the limit of any rank. Collective."""
    first_shard = table.shards[:1]
    tight = [shard for shard in first_shard if count and shard.num_rows + count > shard.row_limit]
    if not any(gather_results(table.group, where, lambda: bool(tight))):
        return
    absent: list[Tensor] = []

    def find() -> None:
        for shard in first_shard:
            own = ids[table.owns(ids)].to(shard.device)
            absent.append(own[torch.eq(shard.id_map.lookup(own), -1)])

    for length, chunk in _chunks_of(rows, (), table, where):
        ids = chunk.get("ids", torch.empty(length, dtype=torch.int64, device="cpu"))
        if table.group is not None:
            dist.broadcast(ids, dist.get_global_rank(table.group, 0), group=table.group)
        run_together(table.group, where, find)

    def check() -> None:
        for shard in first_shard:
            shard.check_room(torch.unique(torch.cat(absent)).numel())

    run_together(table.group, where, check)


def _on_first_rank(table: Table, where: str, work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and returns its result on every rank; a fault is raised on every rank."""
    return gather_results(  # type: ignore[return-value]
        table.group, where, lambda: work() if table.rank == 0 else None
    )[0]
