"""What a program needs that a test starts in a process of its own."""

from __future__ import annotations

import os
import sys


def environment(**more: str) -> dict[str, str]:
    """The environment of a process that imports what this one can: support files, and tests."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}
