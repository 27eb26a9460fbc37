"""A job restored on one rank more or less: each saved row is read once in all, by its owner."""

from __future__ import annotations

from collections import defaultdict
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
from torch.distributed.checkpoint import FileSystemReader
from torchrec import KeyedJaggedTensor

import torchrec_dyn as dyn
from torchrec_dyn import knobs
from torchrec_dyn.checkpoint import Checkpoints
from torchrec_dyn.ranks import owners
from torchrec_dyn.state_dict import row_reads
from torchrec_dyn.state_dict.load_planner import LoadPlanner

ROWS, DIM, CHUNK = 24_000, 16, 1 << 14
OF_DELTAS = (range(0, 9_000), range(3_000, 6_000))  # changed ids
ERASED = (range(20_000, 23_000), range(23_000, 23_500))
WAITING = range(50_000, 52_000)
# Bytes of a row by tensor.
BY_ROW = {
    "ids": 8, "weight": 4 * DIM, "last_seen": 8, "count": 8, "waiting": 24, "momentum1": 4,
}  # fmt: skip
ARCHIVE = 2_000  # most bytes of an archive beside its numbers


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


def restore(path: str, world: int) -> tuple[dict[str, list[tuple[int, ...]]], int, int]:
    """Returns the blocks read here by entry and tensor, the bytes of chunks read, and the rows held."""
    blocks: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    model = model_of(world)
    read, real, real_read = 0, LoadPlanner.resolve_tensor, FileSystemReader.read_data
    real_piece = row_reads._read

    def resolve(planner: Any, item: Any) -> torch.Tensor:
        name = item.dest_index.fqn.rpartition(".")[2]
        if name in BY_ROW:
            at = item.dest_index.offset[0] + item.dest_offsets[0]
            blocks[f"{Path(planner._path).parent.name} {name}"].append((at, at + item.lengths[0]))
        return real(planner, item)

    def read_data(reader: Any, plan: Any, planner: Any) -> Any:
        nonlocal read
        read += sum(reader.storage_data[item.storage_index].length for item in plan.items)
        return real_read(reader, plan, planner)

    def read_piece(piece: Any) -> torch.Tensor:
        nonlocal read
        (_, name, saved, _), row, rows = piece.source, piece.row, piece.rows
        blocks[f"{Path(saved._folder).parent.name} {name}"].append((row, row + rows))
        read += rows * BY_ROW[name]
        return real_piece(piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reads, "_read", read_piece)
        patch.setattr(LoadPlanner, "resolve_tensor", resolve)
        patch.setattr(FileSystemReader, "read_data", read_data)
        checkpoints = Checkpoints(path)
        restored = quietly(checkpoints.restore, model, optimizer_of(model))
        checkpoints.close()
    assert restored is not None and restored.step == len(OF_DELTAS)
    check_rows(model)
    return dict(blocks), read, model.module.collection.table("t").num_rows


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
    rows = {"full-00000001": ROWS, "delta-00000002": len(OF_DELTAS[0])}
    rows["delta-00000003"] = len(OF_DELTAS[1])
    for entry, count in rows.items():
        for name in BY_ROW:
            total = len(WAITING) if name == "waiting" else count
            read = sorted(block for blocks, *_ in of_ranks for block in blocks[f"{entry} {name}"])
            ends = [0, *(end for _, end in read)]
            assert [begin for begin, _ in read] == ends[:-1] and ends[-1] == total, (entry, name)
    for blocks, read, held in of_ranks:
        needed = sum(
            (end - begin) * BY_ROW[key.split()[1]]
            for key, of_key in blocks.items()
            for begin, end in of_key
        )
        items = sum(map(len, blocks.values()))
        # DCP reads whole chunks of waiting ids: one too much at either end. Each is an archive.
        of_waiting = [key for key in blocks if key.endswith(" waiting")]
        assert needed <= read <= needed + 2 * CHUNK * len(of_waiting) + ARCHIVE * (items + 40)
        assert 0.8 < held / (ROWS - 3_500) * after < 1.2


@pytest.mark.parametrize(("before", "after"), deep_but([(2, 3)], [(2, 3), (3, 2)]))
def test_a_restart_reads_each_row_once(tmp_path: Path, before: int, after: int) -> None:
    check_move(tmp_path, before, after)


@pytest.mark.deep
@pytest.mark.parametrize(("before", "after"), [(8, 9), (9, 8)])
def test_many_ranks(tmp_path: Path, before: int, after: int) -> None:
    check_move(tmp_path, before, after)
