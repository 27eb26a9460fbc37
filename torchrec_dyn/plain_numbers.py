"""Numbers of other libraries, as numpy's, become Python's: values with them print, compare and save alike."""

from __future__ import annotations

from dataclasses import fields
from numbers import Integral, Real
from typing import Any


def make_numbers_plain(value: Any) -> None:
    """Replaces the numbers in the fields of a frozen dataclass by equal numbers of Python."""
    for field in fields(value):
        number = getattr(value, field.name)
        if isinstance(number, Real) and type(number) not in (bool, int, float):
            plain = int(number) if isinstance(number, Integral) else float(number)
            object.__setattr__(value, field.name, plain)
