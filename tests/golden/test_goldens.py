"""Rows, optimizer state, scores, counts and outputs after fifty steps are as recorded, bit for bit.

They change only with a decision that says why; `make goldens` then records them anew.
"""

import json
from pathlib import Path

import pytest
from golden_runs import FILE, RUNS, differences, results


@pytest.mark.parametrize("name", RUNS)
def test_fifty_steps_are_as_recorded(name: str, tmp_path: Path) -> None:
    expected = json.loads(FILE.read_text())[name]
    assert not differences(results(RUNS[name], tmp_path), expected)
