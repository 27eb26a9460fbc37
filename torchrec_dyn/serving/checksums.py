"""The checksums of a generation: damaged bytes of its files are seen, and located.

The file checksums.json has the number of bytes in use of each file, and a sum for each chunk of 1 MiB of
these bytes (checkpoint_format/byte_sums.py):

    {"chunk_bytes": 1048576, "files": {"manifest.json": {"bytes": 820, "sums": [1832...]},
     "rows-51ab20fe": {"bytes": 6800, "sums": [944...]}, "slots": {...}}, "format": 1}

Generations of an older version have no such file.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format import (
    SUMMED_BYTES,
    FileSums,
    chunk_sum,
    replace_file,
    sums_of,
)
from torchrec_dyn.serving.manifest import MANIFEST, SLOTS

CHECKSUMS = "checksums.json"
_FORMAT = 1
_DAMAGED = "It is damaged. Build it again."


class Checksums:
    """The sums of the files of one generation, by name."""

    def __init__(self, files: Mapping[str, FileSums]) -> None:
        self.files = dict(files)

    def check(self, path: Path, data: Tensor) -> None:
        """Raises ValueError if the bytes in use of a file, data [bytes] uint8, do not have their sums."""
        self.check_length(path, data.numel())
        for number, total in enumerate(sums_of(data).sums):
            self.check_sum(path, number, total)

    def check_length(self, path: Path, size: int) -> None:
        """Raises ValueError unless a file has `size` bytes in use."""
        if self.files[path.name].bytes != size:
            raise ValueError(
                f"{path}: expected {self.files[path.name].bytes} bytes in use, got {size}. {_DAMAGED}"
            )

    def check_sum(self, path: Path, number: int, got: int) -> None:
        """Raises ValueError if `got` is not the sum of chunk `number` of a file."""
        of_file = self.files[path.name]
        if got != of_file.sums[number]:
            first = number * SUMMED_BYTES
            last = min(first + SUMMED_BYTES, of_file.bytes)
            raise ValueError(
                f"{path}: expected the checksum {of_file.sums[number]:016x} of bytes {first} to {last - 1}, "
                f"got {got:016x}. {_DAMAGED}"
            )


def write_checksums(
    generation: Path, manifest: str, slots: Tensor, rows_file: str, rows: FileSums
) -> None:
    """Writes the checksums of a generation into its directory.

    slots: [bytes] uint8, its id maps; `manifest` is the text of its manifest, `rows` the sums of its rows
    file.
    """
    of_manifest = sums_of(torch.frombuffer(bytearray(manifest.encode()), dtype=torch.uint8))
    files = {MANIFEST: of_manifest, SLOTS: sums_of(slots), rows_file: rows}
    found = {name: {"bytes": one.bytes, "sums": one.sums} for name, one in files.items()}
    text = {"chunk_bytes": SUMMED_BYTES, "files": found, "format": _FORMAT}
    replace_file(generation / CHECKSUMS, json.dumps(text, sort_keys=True).encode())


def read_checksums(generation: Path, rows_file: str) -> Checksums | None:
    """Reads the sums from the directory of a generation; None if it has none.

    Raises:
        ValueError: if the file is damaged.
    """
    path, names = generation / CHECKSUMS, {MANIFEST, SLOTS, rows_file}
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
        if (found["format"], found["chunk_bytes"]) != (_FORMAT, SUMMED_BYTES):
            raise ValueError(f"format {found['format']!r}, this version reads {_FORMAT}")
        files = {name: _file_sums(one) for name, one in found["files"].items()}
        if files.keys() != names:
            raise ValueError(f"sums of {sorted(files)}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected the checksums of {', '.join(sorted(names))}, got {type(error).__name__}: "
            f"{error}. {_DAMAGED}"
        ) from error
    return Checksums(files)


def check_last_chunk(generation: Path, path: Path, rows: Tensor) -> None:
    """Raises ValueError if the last chunk of a rows file does not have its sum.

    It shows an earlier copy of the file, which lacks the rows of the last delta, without a read of all rows.

    rows: [bytes] uint8, the bytes in use of the rows file at `path`. The sum is that in the directory
    `generation`.

    Raises:
        FileNotFoundError: if the generation was removed.
    """
    text = (generation / CHECKSUMS).read_bytes()
    first = (len(rows) - 1) // SUMMED_BYTES * SUMMED_BYTES
    if first < 0:
        return
    # The other sums are not parsed: 100 GB have 100,000.
    end = text.find(b"]", text.find(f'"{path.name}"'.encode()))
    expected = re.search(rb"[0-9]{1,20}$", text[:end][-20:])
    chunk = torch.zeros(SUMMED_BYTES, dtype=torch.uint8, device="cpu")
    chunk[: len(rows) - first] = rows[first:]
    got = chunk_sum(first // SUMMED_BYTES, chunk)
    if expected is None or int(expected[0]) != got:
        raise ValueError(
            f"{path}: expected the checksum of bytes {first} to {len(rows) - 1} in {generation / CHECKSUMS}, "
            f"got {got:016x}. If the file is being copied, wait; else it is damaged. Build it again."
        )


def _file_sums(found: Any) -> FileSums:
    size, sums = found["bytes"], found["sums"]
    if type(size) is not int or size < 0 or len(sums) != -(-size // SUMMED_BYTES):
        raise ValueError(f"{len(sums)} sums of {size!r} bytes")
    if not isinstance(sums, list) or any(type(total) is not int for total in sums):
        raise ValueError("sums that are no integers")
    return FileSums(size, tuple(sums))


def warn_of_no_checksums(folder: Path) -> None:
    """Warns that damage of served tables is not seen."""
    warnings.warn(str(without_checksums(folder)), UserWarning, stacklevel=2)


def without_checksums(folder: Path) -> ValueError:
    """Returns the error of a directory of an older version, which has no checksums."""
    return ValueError(
        f"{folder}: expected checksums, which show damaged bytes, got a directory of an older "
        f"version without them. Run `python -m torchrec_dyn verify --add {folder}`, or build it again."
    )
