"""Verifies checkpoints, deltas and files of rows for `python -m torchrec_dyn verify`."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import IO

from torchrec_dyn.checkpoint_format import DAMAGED, open_checkpoint, open_files
from torchrec_dyn.tools.inspection import readable
from torchrec_dyn.tools.safetensors_rows import FileRows


def verify_checkpoint(folder: Path) -> str:
    """Reads all files of a checkpoint or a delta, checks them, and returns a line that says what was checked.

    Rows of dynamic tables are checked against their content sums, and all else against the CRCs that
    torch.save writes into its archives, unless torch.serialization.set_crc32_options(False) left them out.
    """
    checkpoint = open_checkpoint(folder)
    for table in checkpoint.tables.values():
        table.verify()
    total = sum(table.bytes for table in checkpoint.tables.values())
    summed = {key for table in checkpoint.tables.values() for key in table.row_keys}
    _, metadata = open_files(folder)
    others = {
        index: entry for index, entry in metadata.storage_data.items() if index.fqn not in summed
    }
    unchecked = 0
    for index, entry in others.items():
        path = folder / entry.relative_path
        with open(path, "rb") as file:
            file.seek(entry.offset)
            archive = io.BytesIO(file.read(entry.length))  # DCP loads it whole, too
        unchecked += not _is_checked(f"'{index.fqn}' in {path}", archive)
        total += entry.length
    kind = "delta" if checkpoint.is_delta else "checkpoint"
    gap = f", but {unchecked} entries have no CRC" if unchecked else ""
    return (
        f"{kind} {folder}: {len(checkpoint.tables)} dynamic tables, {len(others)} other entries, "
        f"{readable(total)} read and checked: no damage{gap}"
    )


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


def verify_rows_file(path: Path) -> str:
    """Reads a file of `export_rows`, checks it, and returns a line that says what was checked."""
    rows = FileRows(path)
    try:
        if not rows.sums:
            raise ValueError(
                f"{path}: expected a file with content sums, got one without, of which only header and "
                "lengths were checked. Export it with checksum=True."
            )
        for _ in rows.chunks():
            pass
    finally:
        rows.close()
    size = readable(path.stat().st_size)
    return f"file {path}: {rows.count:,} rows, {size} read and checked: no damage"
