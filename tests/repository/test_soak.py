"""A minute of `make soak`: what is saved and served is what it must be; growing memory is told."""

import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE

import pytest
from another_process import environment, run_program
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


def test_numbers_of_a_process(tmp_path: Path) -> None:
    """Those of a child that does nothing else: the memory of pytest's own process shrinks when it likes."""
    program = """
import ctypes, mmap, pathlib, sys
from soak_memory import tell_memory

def say(word):
    tell_memory(pathlib.Path(sys.argv[1]))
    print(word, flush=True)
    input()

malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
say("before")
pages = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, 64 << 20, 4096):
    pages[at] = 1
file = open("/dev/null")
say("mapped")
pieces = [malloc(8 << 10) for _ in range(4 << 10)]
for piece in pieces:
    ctypes.memset(piece, 1, 8 << 10)
ctypes.memset(malloc(16 << 20), 1, 16 << 20)  # a map of its own
say("taken")
for piece in pieces[::2]:
    free(piece)
say("freed")
"""
    samples = Samples(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program, tmp_path],
        stdin=PIPE,
        stdout=PIPE,
        text=True,
        env=environment(),
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        samples.take("one", child.pid, -1.0)
        assert not samples.taken("one", "MB in use")  # it has not told its memory
        for moment, word in enumerate(["before", "mapped", "taken", "freed"]):
            assert child.stdout.readline() == word + "\n"
            samples.take("one", child.pid, float(moment))
            child.stdin.write("\n")
            child.stdin.flush()
    grown = {
        what: [after - before for (_, before), (_, after) in pairwise(samples.taken("one", what))]
        for what in ("MB resident", "MB in use", "MB in malloc", "maps", "files")
    }
    assert grown["files"] == [1, 0, 0]
    assert grown["maps"][0] >= 0
    # Mapped memory is in use, too; the holes of a heap are resident and not in use.
    for what, expected in {
        "MB resident": [64, 48, 0],
        "MB in use": [64, 48, -16],
        "MB in malloc": [0, 48, -16],
    }.items():
        assert grown[what] == pytest.approx(expected, abs=1), what
    samples.take("one", child.pid, 4.0)  # it has ended
    assert len(samples.taken("one", "MB in use")) == 4
