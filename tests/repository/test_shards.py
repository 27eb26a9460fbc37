"""Parts of the deep tests, cases of every day, and the time in which a failed one is shrunk."""

import itertools

import pytest
from shards import draw, part_of, read_shard


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


def test_the_same_cases_are_drawn_each_day_from_all_of_a_test():
    cases = list(range(40))
    drawn = draw(cases, 6, "tests/a.py::test_b")
    assert len(set(drawn)) == 6 and drawn == draw(cases, 6, "tests/a.py::test_b")
    assert set(itertools.chain(*(draw(cases, 6, str(name)) for name in range(99)))) == set(cases)
    assert sorted(draw(cases, 50, "few")) == cases
