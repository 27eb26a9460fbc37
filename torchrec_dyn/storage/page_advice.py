"""Advice to Linux about the pages of memory. Advice only: where the system refuses, nothing changes."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

# Huge pages of x86-64, and of ARM with pages of 4 KiB.
HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # madvise(2); Python has no name for it
_libc = ctypes.CDLL(None, use_errno=True)


def _advise(name: str, memory: Tensor, size: int) -> None:
    """Gives the advice with this name in `mmap` for the first `size` bytes, if the system has it."""
    advice = getattr(mmap, name, None)
    if advice is not None:
        _libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), advice)


def advise_random(memory: Tensor) -> None:
    """Advises to read one page at a fault in memory [rows, columns] of a file, not the megabytes after it."""
    _advise("MADV_RANDOM", memory, memory.nbytes)


def advise_small_pages(memory: Tensor) -> None:
    """Advises to take small pages for the first 2 MiB of memory [rows, columns]."""
    _advise("MADV_NOHUGEPAGE", memory, HUGE_PAGE_BYTES)


def advise_huge_pages(memory: Tensor) -> None:
    """Advises to join small pages of the first 2 MiB of memory [rows, columns]: at once from Linux 6.1 on."""
    _advise("MADV_HUGEPAGE", memory, HUGE_PAGE_BYTES)
    address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(HUGE_PAGE_BYTES)
    if sys.platform == "linux":
        _libc.madvise(address, size, _MADV_COLLAPSE)
