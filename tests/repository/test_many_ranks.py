"""Bounds of our additions to a shard on many ranks: bytes between ranks, bytes of metadata, comparisons.

One rank of many is simulated (benchmarks/bench_scale.py), and compared with real ranks.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import workers
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


def chunks_in(folder: Path) -> dict[str, Counter[tuple[torch.Size, torch.Size]]]:
    """Returns the offsets and sizes of the chunks of a checkpoint, by key of the tensor."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        key: Counter((one.offsets, one.sizes) for one in of.chunks) for key, of in saved.items()
    }


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


def save_really(tables: int, path: str) -> None:
    benchmark().save_really(tables, path)


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.deep)])
def test_a_simulated_rank_saves_what_real_ranks_save(ranks: int, tmp_path: Path) -> None:
    set_up(ranks, 10, tmp_path / "simulated")
    workers.run(save_really, 10, str(tmp_path / "real"), world_size=ranks, local_size=ranks)
    real, simulated = chunks_in(tmp_path / "real"), chunks_in(tmp_path / "simulated")
    assert real.keys() == simulated.keys()
    for key, chunks in real.items():
        assert simulated[key] == chunks, key
