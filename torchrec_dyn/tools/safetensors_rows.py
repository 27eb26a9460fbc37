"""Exports and imports one table as a .safetensors file of plain ids and rows, 32 MiB at a time.

On a sharded collection `export_rows` and `import_rows` are collective; only rank 0 reads or writes the file.
A fault on one rank is raised on every rank.

Legend: R rows, D columns of the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_dyn.checkpoint_format import open_table
from torchrec_dyn.ranks import Table, agree, gather_results, run_together
from torchrec_dyn.storage import to_host
from torchrec_dyn.table import ROW_DTYPES
from torchrec_dyn.tools.safetensors_file import SafetensorsReader, SafetensorsWriter
from torchrec_dyn.whole_model import (
    assign_rows,
    lookup_rows,
    read_ids,
    tables_in,
)

T = TypeVar("T")

_CHUNK_BYTES = 32 << 20
_FORMAT = "torchrec_dyn_rows_1"
_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")
_ROWS = ("rows", "weight")  # the names that the tensor of rows may have in a file


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
        checksum: True to write the sum of all bytes into the metadata, for `import_rows` and for
            `python -m torchrec_dyn verify`. Only rank 0 reads this argument.

    Raises:
        ValueError: if there is no such table.
        OSError: if the file cannot be written, because the disk is full or fails; an older file is unchanged.
        RuntimeError: if ids were removed during the call, or a rank failed; no new file is left.
    """
    listed = read_ids(collection, table)
    held, where = tables_in(collection)[table], f"export_rows(table='{table}')"
    ids = run_together(held.group, where, lambda: to_host(listed))
    of_ranks = agree(held.group, where, value=[one.config.seed for one in held.shards])
    seed = next(seeds[0] for seeds in of_ranks if seeds)
    no_rows, _ = lookup_rows(collection, table, ids[:0])
    writer: SafetensorsWriter | None = None

    def begin() -> None:
        nonlocal writer
        tensors = {
            "ids": (torch.int64, (len(ids),)),
            "rows": (no_rows.dtype, (len(ids), no_rows.shape[1])),
        }
        writer = SafetensorsWriter(path, tensors, _metadata(table, seed), has_sum=checksum)
        for first, last in _chunks(len(ids), ids.element_size()):
            writer.write(ids[first:last])

    try:
        _on_first_rank(held, where, begin)
        for first, last in _chunks(len(ids), no_rows.shape[1] * no_rows.element_size()):
            asked = ids[first:last] if held.rank == 0 else ids[:0]
            rows, found = lookup_rows(collection, table, asked)

            def write(rows: Tensor = rows, found: Tensor = found) -> None:
                if not bool(found.all()):
                    removed = int(found.numel() - found.sum())
                    raise RuntimeError(
                        f"expected no id to be removed during the export, got {removed} removed ids. "
                        "Export while the collection is not trained or edited."
                    )
                assert writer is not None
                writer.write(to_host(rows))

            _on_first_rank(held, where, write)
        _on_first_rank(held, where, lambda: writer.finish() if writer else None)
    finally:
        if writer is not None:
            writer.drop()


def export_saved_rows(
    checkpoint: str | os.PathLike[str],
    table: str,
    path: str | os.PathLike[str],
    checksum: bool = False,
) -> None:
    """Writes the file of `export_rows` from a checkpoint, without a model and without other ranks.

    Args:
        checkpoint: the directory that `torch.distributed.checkpoint.save` wrote.
        table: name of the table, or its key in the checkpoint if several tables have the name.
        path: path of the file; an existing file is replaced.
        checksum: as in `export_rows`.

    Raises:
        ValueError: if there is no such table, or the checkpoint is a delta or damaged; no new file is left.
    """
    where = f"export_saved_rows({checkpoint})"
    saved = open_table(checkpoint, table, where)
    if saved.is_delta:
        raise ValueError(
            f"{where}: expected a full checkpoint, got a delta, which has changes only. Give the full save."
        )
    tensors = {
        "ids": (torch.int64, (saved.num_rows,)),
        "rows": (saved.dtype, (saved.num_rows, saved.embedding_dim)),
    }
    writer = SafetensorsWriter(
        path, tensors, _metadata(saved.name, saved.config["seed"]), has_sum=checksum
    )
    try:
        for name in ("ids", "weight"):  # each tensor is checked against its content sum
            for chunk in saved.chunks((name,), chunk_bytes=_CHUNK_BYTES):
                writer.write(chunk[name])
        writer.finish()
    finally:
        writer.drop()


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
    reader: SafetensorsReader | None = None

    def begin() -> tuple[int, str]:
        nonlocal reader
        reader = SafetensorsReader(path)
        found = _checked(reader, no_rows.shape[1], f"{path}")
        reader.verify()
        return found

    try:
        count, name = _on_first_rank(held, where, begin)

        def read(entry: str, first: int, last: int) -> Tensor:
            assert reader is not None
            return reader.rows(entry, first, last)

        _check_room(held, where, count, partial(read, "ids"))
        part = _NO_IDS, no_rows
        for first, last in _chunks(count, 8 + no_rows.shape[1] * 4):

            def read_part(first: int = first, last: int = last) -> None:
                nonlocal part
                part = read("ids", first, last), read(name, first, last)

            _on_first_rank(held, where, read_part)
            assign_rows(collection, table, *part)  # ranks other than 0 pass no ids
        return count
    finally:
        if reader is not None:
            reader.close()


def _metadata(table: str, seed: int) -> dict[str, str]:
    return {"format": _FORMAT, "table": table, "seed": str(seed)}


def _checked(reader: SafetensorsReader, columns: int, where: str) -> tuple[int, str]:
    """Returns the number of rows in a file, and the name of the tensor of rows.

    Raises:
        ValueError: if the file has other tensors than ids and rows [R, columns].
    """
    entries = reader.entries
    names = [name for name in _ROWS if name in entries]
    if len(names) != 1 or entries.keys() != {"ids", *names}:
        raise ValueError(
            f"{where}: expected tensors 'ids' and 'rows' (or 'weight'), got {sorted(entries)}. "
            "Optimizer state and scores are saved in checkpoints only."
        )
    ids, rows = entries["ids"], entries[names[0]]
    if ids.dtype != torch.int64 or len(ids.shape) != 1:
        raise ValueError(f"{where}: expected ids [R] of I64, got {list(ids.shape)} of {ids.dtype}.")
    if rows.dtype not in ROW_DTYPES or rows.shape != (*ids.shape, columns):
        raise ValueError(
            f"{where}: expected {names[0]} {[*ids.shape, columns]} of F32, F16 or BF16 for "
            f"{ids.shape[0]} ids of a table with {columns} columns, got {list(rows.shape)} of {rows.dtype}."
        )
    return ids.shape[0], names[0]


def _check_room(
    table: Table, where: str, count: int, read_ids: Callable[[int, int], Tensor]
) -> None:
    """Raises RuntimeError on every rank if the new ids of a file exceed the limit of any rank. Collective."""
    first_shard = table.shards[:1]
    tight = [one for one in first_shard if count and one.num_rows + count > one.row_limit]
    if not any(agree(table.group, where, value=bool(tight))):
        return
    absent: list[Tensor] = []
    for first, last in _chunks(count, 8):

        def read(first: int = first, last: int = last) -> Tensor:
            if table.rank == 0:
                return read_ids(first, last)
            return torch.empty(last - first, dtype=torch.int64, device="cpu")

        ids = run_together(table.group, where, read)
        if table.group is not None:
            dist.broadcast(ids, dist.get_global_rank(table.group, 0), group=table.group)

        def find(ids: Tensor = ids) -> None:
            for one in first_shard:
                own = ids[table.owns(ids)].to(one.device)
                absent.append(own[torch.eq(one.id_map.lookup(own), -1)])

        run_together(table.group, where, find)

    def check() -> None:
        for one in first_shard:
            one.check_room(torch.unique(torch.cat(absent)).numel())

    run_together(table.group, where, check)


def _chunks(count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    size = max(1, _CHUNK_BYTES // row_bytes)
    for first in range(0, count, size):
        yield first, min(first + size, count)


def _on_first_rank(table: Table, where: str, work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and returns its result on every rank; a fault is raised on every rank."""
    return gather_results(  # type: ignore[return-value]
        table.group, where, lambda: work() if table.rank == 0 else None
    )[0]
