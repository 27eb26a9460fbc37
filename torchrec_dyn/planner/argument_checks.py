"""Checks of arguments of this room that need no model: numbers, of Python or of numpy, and constraints.

Planning happens once and early, so a wrong argument is better refused than priced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from torchrec.distributed.planner import ParameterConstraints


def checked_count(value: object, where: str, least: int, remedy: str) -> int:
    """Returns a number of rows, ids, ranks or samples as an integer of Python."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}: expected an integer, {least} or more, got {value!r}. {remedy}")
    return int(value)


def check_number(value: object, where: str, least: float, remedy: str) -> None:
    """Checks a number that need not be whole."""
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not least <= number < math.inf:
        raise ValueError(
            f"{where}: expected a finite number, {least} or more, got {value!r}. {remedy}"
        )


def checked_constraints(
    given: Mapping[str, ParameterConstraints] | None, where: str
) -> dict[str, ParameterConstraints]:
    """Returns a copy of the constraints by table name; without constraints an empty dict."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{where}: expected a dict of ParameterConstraints by table name, got {given!r}. Write "
            "{name: ParameterConstraints(...)}."
        )
    for name, constraints in given.items():
        if constraints is None:  # no constraints, as in TorchRec
            continue
        if not isinstance(constraints, ParameterConstraints):
            raise ValueError(
                f"{where}['{name}']: expected ParameterConstraints, got {constraints!r}. Write "
                "ParameterConstraints(sharding_types=[...])."
            )
        for field in ("sharding_types", "compute_kernels"):
            choices = getattr(constraints, field)
            if isinstance(choices, str):
                raise ValueError(
                    f"{where}['{name}'].{field}: expected a list, got {choices!r}. Write [{choices!r}]."
                )
    return dict(given)
