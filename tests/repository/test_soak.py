"""A minute of `make soak`: what is saved and served is what it must be; growing memory is told."""

import random
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

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
def test_memory_that_grows_is_told(megabytes: int) -> None:
    samples, noise = Samples(), random.Random(1)
    for minute in range(50):
        samples.note("one", 60.0 * minute, {"MB": 600 + megabytes * minute + noise.gauss(0, 1)})
    slope = samples.slope("one", "MB", after=-1.0)
    assert slope is not None and slope.minutes == 49
    assert 0.001 < slope.error < 0.1
    assert abs(slope.slope - megabytes) < 3 * slope.error
    assert samples.slope("one", "MB", after=600.0) is None  # too few
    samples.forget("one")
    assert samples.slope("one", "MB", after=-1.0) is None


def test_numbers_of_a_process() -> None:
    """Those of a child that does nothing else: the memory of pytest's own process shrinks when it likes."""
    program = """
import mmap
print("before", flush=True)
input()
pages = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, 64 << 20, 4096):
    pages[at] = 1
file = open("/dev/null")
print("after", flush=True)
input()
"""
    samples = Samples()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdin=PIPE, stdout=PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        for moment, word in enumerate(["before", "after"]):
            assert child.stdout.readline() == word + "\n"
            samples.take("one", child.pid, float(moment))
            child.stdin.write("\n")
            child.stdin.flush()
    taken = {
        what: [number for _, number in samples.taken("one", what)]
        for what in ("MB", "maps", "files")
    }
    assert 63.5 < taken["MB"][1] - taken["MB"][0] < 65
    assert taken["maps"][1] >= taken["maps"][0]
    assert taken["files"][1] == taken["files"][0] + 1
    samples.take("one", child.pid, 2.0)  # it has ended
    assert len(samples.taken("one", "MB")) == 2
