"""The benchmarks still run with tiny sizes, in this process, into a folder of the test's own."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from garbage import keep_what_exists

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder on the path, and this process as it was afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before, threads = set(sys.modules), torch.get_num_threads()
    keep_what_exists()  # benchmarks collect garbage before each measurement
    yield
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if (BENCHMARKS / f"{name}.py").exists():
            del sys.modules[name]


def test_every_benchmark_can_be_imported() -> None:
    assert len(NAMES) > 10
    assert all(callable(importlib.import_module(name).main) for name in NAMES)
