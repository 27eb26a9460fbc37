"""The parts of the deep tests together are all of them."""

import argparse
import itertools

import pytest
from shards import Shard, draw, part_of, read_shard


@pytest.mark.parametrize("count", [1, 2, 3, 8, 20])
def test_each_test_is_in_one_part(count):
    tests = list(range(17))
    parts = [part_of(tests, read_shard(f"{k}/{count}")) for k in range(1, count + 1)]
    assert sorted(itertools.chain(*parts)) == tests
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_whole_is_the_default():
    assert part_of([1, 2, 3], Shard(1, 1)) == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "3", "0/8", "9/8", "-1/8", "a/b", "1/2/3"])
def test_other_texts_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected K/N with 1 <= K <= N, got"):
        read_shard(text)


def test_the_same_cases_are_drawn_each_day_from_all_of_a_test():
    cases = list(range(40))
    drawn = draw(cases, 6, "tests/a.py::test_b")
    assert len(set(drawn)) == 6 and drawn == draw(cases, 6, "tests/a.py::test_b")
    assert set(itertools.chain(*(draw(cases, 6, str(name)) for name in range(99)))) == set(cases)
    assert sorted(draw(cases, 50, "few")) == cases
