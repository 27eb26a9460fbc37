"""Bounds of our additions to a shard on many ranks: bytes between ranks, bytes of metadata, comparisons.

One rank of many is simulated (benchmarks/bench_scale.py), and compared with real ranks.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from garbage import keep_what_exists

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


def benchmark() -> Any:
    """Returns the benchmark's module, and leaves the path and the modules as they were."""
    before = set(sys.modules)
    sys.path.insert(0, BENCHMARKS)
    try:
        return importlib.import_module("bench_scale")
    finally:
        sys.path.remove(BENCHMARKS)
        for name in set(sys.modules) - before:
            if (Path(BENCHMARKS) / f"{name}.py").exists():
                del sys.modules[name]


@pytest.fixture(autouse=True)
def little_garbage() -> None:
    keep_what_exists()  # the benchmark collects garbage beside each phase


def set_up(ranks: int, tables: int, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    found: dict[str, Any] = benchmark().set_up(ranks, tables, folder)
    return found


def test_what_a_shard_adds_is_bounded(tmp_path: Path) -> None:
    """Ten tables: a row-wise one, one on a node, one on two ranks, one on two nodes, six on a rank each."""
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
