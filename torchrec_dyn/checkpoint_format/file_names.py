"""The check of a file's name that was read from another file, before the name becomes a path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def file_inside(folder: Path, name: Any, remedy: str, pattern: str = r"[^\0]+") -> Path:
    """Returns the path of a file of a directory, also of a file in a directory below.

    `name` is as read, of any type. The pattern is for the whole name, `remedy` is the end of the message.

    Raises:
        ValueError: if the name is not a string of this pattern, or its path leads out of the directory.
    """
    is_name = isinstance(name, str) and re.fullmatch(pattern, name)
    parts = Path(name).parts if is_name else ()
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise ValueError(
            f"{folder}: expected the name of a file inside the directory, got {name!r:.100}. {remedy}"
        )
    return folder / name
