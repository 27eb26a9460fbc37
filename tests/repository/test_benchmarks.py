"""The benchmarks still run with tiny sizes, in this process, into a folder of the test's own."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from garbage import keep_what_exists

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
START_PROCESSES = {
    "bench_train",
    "bench_gpu_train",
    "bench_checkpoint",
    "bench_dedup",
    "bench_scale",
}
COMPILE = {"bench_serving_cpp"}
NAMES = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))
MORE = {"bench_gpu": ["--device", "cpu"], "bench_dedup": ["--only", "uniform"]}


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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "bench_lookup" else pytest.mark.deep)
        for name in NAMES
        if name not in START_PROCESSES | COMPILE | {"bench_serving"}
    ],
)
@pytest.mark.filterwarnings("ignore:.*expected set_time:UserWarning")
def test_a_benchmark_writes_its_rows(name: str, tmp_path: Path) -> None:
    options = ["--quick", "--rounds", "2", "--threads", "1", "--results", str(tmp_path)]
    importlib.import_module(name).main([*options, *MORE.get(name, [])])
    written = json.loads((tmp_path / f"{name.removeprefix('bench_')}.json").read_text())
    assert written["rows"]
    assert all(row["ratio"] > 0 for row in written["rows"] if "ratio" in row)


def test_the_script_for_a_gpu_names_files_that_exist() -> None:
    text = (BENCHMARKS / "gpu_side.sh").read_text()
    named = set(re.findall(r"(?:tests|examples|benchmarks)/[\w/]+(?:\.\w+)?", text))
    assert len(named) > 10
    assert not [name for name in named if not (BENCHMARKS.parent / name).exists()]
