"""Values in nested lists, tuples and dicts; torch's pytree has more kinds, and takes three times as long."""

from collections.abc import Callable
from typing import Any


def leaves_of(value: Any) -> list[Any]:
    """Returns the values, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in leaves_of(one)]
    return [value]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns the same lists, tuples and dicts of the values of a function."""
    if isinstance(value, dict):
        return {key: mapped(function, one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        made = [mapped(function, one) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return function(value)
