"""Advice to Linux about the pages of memory. Advice only: where the system refuses, nothing changes."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

# Huge pages of x86-64, and of ARM with pages of 4 KiB.
HUGE_PAGE_BYTES = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_RANDOM, _SMALL, _HUGE = (
    getattr(mmap, f"MADV_{name}", None) for name in ("RANDOM", "NOHUGEPAGE", "HUGEPAGE")
)
# Python has no name for MADV_COLLAPSE of madvise(2).
_COLLAPSE = 25 if sys.platform == "linux" else None


def _advise(memory: Tensor, size: int, *advices: int | None) -> None:
    """Gives advices for the first `size` bytes; None: one that this system does not have."""
    for advice in advices:
        if advice is not None:
            _libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), advice)


def advise_random(memory: Tensor) -> None:
    """Advises to read one page at a fault in memory [rows, columns] of a file, not the megabytes after it."""
    _advise(memory, memory.nbytes, _RANDOM)


def advise_small_pages(memory: Tensor) -> None:
    """Advises to take small pages for the first 2 MiB of memory [rows, columns]."""
    _advise(memory, HUGE_PAGE_BYTES, _SMALL)


def advise_huge_pages(memory: Tensor) -> None:
    """Advises to join small pages of the first 2 MiB of memory [rows, columns]: at once from Linux 6.1 on."""
    _advise(memory, HUGE_PAGE_BYTES, _HUGE, _COLLAPSE)
