"""Parts of the deep tests, cases of every day, and the time in which a failed one is shrunk."""

import argparse
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine
from shards import Shard, draw, part_of, read_shard


def parts_of(tests, count):
    return [
        part_of(tests, read_shard(f"{k}/{count}"), lambda test: test[0])
        for k in range(1, count + 1)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 20])
def test_each_case_is_in_one_part_and_those_of_a_test_are_dealt_out_evenly(count):
    tests = [(name, case) for name in "abcdefgh" for case in range(17)]
    parts = parts_of(tests, count)
    assert sorted(itertools.chain(*parts)) == tests
    for name in "abcdefgh":
        sizes = [sum(test[0] == name for test in part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_other_tests_move_no_case_to_another_part_and_first_cases_are_in_any():
    tests = [(f"test {name}", case) for name in range(50) for case in range(2)]
    for fewer, all_of_them in zip(parts_of(tests[8:], 5), parts_of(tests, 5), strict=True):
        assert set(fewer) <= set(all_of_them)
    firsts = [sum(case == 0 for _, case in part) for part in parts_of(tests, 5)]
    assert min(firsts) > 3


def test_the_whole_is_the_default():
    assert part_of(["a", "b", "c"], Shard(1, 1), str) == ["a", "b", "c"]


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


def test_each_value_of_each_parameter_is_drawn_while_there_is_room():
    """A kind with one case of many was left out for ever: the name draws the same cases each day."""
    cases = [("common", number) for number in range(30)] + [("rare", 98), ("rarer", 99)]
    for name in map(str, range(50)):
        drawn = draw(cases, 3, name, lambda case: [f"{at}={one}" for at, one in enumerate(case)])
        assert {kind for kind, _ in drawn} == {"common", "rare", "rarer"}


def test_shrinking_ends_after_seconds(monkeypatch):
    """A red test of every day was shrunk for five minutes. Here each call takes a second."""
    clock = itertools.count()
    fake = SimpleNamespace(perf_counter=lambda: next(clock), monotonic=lambda: 0)
    monkeypatch.setattr(engine, "time", fake)
    failed = 0

    @settings(database=None, derandomize=True)
    @given(st.lists(st.integers(), min_size=9))
    def fails(numbers):
        nonlocal failed
        failed += max(numbers) > 99
        assert max(numbers) <= 99

    with pytest.raises(AssertionError):
        fails()
    assert 1 < failed < 30
