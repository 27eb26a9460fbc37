"""The benchmarks run with tiny sizes, in this process; and what one of them simulates is bounded."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from garbage import keep_what_exists

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
STARTS_PROCESSES = {"bench_checkpoint", "bench_dedup", "bench_gpu_train", "bench_scale"}
STARTS_PROCESSES |= {"bench_serving", "bench_train"}
COMPILES = {"bench_serving_cpp"}
# The others take 4 s of a core together, with these options.
SLOW = {"bench_delta", "bench_eviction", "bench_first", "bench_gpu", "bench_rules"}
OPTIONS = {
    "bench_gpu": ["--device", "cpu"],
    "bench_host_memory": ["--device", "cpu", "--loops", "plain", "--streams", "drift"],
    "bench_host": ["--tables", "1", "--plans", "table_wise"],
    "bench_lookup": ["--only", "pooled-zipf1.05", "half-dim64"],
    "bench_mapped": ["--only", "zipf"],
    "bench_replicas": ["--replicas", "2"],
}
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


def test_what_is_not_run_every_day_can_be_imported() -> None:
    names = STARTS_PROCESSES | COMPILES | SLOW
    assert names < {*NAMES} and all(callable(importlib.import_module(n).main) for n in names)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.deep if name in SLOW else ())
        for name in NAMES
        if name not in STARTS_PROCESSES | COMPILES
    ],
)
@pytest.mark.filterwarnings("ignore:.*expected set_time:UserWarning")
def test_a_benchmark_writes_its_rows(name: str, tmp_path: Path) -> None:
    options = ["--quick", "--rounds", "1", "--threads", "1", "--results", str(tmp_path)]
    importlib.import_module(name).main([*options, *OPTIONS.get(name, [])])
    written = json.loads((tmp_path / f"{name.removeprefix('bench_')}.json").read_text())
    assert written["rows"]


def test_rows_are_counted_on_a_mock_gpu(tmp_path: Path) -> None:
    options = ["--device", "mock", "--quick", "--rounds", "2", "--results", str(tmp_path)]
    importlib.import_module("bench_host_memory").main([*options, "--streams", "drift"])
    rows = json.loads((tmp_path / "host_memory.json").read_text())["rows"]
    assert [row["different"] for row in rows if row["what"] == "bits"] == [0, 0]
    crossed = {row["part"]: row["bytes_an_id"] for row in rows if row["what"] == "step"}
    assert crossed["in GPU"] == crossed["1/1"] == 0 < crossed["1/4"] < crossed["1/10"]


def set_up(ranks: int, tables: int, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    found: dict[str, Any] = importlib.import_module("bench_scale").set_up(ranks, tables, folder)
    return found


def test_what_a_shard_adds_is_bounded(tmp_path: Path) -> None:
    """Bytes between ranks and of metadata, and agreements, of one rank of many, which is simulated.

    Ten tables: a row-wise one, one on a node, one on two ranks, one on two nodes, six on a rank each.
    """
    less, more = (set_up(ranks, 10, tmp_path / f"{ranks}") for ranks in (16, 256))
    of_more_tables = set_up(16, 20, tmp_path / "more tables")
    assert less["shards"] == 16 + 8 + 2 + 16 + 6 and more["shards"] - less["shards"] == 256 - 16
    # Agreements do not grow with tables or ranks.
    assert {one["agreements"] for one in (less, more, of_more_tables)} == {2}
    # Each further rank has one shard, of the row-wise table.
    shards = more["shards"] - less["shards"]
    added = {name: (more[name] - less[name]) / shards for name in less if "bytes" in name}
    # Of both state dicts, each with the heads of two agreements and a pickle of 10 tables.
    assert (more["received"] - less["received"]) / shards < 1300
    assert added["id_bytes"] < 700  # of ids, last_seen, count and waiting
    assert added["checksum_bytes"] < 600  # a row in each of the two checksums
    # DCP's own entries of a weight and an optimizer state are about 400 bytes.
    assert added["metadata_bytes"] < 1200
