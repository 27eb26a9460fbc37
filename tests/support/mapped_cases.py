"""Directories for mapped files, and which blocks are mapped from files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from torchrec_dyn import knobs
from torchrec_dyn.storage import block_memory
from torchrec_dyn.table import TableShard

# tmpfs on every Linux.
SHARED_MEMORY = "/dev/shm"


def is_mapped(block: Tensor, directory: str) -> bool:
    """Returns True if a block is memory of a file without a name in a directory."""
    address = block.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, _, end = line.split()[0].partition("-")
            if int(begin, 16) <= address < int(end, 16):
                fields = line.split(None, 5)
                return len(fields) == 6 and (
                    fields[5].startswith(os.path.realpath(directory) + "/#")
                    and fields[5].endswith("(deleted)\n")
                )
    return False


def are_mapped(table: TableShard, directory: str = SHARED_MEMORY) -> bool:
    """Returns True if all rows and states of a table, and some of them, are in mapped files."""
    blocks = [block for store in table.stores for block in store.blocks]
    return bool(blocks) and all(is_mapped(block, directory) for block in blocks)


@contextmanager
def small_files(size: int = 1024) -> Iterator[None]:
    """Gives tables that are made inside many small blocks."""
    with mock.patch.object(knobs, "FILE_BYTES", size):
        yield


@contextmanager
def on_ext4() -> Iterator[str]:
    """Makes a directory on a disk; an empty path if /var/tmp is on none of ours."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield folder if block_memory._file_system(folder) in ("ext4", "xfs") else ""
