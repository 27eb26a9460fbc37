"""One table as a .safetensors file of plain ids and rows, out and in, piece by piece.

On a sharded collection both are collective; rank 0 alone reads or writes the file. What is wrong on one rank
is raised on all of them.

Legend: R rows, D columns of the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_dyn.checkpoint.safetensors_file import SafetensorsReader, SafetensorsWriter
from torchrec_dyn.checkpoint_format import open_checkpoint
from torchrec_dyn.ranks import agree, gather_results, run_together
from torchrec_dyn.table import ROW_DTYPES
from torchrec_dyn.whole_model import (
    Collection,
    RowsHere,
    assign_rows,
    lookup_rows,
    read_ids,
    rows_here,
)

T = TypeVar("T")

_CHUNK_BYTES = 32 << 20
_FORMAT = "torchrec_dyn_rows_1"
_ROWS = ("rows", "weight")  # other programs' files have either


def export_rows(collection: Collection, table: str, path: str | os.PathLike[str]) -> None:
    """Writes the ids and rows of one table to a .safetensors file, 32 MB at a time.

    The file has "ids" [R] int64 in canonical order, "rows" [R, D] in the table's dtype, and in its
    metadata the format, the table and the seed of its initial rows. Optimizer state and scores
    travel in checkpoints. The file appears under its name when it is complete. Collective on a
    sharded collection.

    Args:
        collection: sharded or not; nothing may train or edit it meanwhile.
        table: its name.
        path: the file; one that is there is replaced. Only rank 0's counts.

    Raises:
        ValueError: if there is no such table.
        RuntimeError: if rows came or went meanwhile, or a rank failed; no file is left.
    """
    ids = read_ids(collection, table)
    here, where = rows_here(collection)[table], f"export_rows(table='{table}')"
    told = agree(here.group, where, value=[shard.config.seed for shard in here.shards])
    seed = next(seeds[0] for seeds in told if seeds)
    none, _ = lookup_rows(collection, table, ids[:0])
    writer: SafetensorsWriter | None = None

    def begin() -> None:
        nonlocal writer
        tensors = {
            "ids": (torch.int64, (len(ids),)),
            "rows": (none.dtype, (len(ids), none.shape[1])),
        }
        writer = SafetensorsWriter(path, tensors, _metadata(table, seed))
        for first, last in _chunks(len(ids), ids.element_size()):
            writer.write(ids[first:last])

    try:
        _first_rank_does(here, where, begin)
        for first, last in _chunks(len(ids), none.shape[1] * none.element_size()):
            asked = ids[first:last] if here.rank == 0 else ids[:0]
            rows, found = lookup_rows(collection, table, asked)

            def go_on(rows: Tensor = rows, found: Tensor = found) -> None:
                if not bool(found.all()):
                    gone = int(found.numel() - found.sum())
                    raise RuntimeError(
                        f"expected the rows to stay while they are written, got {gone} gone. "
                        "Export while nothing trains."
                    )
                assert writer is not None
                writer.write(rows)

            _first_rank_does(here, where, go_on)
        _first_rank_does(here, where, lambda: writer.finish() if writer else None)
    finally:
        if writer is not None:
            writer.drop()


def export_saved_rows(
    checkpoint: str | os.PathLike[str], table: str, path: str | os.PathLike[str]
) -> None:
    """Writes the same file from a checkpoint, without a model and without other ranks.

    Args:
        checkpoint: what was given to `torch.distributed.checkpoint.save`.
        table: its name, or its key in the checkpoint where several have that name.
        path: the file; one that is there is replaced.

    Raises:
        ValueError: if there is no such table, or the checkpoint is damaged; no file is left.
    """
    tables = open_checkpoint(checkpoint).tables
    found = [one for key, one in tables.items() if table in (key, one.name)]
    if len(found) != 1 or found[0].is_delta:
        kind = "a delta, which has changes only" if found else f"tables {sorted(tables)}"
        raise ValueError(
            f"export_saved_rows({checkpoint}): expected one table '{table}', got "
            f"{kind if len(found) < 2 else [one.key for one in found]}. Name one by its key."
        )
    (saved,) = found
    tensors = {
        "ids": (torch.int64, (saved.num_rows,)),
        "rows": (saved.dtype, (saved.num_rows, saved.embedding_dim)),
    }
    writer = SafetensorsWriter(path, tensors, _metadata(saved.name, saved.config["seed"]))
    try:
        for name in ("ids", "weight"):  # each of them is checked against its content sum
            for chunk in saved.chunks((name,), chunk_bytes=_CHUNK_BYTES):
                writer.write(chunk[name])
        writer.finish()
    finally:
        writer.drop()


def import_rows(collection: Collection, table: str, path: str | os.PathLike[str]) -> int:
    """Assigns the ids and rows of a .safetensors file to a table, 32 MB at a time.

    An id without a row gets one, with fresh optimizer state; ids that are not in the file keep
    theirs. Of several rows for one id the last stays. Rows are converted to the table's dtype, to
    nearest. Collective on a sharded collection.

    Args:
        collection: sharded or not.
        table: its name.
        path: a file of `export_rows`, or any with "ids" [R] int64 and "rows" or "weight" [R, D] of
            float32, float16 or bfloat16, and nothing else. Only rank 0's counts.

    Returns:
        R, the rows that were read.

    Raises:
        ValueError: on every rank, if the file does not fit; nothing has changed.
        RuntimeError: on every rank, if the table has no room for the new ids; nothing has changed.
    """
    none, _ = lookup_rows(collection, table, torch.empty(0, dtype=torch.int64))
    here, where = rows_here(collection)[table], f"import_rows(table='{table}')"
    reader: SafetensorsReader | None = None

    def begin() -> tuple[int, str]:
        nonlocal reader
        reader = SafetensorsReader(path)
        return _checked(reader, none.shape[1], f"{path}")

    try:
        count, name = _first_rank_does(here, where, begin)

        def read(entry: str, first: int, last: int) -> Tensor:
            assert reader is not None
            return reader.rows(entry, first, last)

        _check_room(here, where, count, partial(read, "ids"))
        part = torch.empty(0, dtype=torch.int64), none
        for first, last in _chunks(count, 8 + none.shape[1] * 4):

            def go_on(first: int = first, last: int = last) -> None:
                nonlocal part
                part = read("ids", first, last), read(name, first, last)

            _first_rank_does(here, where, go_on)
            assign_rows(collection, table, *part)  # other ranks have nothing to give
        return count
    finally:
        if reader is not None:
            reader.close()


def _metadata(table: str, seed: int) -> dict[str, str]:
    return {"format": _FORMAT, "table": table, "seed": str(seed)}


def _checked(reader: SafetensorsReader, columns: int, where: str) -> tuple[int, str]:
    """Returns the number of rows in a file and what they are called in it.

    Raises:
        ValueError: if the file has other tensors than ids and rows [R, columns].
    """
    entries = reader.entries
    names = [name for name in _ROWS if name in entries]
    if len(names) != 1 or entries.keys() != {"ids", *names}:
        raise ValueError(
            f"{where}: expected tensors 'ids' and 'rows' (or 'weight'), got {sorted(entries)}. "
            "Optimizer state and scores travel in checkpoints."
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
    here: RowsHere, where: str, count: int, read_ids: Callable[[int, int], Tensor]
) -> None:
    """Raises RuntimeError on every rank if the ids of a file do not fit beside those of some rank."""
    tight = [one for one in here.shards[:1] if one.num_rows + count > one.row_limit]
    if not any(agree(here.group, where, value=bool(tight))):
        return
    absent = []
    for first, last in _chunks(count, 8):
        ids = torch.empty(last - first, dtype=torch.int64)

        def go_on(ids: Tensor = ids, first: int = first, last: int = last) -> None:
            ids.copy_(read_ids(first, last))

        _first_rank_does(here, where, go_on)
        if here.group is not None:
            dist.broadcast(ids, dist.get_global_rank(here.group, 0), group=here.group)
        mine = here.of(ids)
        absent += [mine[torch.eq(one.id_map.lookup(mine), -1)] for one in here.shards[:1]]

    def check() -> None:
        for one in here.shards[:1]:
            one.check_room(torch.unique(torch.cat(absent)).numel())

    run_together(here.group, where, check)


def _chunks(count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    size = max(1, _CHUNK_BYTES // row_bytes)
    for first in range(0, count, size):
        yield first, min(first + size, count)


def _first_rank_does(here: RowsHere, where: str, work: Callable[[], T]) -> T:
    """Does something on rank 0 and tells all ranks what came of it, errors too."""
    return gather_results(here.group, where, lambda: work() if here.rank == 0 else None)[0]  # type: ignore[return-value]
