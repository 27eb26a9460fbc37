"""Parts of the tests: everyday or deep, and the shards of `make test-deep SHARD=3/8`."""

from __future__ import annotations

import argparse
import random
from collections.abc import Container, Iterable
from typing import Any, NamedTuple, TypeVar

import pytest

T = TypeVar("T")


class Shard(NamedTuple):
    """Part `number` of `count` parts, counted from 1."""

    number: int
    count: int


def read_shard(text: str) -> Shard:
    """Returns the shard that a text like "3/8" names."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"--shard: expected K/N with 1 <= K <= N, got {text!r}.")
    return Shard(int(number), int(count))


def part_of(tests: list[T], shard: Shard) -> list[T]:
    """Returns every `count`-th test: neighbouring tests usually take equally long, so parts do too."""
    return tests[shard.number - 1 :: shard.count]


def draw(cases: list[T], count: int, name: str) -> list[T]:
    """Returns `count` of the cases of a test, the same ones each day: their number and its name decide."""
    return random.Random(name).sample(cases, min(count, len(cases)))


def deep_but(everyday: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns cases, each a value or a tuple, as parameters of a test; those not of every day are deep."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in everyday else pytest.mark.deep,
        )
        for case in cases
    ]
