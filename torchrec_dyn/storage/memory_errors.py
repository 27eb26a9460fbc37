"""Errors that say that there is no memory: they are no sign of damaged files."""

from __future__ import annotations

import torch

# Of torch's allocator of the CPU, whose error has no type of its own.
_TEXT = "can't allocate memory"


def lacks_memory(error: BaseException) -> bool:
    """Returns True if an error says that there is no memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and _TEXT in str(error)
    )
