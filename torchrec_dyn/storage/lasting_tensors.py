"""Marks the functions that make tensors which outlive the call of a user."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def lasting(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns a function whose tensors may be written at any time, whatever the mode of the caller.

    A tensor that is made in `torch.inference_mode` can never be written outside of it, and the first forward,
    or a load, may be in this mode. Later steps write blocks, marks and counters. Tensors that are only read,
    or replaced as a whole, may be of any mode.
    """
    return torch.inference_mode(False)(make)
