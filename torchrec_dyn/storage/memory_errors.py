"""Errors that say that there is no memory, or no room for rows in files: no sign of damaged files."""

from __future__ import annotations

import errno

import torch

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
