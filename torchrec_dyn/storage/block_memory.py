"""Memory of blocks of rows: ranges of a GPU's addresses, scratch files, advice about pages.

On a GPU a block lies in a range of addresses and grows in place (docs/dev/decisions/0028). Addresses are
reserved for all rows that a block will ever have, and memory is committed by the page as rows are added. It
is not torch's memory, so memory that torch keeps for later may be missing here.

A scratch file (docs/dev/decisions/0043) has no name from its first moment on (O_TMPFILE), so nobody can
truncate it, and it is gone with its process. Its space on the disk is taken before it is mapped: a write to
a page can not find the disk full. Where a file system takes space anew for each write (btrfs), or is on
another machine (NFS), this does not hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from torchrec_dyn import knobs, ops


def range_shift(row_limit: int, row_bytes: int) -> int:
    """Returns the binary logarithm of the rows of a block: up to the limit, if a range can hold so many."""
    most = max(1, knobs.RANGE_BYTES // max(1, row_bytes))
    return max(4, min((row_limit - 1).bit_length(), most.bit_length() - 1, 31))


def in_range(limit: int, row_bytes: int) -> bool:
    """Returns True if a block of up to `limit` rows has a range of addresses, False if memory of torch's."""
    return limit * row_bytes > knobs.PAGE_BYTES


def most_bytes(rows: int, row_bytes: int, limit: int) -> int:
    """Returns the most bytes that `longer_block` commits for `rows` of `limit` rows, however a block grew."""
    used, whole = rows * row_bytes, limit * row_bytes
    if not in_range(limit, row_bytes) or not rows:
        return whole if rows else 0
    return -(-min(used + _ahead(used), whole) // knobs.PAGE_BYTES) * knobs.PAGE_BYTES


def _ahead(used: int) -> int:
    """Returns the bytes to commit beyond `used` bytes."""
    return min(max(used // 8, knobs.PAGE_BYTES), knobs.AHEAD_BYTES)


def longer_block(block: Tensor, rows: int, limit: int) -> Tensor:
    """Returns block [R, D] of up to `limit` rows with at least `rows`, at the address of one made here."""
    # With a few more rows, so that growth is rare. New rows are not initialised.
    row_bytes = block.shape[1] * block.itemsize
    if not in_range(limit, row_bytes) and len(block) == 0:
        return block.new_empty(limit, block.shape[1])
    needed, ahead = rows * row_bytes, block.nbytes + _ahead(block.nbytes)
    for wanted in ([ahead] if needed < ahead else []) + [needed, needed]:
        pages = -(-wanted // knobs.PAGE_BYTES)
        longest = min(limit, pages * knobs.PAGE_BYTES // row_bytes)
        with contextlib.suppress(MemoryError):
            return ops.grow_block(block, longest, limit)
        if wanted == needed:
            # Memory that torch keeps would serve. It is taken last: torch then has to allocate it again.
            torch.cuda.empty_cache()  # does nothing before CUDA is used
    raise MemoryError(
        f"RowStore: expected {needed - block.nbytes} more bytes of memory on {block.device}, got none; "
        "no row has changed. Free memory, or use smaller tables."
    )


def host_block(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a block [rows, columns] in memory of the host that the GPU `device` reads and writes."""
    nothing = torch.empty(0, columns, dtype=dtype, device=device)
    try:
        return ops.grow_block(nothing, rows, rows, on_host=True)
    except MemoryError:
        raise MemoryError(
            f"RowStore: expected {rows * columns * dtype.itemsize} more bytes of host memory for {device}, "
            "got none; no row has changed. Free memory, let the process lock more memory, or use smaller "
            "tables."
        ) from None


# Huge pages of x86-64, and of ARM with pages of 4 KiB.
HUGE_PAGE_BYTES = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)
# Advices of madvise(2): to read one page at a fault, not the megabytes after it; to take small pages; to take
# huge ones, and to join small ones at once, from Linux 6.1 on (MADV_COLLAPSE). None: the system has none.
RANDOM, SMALL_PAGES, HUGE_PAGES = (
    getattr(mmap, f"MADV_{name}", None) for name in ("RANDOM", "NOHUGEPAGE", "HUGEPAGE")
)
JOIN_PAGES = 25 if sys.platform == "linux" else None


def advise(memory: Tensor, size: int, *advices: int | None) -> None:
    """Gives advices for the first `size` bytes of memory [rows, columns]."""
    for advice in advices:
        if advice is not None:
            _libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), advice)


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
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        for mount in mounts:
            mount_fields, _, source_fields = mount.partition(" - ")
            if mount_fields.split()[2] == wanted:
                return source_fields.split()[0]
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
    advise(block, block.nbytes, RANDOM)  # rows of a batch lie anywhere
    return block.view(rows, columns)


# Of torch's allocator of the CPU, whose error has no type of its own.
_TEXT = "can't allocate memory"
# Of the system, for rows in mapped files, too.
_NUMBERS = {errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}


def lacks_memory(error: BaseException) -> bool:
    """Returns True if an error says that there is no memory, no room on a disk or no file number."""
    if isinstance(error, OSError):
        return error.errno in _NUMBERS
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and _TEXT in str(error)
    )


_P = ParamSpec("_P")
_T = TypeVar("_T")


def lasting(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns a function whose tensors may be written at any time, whatever the mode of the caller.

    A tensor that is made in `torch.inference_mode` can never be written outside of it, and the first forward,
    or a load, may be in this mode, while later steps write blocks, marks and counters.
    """
    return torch.inference_mode(False)(make)
