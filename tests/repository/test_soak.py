"""A minute of `make soak`: what is saved and served is what it must be; growing memory is told."""

import random
from pathlib import Path

import pytest
from another_process import run_program
from soak_memory import Samples

SOAK = Path(__file__).parents[1] / "support" / "soak.py"


@pytest.mark.deep
@pytest.mark.parametrize("disk", [[], ["--no-mount"]], ids=["tmpfs", "limited"])
def test_a_minute_of_the_soak(disk: list[str]) -> None:
    run = run_program(SOAK, "--seconds", 60, "--seed", 1, *disk, time_limit=900)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("megabytes", [0, 2])
def test_memory_that_grows_is_told(megabytes: int, tmp_path: Path) -> None:
    samples, noise = Samples(tmp_path), random.Random(1)
    for minute in range(50):
        grown = 600 + megabytes * minute + noise.gauss(0, 1)
        samples.note("one", 60.0 * minute, {"MB in use": grown})
    slope = samples.slope("one", "MB in use", after=-1.0)
    assert slope is not None and slope.minutes == 49
    assert 0.001 < slope.error < 0.1
    assert abs(slope.slope - megabytes) < 3 * slope.error
    assert samples.slope("one", "MB in use", after=600.0) is None  # too few
    samples.forget("one")
    assert samples.slope("one", "MB in use", after=-1.0) is None
