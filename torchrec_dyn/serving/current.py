"""Reads the current generation while deltas replace and remove generations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torchrec_dyn.serving.manifest import current_generation, without_files

T = TypeVar("T")

_ATTEMPTS = 100


def with_current(folder: Path, read: Callable[[str], T]) -> T:
    """Calls `read` with the name of the current generation, and again if its files were removed meanwhile.

    Args:
        folder: the directory of served tables.
        read: opens the files of a generation; raises FileNotFoundError if one is missing.

    Raises:
        ValueError: if `serving.build` did not make the directory, or files of the current generation are
            missing.
    """
    for _ in range(_ATTEMPTS):
        name = current_generation(folder)
        try:
            return read(name)
        except FileNotFoundError:
            # If the name is no longer current, it was replaced since it was read.
            if current_generation(folder) == name:
                raise without_files(folder, name) from None
    raise ValueError(
        f"{folder}: expected a generation whose files exist until they are opened, got {_ATTEMPTS} whose "
        "files were removed before. Try again when fewer deltas are applied."
    )
