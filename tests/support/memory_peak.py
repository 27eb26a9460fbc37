"""The most memory that this process holds during a call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path


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
