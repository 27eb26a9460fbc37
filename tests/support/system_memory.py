"""The memory of this process, as the system counts it: of a block, and at most during a call."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True)


def committed_pages(block: Tensor) -> int:
    """Returns how many of the block's pages the system has committed."""
    first = -(-block.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (block.data_ptr() + block.nbytes - first) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    size = ctypes.c_size_t(pages * mmap.PAGESIZE)
    assert _LIBC.mincore(ctypes.c_void_p(first), size, found) == 0, ctypes.get_errno()
    return sum(page & 1 for page in found)


def advice_of(block: Tensor) -> set[str]:
    """Returns the flags of the mapping in which the block begins."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            inside = begin <= block.data_ptr() < end
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("not mapped")


def status(field: str) -> int:
    """Returns a number of /proc/self/status, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def peak_of(do: Callable[[], None]) -> int:
    """Returns the bytes that this process held at the highest point of a call beyond those before it."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    do()
    return status("VmHWM") - before
