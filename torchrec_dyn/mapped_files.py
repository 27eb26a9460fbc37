"""MappedFiles: rows of a table in files on a fast disk, for tables larger than memory."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class MappedFiles:
    """Storage of a table on the CPU: its rows and optimizer state are in scratch files, mapped into memory.

    The operating system reads a page when a row in it is used, and writes it back; memory is its cache. The
    id map, scores and counters stay in memory. Numbers, policies and checkpoints are those of a table in
    memory. The files have no name: whatever ends the process, nothing is left on the disk.

    A disk that fails while a page is read ends the process by the signal SIGBUS, as bad memory would.

    Attributes:
        directory: an existing directory on ext4, xfs or tmpfs, the same path on each rank. Several ranks and
            tables may share it. It is not saved in checkpoints.
    """

    directory: str

    def __post_init__(self) -> None:
        where = "MappedFiles.directory"
        given = self.directory
        if isinstance(given, os.PathLike):
            object.__setattr__(self, "directory", os.fspath(given))
        if not isinstance(self.directory, str) or not os.path.isabs(self.directory):
            raise ValueError(
                f"{where}: expected the absolute path of a directory, got {given!r}. "
                "Give a directory on a local disk, such as '/mnt/nvme/scratch'."
            )
