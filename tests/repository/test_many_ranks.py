"""Bounds of our additions to a shard on many ranks: bytes between ranks, bytes of metadata, comparisons.

One rank of many is simulated (benchmarks/bench_scale.py), and compared with real ranks.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import workers
from garbage import keep_what_exists
from sharded_cases import shard_by_hand
from torchrec.distributed.types import ShardingPlan

from torchrec_dyn.planner import load_by_rank
from torchrec_dyn.ranks import TableLayout, id_exchange
from torchrec_dyn.ranks.layout import Piece

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


class Counted(int):
    """A number that counts how often it and its like are compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


def load(ranks: int) -> Callable[[], Any]:
    """Returns a call that computes the load of each rank under a row-wise plan of one table."""
    table = shard_by_hand("row_wise", [(list(range(ranks)), 0, 8)], rows=10 * ranks)
    for shard in table.sharding_spec.shards:  # type: ignore[union-attr]
        shard.shard_offsets = [Counted(one) for one in shard.shard_offsets]
        shard.shard_sizes = [Counted(one) for one in shard.shard_sizes]
    plan = ShardingPlan({"": {"t": table}})  # type: ignore[dict-item]
    names = ("rows", "waiting", "ids_seen", "forwards", "features", "ranks", "bytes")
    return lambda: load_by_rank(plan, {"t": dict.fromkeys(names, 1)}, ranks)


def send_ids(ranks: int) -> Callable[[], Any]:
    """Returns a call that sends ids to the owners of a row-wise table, of which other ranks send the same."""
    layout = TableLayout((Piece(0, 8, tuple(map(Counted, range(ranks)))),), True)
    ids = torch.arange(10)

    def send() -> None:
        with (
            mock.patch.object(id_exchange.dist, "get_rank", return_value=0),
            mock.patch.object(id_exchange.dist, "get_world_size", return_value=ranks),
            mock.patch.object(id_exchange, "gather_results", lambda *one: [one[-1]()] * ranks),
            mock.patch.object(id_exchange, "run_together", lambda *one: one[-1]()),
            mock.patch.object(id_exchange, "exchange", lambda group, call, make, *sizes: make()),
        ):
            cpu, group = torch.device("cpu"), mock.Mock()
            sent = id_exchange.IdExchange("", lambda: ids, layout, group, cpu)
            sent.return_numbers(lambda: ids)

    return send


@pytest.mark.parametrize("work", [load, send_ids])
def test_work_grows_with_the_ranks_not_with_their_square(
    work: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 500
    call = work(ranks)
    monkeypatch.setattr(Counted, "comparisons", 0)
    call()
    assert Counted.comparisons < 10 * ranks
