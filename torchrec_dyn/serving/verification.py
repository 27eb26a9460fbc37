"""Verifies served tables against their checksums: at once, or beside serving at a given rate.

Files are read by plain reads: a disk that fails is an OSError, where a mapped page would end the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    SUMMED_BYTES,
    FileSums,
    Pace,
    add_sums,
    chunk_sum,
    content_sum,
    naming,
    sums_of,
)
from torchrec_dyn.serving.checksums import read_checksums, without_checksums, write_checksums
from torchrec_dyn.serving.files import extend, mapped, only_writer
from torchrec_dyn.serving.id_maps import SLOT_BYTES, ServedMap, maps_of
from torchrec_dyn.serving.manifest import (
    MANIFEST,
    SLOTS,
    Manifest,
    current_generation,
    read_manifest,
    with_current,
)
from torchrec_dyn.serving.tensor_index import TENSORS, check_index, write_index
from torchrec_dyn.serving.update import check_map


class Verified(NamedTuple):
    """The result of a verification of a generation."""

    generation: str
    bytes: int
    rows: dict[str, FileSums]  # the sums of its rows file, by the file's name


def verify(folder: str | os.PathLike[str], bytes_per_second: float | None = None) -> int:
    """Reads all files of the served generation and checks them against their checksums.

    It may run beside serving and beside `apply_delta`, in a thread or in another process. It verifies the
    generation that was current when it began.

    Args:
        folder: directory that `build` made.
        bytes_per_second: most bytes that are read a second; None: no limit.

    Returns:
        The number of bytes that were read and checked.

    Raises:
        ValueError: if a file is damaged; the message names the file and the bytes. Also if the directory has
            no checksums, because an older version made it.
        OSError: if a file cannot be read.
    """
    path, pace = Path(folder), Pace(bytes_per_second)
    return with_current(path, lambda name: verify_generation(path, name, pace)).bytes


def verify_generation(
    folder: Path, generation: str, pace: Pace, known: Mapping[str, FileSums] | None = None
) -> Verified:
    """Verifies one generation.

    `known` are the `rows` of an earlier verification: chunks of the same rows file with the same sums are not
    read again.

    Raises:
        FileNotFoundError: if the generation was removed.
        ValueError: as `verify`.
    """
    manifest, within = read_manifest(folder, generation), folder / generation
    rows = folder / manifest.rows_file
    paths = within / MANIFEST, within / SLOTS, rows
    sums = read_checksums(within, rows.name)
    total, chunk = 0, torch.zeros(SUMMED_BYTES, dtype=torch.uint8, device="cpu")
    with ExitStack() as opened:  # open files can be read to their ends though a delta removes them
        files = {path: opened.enter_context(open(path, "rb", buffering=0)) for path in paths}
        if sums is None:
            raise without_checksums(folder)
        for path, file in files.items():
            length = os.fstat(file.fileno()).st_size
            if path != rows:
                sums.check_length(path, length)
            elif length < manifest.mapped_bytes():
                raise ValueError(
                    f"{path}: expected {manifest.mapped_bytes()} bytes, got {length}: it is truncated. "
                    "Build it again."
                )
        sums.check_length(rows, manifest.rows_bytes)
        sums.check_length(within / SLOTS, manifest.slots * SLOT_BYTES)
        for path, file in files.items():
            before = (known or {}).get(path.name, FileSums()).sums if path == rows else ()
            of_file = sums.files[path.name]
            for number, expected in enumerate(of_file.sums):
                if number < len(before) and before[number] == expected:
                    continue
                size = min(SUMMED_BYTES, of_file.bytes - number * SUMMED_BYTES)
                pace.wait(size)
                _read_into(chunk, file, path, number * SUMMED_BYTES, size)
                sums.check_sum(path, number, chunk_sum(number, chunk))
                total += size
    check_index(folder, generation, manifest)
    return Verified(generation, total, {rows.name: sums.files[rows.name]})


def _read_into(chunk: Tensor, file: FileIO, path: Path, place: int, size: int) -> None:
    """Reads `size` bytes from byte `place` on into a chunk, [SUMMED_BYTES] uint8, and zeros after them."""
    chunk[size:] = 0
    left = chunk[:size].numpy().data
    with naming(path):
        file.seek(place)
        while len(left):
            count = file.readinto(left)
            if not count:
                raise ValueError(
                    f"{path}: expected {size} bytes from byte {place} on, got {size - len(left)}: it is "
                    "truncated. Build it again."
                )
            left = left[count:]


def add_checksums(folder: str | os.PathLike[str]) -> None:
    """Adds what served tables of an older version lack: checksums, the index of tensors, spare bytes.

    Before checksums are added, the ids are checked against the content sums of the saved tables; so are rows
    that were not rounded. Rounded rows cannot be checked: build again where you doubt them.

    Args:
        folder: directory that `build` made.

    Raises:
        ValueError: if the tables are damaged, or another process is applying a delta.
        OSError: if the disk is full, or fails.
    """
    path = Path(folder)
    current_generation(path)  # before the lock, as in apply_delta
    with only_writer(path):
        generation = current_generation(path)
        manifest, within = read_manifest(path, generation), path / generation
        if read_checksums(within, manifest.rows_file) is None:
            _add_sums(path, generation, manifest)
        rows_file = path / manifest.rows_file
        mapped(rows_file, manifest.rows_bytes)  # a truncated file is damaged: zeros would hide it
        extend(rows_file, manifest.file_bytes())
        if not (within / TENSORS).exists():
            write_index(path, generation, manifest)


def _add_sums(path: Path, generation: str, manifest: Manifest) -> None:
    """Checks the contents of a generation, and writes their checksums."""
    within = path / generation
    slots = mapped(within / SLOTS, manifest.slots * SLOT_BYTES, is_whole=True)
    rows = mapped(path / manifest.rows_file, manifest.rows_bytes)
    for name, served in maps_of(slots, manifest.tables).items():
        table = manifest.tables[name]
        check_map(within, name, table, served, len(rows) // manifest.widths()[name])
        _check_contents(within, name, manifest, served, rows)
    text = (within / MANIFEST).read_text()
    write_checksums(within, text, slots, manifest.rows_file, sums_of(rows))


def _check_contents(
    where: Path, name: str, manifest: Manifest, served: ServedMap, rows: Tensor
) -> None:
    """Raises ValueError unless ids, and rows that were not rounded, have the sums of the saved table.

    rows [bytes] uint8 is the rows file.
    """
    table, row_format = manifest.tables[name], manifest.row_format
    width = row_format.row_bytes(table.embedding_dim)
    of_table = rows[: len(rows) // width * width].view(-1, width)
    is_exact = row_format.is_exact_for(table.trained_dtype)
    found = {"ids": 0, **({"weight": 0} if is_exact else {})}
    for ids, numbers, _ in served.pieces(width):
        found = add_sums(found, {"ids": content_sum(name, "ids", ids, ids)})
        if is_exact:
            weight = row_format.as_trained(of_table[numbers], table.trained_dtype)
            found = add_sums(found, {"weight": content_sum(name, "weight", ids, weight)})
    for one, total in found.items():
        if total != table.sums[one]:
            raise ValueError(
                f"{where}: expected {one} of table '{name}' with content sum {table.sums[one]:016x}, got "
                f"{total:016x}. It is damaged. Build it again."
            )
