"""A job restored on one rank more or less: each saved row is read once in all, by its owner."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from checkpoint_cases import optimizer_of, quietly
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import Case, Table, shard_by_hand
from sharded_training import collection_of, shard
from shards import deep_but
from torchrec import KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.checkpoint import Checkpoints
from torchrec_dyn.checkpoint_format import SavedTable
from torchrec_dyn.ranks import owners

ROWS, DIM, CHUNK = 24_000, 16, 1 << 14
OF_DELTAS = (range(0, 9_000), range(3_000, 6_000))  # changed ids
ERASED = (range(20_000, 23_000), range(23_000, 23_500))
WAITING = range(50_000, 52_000)
BY_ROW = ("weight", "last_seen", "count", "momentum1")


def model_of(world: int) -> Any:
    life = dyn.DynamicTableConfig(admission=dyn.AdmitAfter(3), eviction=dyn.LeastRecentlyUsed())
    plan = shard_by_hand("row_wise", [(list(range(world)), 0, DIM)], 8 * ROWS)
    table = Table("t", ["f"], plan, DIM, rows=8 * ROWS, config=life)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    case = Case([table], fused_params=fused)
    return shard(case, collection_of(case))


def assign(model: Any, ids: range, version: int) -> None:
    mine = torch.tensor(ids)[dist.get_rank() :: dist.get_world_size()]
    rows = mine[:, None] * 10 + version + torch.arange(DIM) / 16
    dyn.assign_rows(model.module.collection, "t", mine, rows)


def save_chain(path: str, world: int) -> None:
    """A full save and two deltas, with changed, erased and waiting ids, in small chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs, "SAVED_CHUNK_BYTES", CHUNK)
        patch.setattr(knobs, "LAST_CHUNK_BYTES", CHUNK // 16)
        model, rank = model_of(world), dist.get_rank()
        checkpoints = Checkpoints(path, full_every=3)
        assign(model, range(ROWS), 0)
        waiting = torch.tensor(WAITING)[rank::world]
        features = KeyedJaggedTensor(["f"], waiting, lengths=torch.tensor([waiting.numel()]))
        model(features)["f"].sum().backward()
        quietly(checkpoints.save, model, optimizer_of(model), step=0)
        for version, (changed, erased) in enumerate(zip(OF_DELTAS, ERASED, strict=True), 1):
            assign(model, changed, version)
            gone = torch.tensor(erased)[rank::world]
            model.module.collection.table("t").erase(gone)
            quietly(checkpoints.save, model, optimizer_of(model), step=version)
        checkpoints.close()


def restore(path: str, world: int) -> tuple[dict[str, list[tuple[int, int]]], int]:
    """Returns the ranges of rows read here by entry and tensor, and the number of rows held."""
    blocks: dict[str, list[tuple[int, int]]] = defaultdict(list)
    model, real = model_of(world), SavedTable.rows

    def rows(saved: Any, name: str, first: int, last: int, *columns: Any) -> torch.Tensor:
        entry = Path(saved.where.rpartition(" in ")[2]).parent.name
        blocks[f"{entry} {name}"].append((first, last))
        return real(saved, name, first, last, *columns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedTable, "rows", rows)
        checkpoints = Checkpoints(path)
        restored = quietly(checkpoints.restore, model, optimizer_of(model))
        checkpoints.close()
    assert restored is not None and restored.step == len(OF_DELTAS)
    check_rows(model)
    return dict(blocks), model.module.collection.table("t").num_rows


def check_rows(model: Any) -> None:
    table = model.module.collection.table("t")
    ids = table.ids()
    rank, world = dist.get_rank(), dist.get_world_size()
    parts: list[torch.Tensor] = [torch.empty(0)] * world
    dist.all_gather_object(parts, ids[owners(ids, world) == rank])
    kept = sorted({*range(ROWS)} - {i for erased in ERASED for i in erased})
    assert torch.cat(parts).sort().values.tolist() == kept
    version = torch.zeros(ROWS, dtype=torch.int64)
    for number, changed in enumerate(OF_DELTAS, 1):
        version[torch.tensor(changed)] = number
    mine = parts[rank]
    rows, found = table.lookup(mine)
    assert bool(found.all())
    expected = mine[:, None] * 10 + version[mine][:, None] + torch.arange(DIM) / 16
    assert torch.equal(rows, expected.float())
    waits = torch.tensor(WAITING)
    assert bool((dyn.read_counts(model.module.collection, "t", waits) == 1).all())


def check_move(path: Path, before: int, after: int) -> None:
    workers.run(save_chain, str(path), before, world_size=before, timeout=300)
    of_ranks = workers.run(restore, str(path), after, world_size=after, timeout=300)
    erased = sum(map(len, ERASED))
    rows = {"full-00000001": ROWS, "delta-00000002": len(OF_DELTAS[0])}
    rows["delta-00000003"] = len(OF_DELTAS[1])
    for entry, count in rows.items():
        for name in BY_ROW:
            read = sorted(block for blocks, _ in of_ranks for block in blocks[f"{entry} {name}"])
            assert all(end <= begin for (_, end), (begin, _) in pairwise(read)), (entry, name)
            assert 0 < read[-1][1] <= count, (entry, name)
    for blocks, held in of_ranks:
        share = sum(end - begin for begin, end in blocks["full-00000001 weight"])
        assert share < 1.2 * ROWS / after
        assert 0.8 < held / (ROWS - erased) * after < 1.2


@pytest.mark.parametrize(("before", "after"), deep_but([(2, 3)], [(2, 3), (3, 2)]))
def test_a_restart_reads_each_row_once(tmp_path: Path, before: int, after: int) -> None:
    check_move(tmp_path, before, after)


@pytest.mark.deep
@pytest.mark.parametrize(("before", "after"), [(8, 9), (9, 8)])
def test_many_ranks(tmp_path: Path, before: int, after: int) -> None:
    check_move(tmp_path, before, after)
