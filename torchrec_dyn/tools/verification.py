"""Verifies checkpoints, deltas and files of rows for `python -m torchrec_dyn verify`."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, cast

from torchrec_dyn.checkpoint_format import DAMAGED, Pace, open_checkpoint, open_files
from torchrec_dyn.tools.inspection import readable
from torchrec_dyn.tools.safetensors_file import SafetensorsReader


def verify_checkpoint(folder: Path, pace: Pace) -> str:
    """Reads all files of a checkpoint or a delta and checks them.

    Rows of dynamic tables are checked against their content sums, and all else against the CRCs that
    torch.save writes into its archives, unless torch.serialization.set_crc32_options(False) left them out.

    Returns:
        A line that says what was checked.

    Raises:
        ValueError: if the checkpoint is torn or damaged, or the directory is no checkpoint.
        OSError: if a file cannot be read.
    """
    checkpoint = open_checkpoint(folder)
    total = 0
    for table in checkpoint.tables.values():
        row_bytes = table.row_bytes_of(table.row_names)
        table.verify(lambda rows, size=row_bytes: pace.wait(rows * size))  # type: ignore[misc]
        total += table.bytes
    others = unchecked = 0
    _, metadata = open_files(folder)
    summed = {key for table in checkpoint.tables.values() for key in table.row_keys}
    for index, entry in metadata.storage_data.items():
        if index.fqn not in summed:
            pace.wait(entry.length)
            with open(folder / entry.relative_path, "rb", buffering=0) as file:
                part = io.BufferedReader(_Part(file, entry.offset, entry.length))
                where = f"'{index.fqn}' in {folder}"
                unchecked += not _is_checked(where, cast(IO[bytes], part))
            others += 1
            total += entry.length
    kind = "delta" if checkpoint.is_delta else "checkpoint"
    gap = f", but {unchecked} entries have no CRC" if unchecked else ""
    return (
        f"{kind} {folder}: {len(checkpoint.tables)} dynamic tables, {others} other entries, "
        f"{readable(total)} read and checked: no damage{gap}"
    )


class _Part(io.RawIOBase):
    """The bytes [begin, begin + length) of an open file, as a file."""

    def __init__(self, file: io.FileIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._place = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("a place before the begin")
        self._place = start + offset
        return self._place

    def readinto(self, into: Any) -> int:
        self._file.seek(self._begin + self._place)
        left = max(0, self._length - self._place)
        count = self._file.readinto(memoryview(into)[:left]) or 0
        self._place += count
        return count


def _is_checked(where: str, file: IO[bytes]) -> bool:
    """Checks an archive of torch.save by its CRCs; returns False if it was written without."""
    try:
        with zipfile.ZipFile(file) as archive:
            if not any(record.CRC for record in archive.infolist()):
                return False
            damaged = archive.testzip()
    # Damaged bytes of a zip archive may raise any of these.
    except (zipfile.BadZipFile, zlib.error, ValueError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(
            f"{where}: expected an archive of torch.save, got {type(error).__name__}: {error}. {DAMAGED}"
        ) from error
    if damaged is not None:
        raise ValueError(f"{where}: expected the CRC of {damaged}, got another. {DAMAGED}")
    return True


def verify_rows_file(path: Path, pace: Pace) -> str:
    """Reads a file that `export_rows` or `export_saved_rows` wrote with `checksum`, and checks it.

    Returns:
        A line that says what was checked.

    Raises:
        ValueError: if the file is damaged, or was written without `checksum`.
        OSError: if the file cannot be read.
    """
    reader = SafetensorsReader(path)
    try:
        if reader.sum is None:
            raise ValueError(
                f"{path}: expected a file with a checksum, got one without, of which only header and lengths "
                "were checked. Export it with checksum=True."
            )
        reader.verify(pace)
    finally:
        reader.close()
    size = readable(path.stat().st_size)
    return f"file {path}: {', '.join(reader.entries)}, {size} read and checked: no damage"
