"""Lists of names in messages: a model may have a thousand tables, and a message must still be read."""

from __future__ import annotations

from collections.abc import Iterable

_MOST = 8


def listed(names: Iterable[str]) -> str:
    """Returns names as a list in Python; of more than 8, the first 8 and how many there are."""
    names = list(names)
    if len(names) <= _MOST:
        return repr(names)
    return f"{repr(names[:_MOST])[:-1]}, ...] ({len(names):,} names)"
