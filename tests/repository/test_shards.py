"""The parts of the deep tests together are all of them."""

import argparse
import itertools

import pytest
from shards import Shard, part_of, read_shard


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
