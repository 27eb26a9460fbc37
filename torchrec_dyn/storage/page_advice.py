"""Advice to Linux about the pages of memory. Advice only: where the system refuses, nothing changes."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

# Huge pages of x86-64, and of ARM with pages of 4 KiB.
HUGE_PAGE_BYTES = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def _advise(name: str, memory: Tensor, size: int) -> None:
    """Gives the advice with this name in `mmap` for the first `size` bytes, if the system has it."""
    advice = getattr(mmap, name, None)
    if advice is not None:
        _libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), advice)


def advise_random(memory: Tensor) -> None:
    """Has a fault in memory [rows, columns] of a file read one page, not the megabytes after it."""
    _advise("MADV_RANDOM", memory, memory.nbytes)


def advise_small_pages(memory: Tensor) -> None:
    """Has memory [rows, columns] begin with small pages, taken where they are written: for 2 MiB."""
    _advise("MADV_NOHUGEPAGE", memory, HUGE_PAGE_BYTES)


def advise_huge_pages(memory: Tensor) -> None:
    """Lets the system join the small pages at the begin of memory [rows, columns]."""
    _advise("MADV_HUGEPAGE", memory, HUGE_PAGE_BYTES)
