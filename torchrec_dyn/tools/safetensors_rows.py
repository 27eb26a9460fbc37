"""Exports and imports one table as a .safetensors file of plain ids and rows, 32 MiB at a time.

On a sharded collection `export_rows` and `import_rows` are collective; only rank 0 reads or writes the file.
A fault on one rank is raised on every rank.

Legend: R rows, D columns of the table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_dyn import knobs
from torchrec_dyn.checkpoint_format import RowSource, rows_at
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict import LiveRows, for_each_chunk
from torchrec_dyn.table import ROW_DTYPES
from torchrec_dyn.tools.safetensors_file import DAMAGED, SafetensorsReader, SafetensorsWriter
from torchrec_dyn.tools.table_export import saved_rows
from torchrec_dyn.whole_model import assign_rows, lookup_rows, table_in, tables_in

T = TypeVar("T")

_FORMAT = "torchrec_dyn_rows_1"
_SUMS = "content_sums"  # in the metadata: of ids and rows, 16 hexadecimal digits each
_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")
_ROWS = ("rows", "weight")  # the names that the tensor of rows may have in a file


class FileRows(RowSource):
    """The ids and rows of a .safetensors file, in the order of the file, with their sums if it has them.

    Attributes:
        count: R.
    """

    damaged = DAMAGED
    names = ("ids", "weight")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.where, self._reader = f"{path}", SafetensorsReader(path)
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
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
                    f"{self.where}: expected {_SUMS} of 16 digits each, got {text!r:.60}. {DAMAGED}"
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

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()


def export_rows(
    collection: nn.Module, table: str, path: str | os.PathLike[str], checksum: bool = False
) -> None:
    """Writes the ids and rows of one table to a .safetensors file, 32 MiB at a time.

    The file has "ids" [R] int64 in canonical order and "rows" [R, D] in the table's dtype. Its metadata are
    the format, the name of the table and the seed of the initial rows. Optimizer state and scores are saved
    in checkpoints only. The file gets its name when it is complete. Collective on a sharded collection.

    Args:
        collection: collection, sharded or not; it must not be trained or edited during the call.
        table: name of the table.
        path: path of the file; an existing file is replaced. Only rank 0 reads this argument.
        checksum: True to write the content sums of ids and rows into the metadata, for `import_rows` and for
            `python -m torchrec_dyn verify`. Only rank 0 reads this argument.

    Raises:
        ValueError: if there is no such table.
        OSError: if the file cannot be written, because the disk is full or fails; an older file is unchanged.
        RuntimeError: if the table was changed during the call, or a rank failed; no new file is left.
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
    """Writes the file of `export_rows` from a checkpoint, without a model and without other ranks.

    Args:
        checkpoint: the directory that `torch.distributed.checkpoint.save` wrote, or of `Checkpoints`.
        table: name of the table, or its key in the checkpoint if several tables have the name.
        path: path of the file; an existing file is replaced.
        checksum: as in `export_rows`.

    Raises:
        ValueError: if there is no such table, or the checkpoint is a delta or damaged; no new file is left.
    """
    rows = saved_rows(checkpoint, table, None, "export_saved_rows")
    _write_file(rows, rows.num_rows, path, checksum)


def _write_file(rows: RowSource, count: int, path: str | os.PathLike[str], has_sums: bool) -> None:
    """Writes the file of a table, from the rank that has all rows. Collective."""
    writer: SafetensorsWriter | None = None
    sums: dict[str, int] = {}

    def begin() -> SafetensorsWriter | None:
        if rows.share is None:
            return None
        shape = count, rows.embedding_dim
        tensors = {"ids": (torch.int64, shape[:1]), "rows": (rows.dtype, shape)}
        metadata = {"format": _FORMAT, "table": rows.name, "seed": str(rows.seed)}
        return SafetensorsWriter(path, tensors, metadata | _metadata_of(sums, has_sums))

    def write(chunk: Mapping[str, Tensor]) -> None:
        if writer is not None:
            writer.write("ids", chunk["ids"])
            writer.write("rows", chunk["weight"])

    def finish() -> None:
        if writer is not None:
            writer.finish(**_metadata_of(sums, has_sums))

    try:
        writer = run_together(rows.group, rows.where, begin)
        for_each_chunk(
            rows,
            rows.chunks(("weight",), knobs.CHUNK_BYTES, sums=sums if has_sums else None),
            write,
        )
        run_together(rows.group, rows.where, finish)
    finally:
        if writer is not None:
            writer.drop()


def _metadata_of(sums: Mapping[str, int], has_sums: bool) -> dict[str, str]:
    words = (f"{sums.get(name, 0):016x}" for name in FileRows.names)
    return {_SUMS: " ".join(words)} if has_sums else {}


def import_rows(collection: nn.Module, table: str, path: str | os.PathLike[str]) -> int:
    """Assigns the ids and rows of a .safetensors file to a table, 32 MiB at a time.

    Ids and rows are written as `torchrec_dyn.assign_rows` writes them; ids that are not in the file keep
    their rows. Collective on a sharded collection.

    Args:
        collection: collection, sharded or not.
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
    chunks: Iterator[dict[str, Tensor]] = iter(())

    def begin() -> int:
        nonlocal rows
        rows = FileRows(path)
        if rows.embedding_dim != no_rows.shape[1]:
            raise ValueError(
                f"{path}: expected rows {[rows.count, no_rows.shape[1]]} for a table with "
                f"{no_rows.shape[1]} columns, got {[rows.count, rows.embedding_dim]}."
            )
        if rows.sums:  # before any row changes
            for _ in rows.chunks(("weight",), knobs.CHUNK_BYTES):
                pass
        return rows.count

    try:
        count = _on_first_rank(held, where, begin)
        _check_room(held, where, count, rows)
        chunks = iter(()) if rows is None else rows.chunks(("weight",), knobs.CHUNK_BYTES)
        part = _NO_IDS, no_rows

        def read_part() -> bool:
            nonlocal part
            chunk = next(chunks, None)
            if chunk is not None:
                part = chunk["ids"], chunk["weight"]
            return chunk is not None

        while _on_first_rank(held, where, read_part):
            assign_rows(collection, table, *part)  # ranks other than 0 pass no ids
        return count
    finally:
        if rows is not None:
            rows.close()


def _check_room(table: Table, where: str, count: int, rows: FileRows | None) -> None:
    """Raises RuntimeError on every rank if the new ids of a file exceed the limit of any rank. Collective."""
    first_shard = table.shards[:1]
    tight = [shard for shard in first_shard if count and shard.num_rows + count > shard.row_limit]
    if not any(gather_results(table.group, where, lambda: bool(tight))):
        return
    chunks = iter(()) if rows is None else rows.chunks(("ids",), knobs.CHUNK_BYTES)
    absent: list[Tensor] = []
    ids = _NO_IDS

    def read() -> int:
        nonlocal ids
        ids = next(chunks, {"ids": _NO_IDS})["ids"]
        return len(ids)

    def find() -> None:
        for shard in first_shard:
            own = ids[table.owns(ids)].to(shard.device)
            absent.append(own[torch.eq(shard.id_map.lookup(own), -1)])

    while more := _on_first_rank(table, where, read):
        if table.group is not None:
            ids = ids if table.rank == 0 else torch.empty(more, dtype=torch.int64, device="cpu")
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
