"""Bytes of a tensor that are in memory. Linux commits a page when it is first written."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_PAGE = mmap.PAGESIZE


def resident_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's storage whose pages are in memory; all bytes if this is not Linux.

    Args:
        tensor: any tensor on the CPU.

    Source: mincore(2).
    """
    begin, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    if size < _PAGE or not sys.platform.startswith("linux"):
        return size
    first = begin // _PAGE * _PAGE
    pages = -(-(begin + size - first) // _PAGE)
    is_there = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * _PAGE), is_there):
        return size
    # The lowest bit is set if the page is in memory; the other bits are not defined.
    return min(size, sum(byte & 1 for byte in bytes(is_there)) * _PAGE)
