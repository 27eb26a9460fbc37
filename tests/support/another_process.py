"""Environment of a program that a test starts in a separate process."""

from __future__ import annotations

import os
import sys


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a process that can import what this process can, tests included."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}
