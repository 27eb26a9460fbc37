"""Tests that do not run today are counted by their reason, in one line; alone, they are skipped."""

import re
import sys
from pathlib import Path

import pytest
from forked import run_ranks

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import gc

import pytest


@pytest.mark.deep
@pytest.mark.parametrize("number", range(3))
def test_a_soak(number):
    raise AssertionError


def test_of_every_day():
    assert gc.isenabled() and gc.get_freeze_count() > 10_000, "modules are collected again and again"
"""


def run_tests(arguments: list[str]) -> None:
    """Runs tests of another folder with our conftest.py."""
    sys.path.insert(0, str(ROOT / "tests"))
    settings = ["-c", str(ROOT / "pyproject.toml"), "-p", "conftest", "-p", "no:cacheprovider"]
    raise SystemExit(int(pytest.main([*settings, *arguments])))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "1 passed, 3 deselected"),
        (["-k", "soak"], "3 skipped"),
        # The counts come from processes that import torch, 3 s each.
        pytest.param(["-n", "1"], "1 passed", marks=pytest.mark.deep),
    ],
)
def test_who_does_not_run_is_counted(tmp_path, more, told):
    (tmp_path / "test_few.py").write_text(TESTS)
    ended = run_ranks(run_tests, ["--rootdir", str(tmp_path), str(tmp_path), *more])
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert told in ended.stdout.splitlines()[-1]
    counted = re.findall(r"^(.+) tests not run: a soak: make test-deep$", ended.stdout, re.M)
    assert counted == ([] if "soak" in more else ["3"])
