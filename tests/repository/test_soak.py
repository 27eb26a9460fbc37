"""A minute of `make soak`: what is saved and served through kills and full disks is what it must be."""

from pathlib import Path

import pytest
from another_process import run_program

SOAK = Path(__file__).parents[1] / "support" / "soak.py"


@pytest.mark.deep
@pytest.mark.parametrize("disk", [[], ["--no-mount"]], ids=["tmpfs", "limited"])
def test_a_minute_of_the_soak(disk: list[str]) -> None:
    run = run_program(SOAK, "--seconds", 60, "--seed", 1, *disk, time_limit=900)
    assert run.returncode == 0, run.stdout + run.stderr
