"""A minute of `make soak`: what is served is what a model without faults has."""

from pathlib import Path

import pytest
from another_process import run_program

SOAK = Path(__file__).parents[1] / "support" / "soak.py"


@pytest.mark.deep
def test_a_minute_of_the_soak() -> None:
    run = run_program(SOAK, "--seconds", 60, "--seed", 1, time_limit=900)
    assert run.returncode == 0, run.stdout + run.stderr
