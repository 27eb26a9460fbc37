"""Memory of blocks that is mapped from scratch files (docs/decisions/0043).

A file has no name from its first moment on (O_TMPFILE), so nobody can truncate it, and it is gone with its
process. Its space on the disk is taken before it is mapped: a write to a page can not find the disk full.
Where a file system takes space anew for each write (btrfs), or is on another machine (NFS), this does not
hold.
"""

from __future__ import annotations

import errno
import os

import torch
from torch import Tensor

from torchrec_dyn.storage.page_advice import advise_random

# By the names that /proc/self/mountinfo has for them.
_FILE_SYSTEMS = ("ext4", "xfs", "tmpfs")
# The directory is gone, or this process may not make files in it.
_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


def check_directory(where: str, directory: str) -> None:
    """Raises ValueError unless blocks can be mapped from files in this directory."""
    if os.path.isdir(directory):
        file_system = _file_system(directory)
        if file_system not in _FILE_SYSTEMS:
            raise ValueError(
                f"{where}: expected a directory for mapped files on {', '.join(_FILE_SYSTEMS[:-1])} or "
                f"{_FILE_SYSTEMS[-1]}, got {directory!r} on {file_system}. Choose a "
                "directory on a local disk with one of these file systems; in a container, mount one."
            )
    try:
        os.close(_open(directory))
    except OSError as error:
        raise ValueError(
            f"{where}: expected a directory for mapped files in which this process may make files, got "
            f"{directory!r}: {os.strerror(error.errno or errno.EIO)}. Make it, or choose another."
        ) from error


def _open(directory: str) -> int:
    """Opens a new file without a name; O_EXCL: it can never get one."""
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _file_system(directory: str) -> str:
    """Returns the type of the file system of a directory, "an unknown file system" if it is not listed."""
    try:
        device = os.stat(directory).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo") as mounts:
            for mount in mounts:
                mount_fields, _, source_fields = mount.partition(" - ")
                if mount_fields.split()[2] == wanted:
                    return source_fields.split()[0]
    except OSError:
        pass
    return "an unknown file system"


def mapped_block(directory: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns a block of zeros [rows, columns] in a scratch file of its own, which the tensor keeps."""
    size = rows * columns * dtype.itemsize
    try:
        file = _open(directory)
        try:
            os.posix_fallocate(file, 0, size)
            # The path opens the same file again; torch closes it once it is mapped.
            block = torch.from_file(
                f"/proc/self/fd/{file}", shared=True, size=rows * columns, dtype=dtype
            )
        finally:
            os.close(file)
    except OSError as error:
        number = error.errno or errno.EIO
        advice = "Free space on the disk, or raise the limits of the process (ulimit -f, -n)."
        if number in _NO_DIRECTORY:
            advice = "Make the directory again, with the right to make files in it."
        raise OSError(
            number,
            f"RowStore: expected {size} more bytes for rows in {directory!r}, got: "
            f"{os.strerror(number)}. No row has changed. {advice}",
        ) from error
    advise_random(block)  # rows of a batch lie anywhere
    return block.view(rows, columns)
