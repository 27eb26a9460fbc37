"""Parts of the tests: everyday or deep, and the shards of `make test-deep SHARD=3/8`."""

from __future__ import annotations

import argparse
import random
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import count
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


def part_of(tests: list[T], shard: Shard, name_of: Callable[[T], str]) -> list[T]:
    """Returns every `count`-th case of each test: cases of one test usually take equally long.

    `name_of` returns the name of a case's test. The name alone decides in which part the first case is, so
    parts of one day and of the next are together all cases, whatever other tests came and went in between.
    """
    turns: dict[str, Iterator[int]] = {}
    chosen = []
    for test in tests:
        name = name_of(test)
        turn = next(turns.setdefault(name, count(zlib.crc32(name.encode()))))
        if turn % shard.count == shard.number - 1:
            chosen.append(test)
    return chosen


def draw(
    cases: list[T], count: int, name: str, values_of: Callable[[T], Iterable[Any]] = lambda case: ()
) -> list[T]:
    """Returns `count` of the cases of a test, the same ones each day: their number and its name decide.

    Each next case has as many values as possible that no case before it has, so that no kind is left out
    while another is taken twice. `values_of` returns the values of a case's parameters.
    """
    left = random.Random(name).sample(cases, len(cases))
    drawn: list[T] = []
    seen: set[Any] = set()
    while left and len(drawn) < count:
        case = max(left, key=lambda one: len({*values_of(one)} - seen))
        left.remove(case)
        drawn.append(case)
        seen.update(values_of(case))
    return drawn


def deep_but(everyday: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns cases, each a value or a tuple, as parameters of a test; those not of every day are deep."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in everyday else pytest.mark.deep,
        )
        for case in cases
    ]
