"""The formulas of benchmarks/scale_formulas.py against small measured cases; the numbers of docs/scale.md."""

from __future__ import annotations

import importlib
import sys
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
from torch.distributed.checkpoint import FileSystemReader
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import Checkpoints
from torchrec_dyn.planner import table_size
from torchrec_dyn.ranks import owners, row_limit
from torchrec_dyn.state_dict import row_reads

ROOT = Path(__file__).resolve().parents[2]
RANKS, ROWS, DIM, BAGS, BAG = 2, 50_000, 64, 128, 5
CHANGED, REMOVED = 20_000, 1_000
KINDS = {"EXACT_ROWWISE_ADAGRAD": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "ADAM": EmbOptimType.ADAM}


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the formulas."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("scale_formulas")
    sys.modules.pop("scale_formulas")


class Sent(TorchDispatchMode):
    """Counts the bytes that collectives of the process group send from this rank to others."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name, rank, ranks = func._opname, dist.get_rank(), dist.get_world_size()
            if name == "alltoall_base_":
                _, given, _, _, splits = args[:5]
                split = splits[rank] if splits else given.shape[0] // ranks
                row = given.nbytes // given.shape[0] if given.shape[0] else 0
                sent = given.nbytes - split * row
            elif name == "_reduce_scatter_base_":  # every other rank gets its part
                sent = args[1].nbytes * (ranks - 1) // ranks
            elif name == "_allgather_base_":  # every other rank gets all
                sent = args[1].nbytes * (ranks - 1)
            else:
                sent = 0
            self.bytes[name] = self.bytes.get(name, 0) + sent
        return func(*args, **(kwargs or {}))


def model_of(kind: str, pooled: bool = True, where: str = "row_wise") -> Any:
    plan = shard_by_hand(where, [(list(range(RANKS)), 0, DIM)], 2 * ROWS)
    case = Case(
        [Table("t", ["f"], plan, DIM, rows=2 * ROWS)],
        pooled=pooled,
        fused_params={"optimizer": KINDS[kind], "learning_rate": 0.1},
    )
    return shard(case, collection_of(case))


def assign(model: Any, ids: range) -> None:
    mine = torch.tensor(ids)[dist.get_rank() :: RANKS]
    dyn.assign_rows(model.module.collection, "t", mine, mine[:, None].expand(-1, DIM).float())


def train(model: Any, pooled: bool) -> dict[str, int]:
    ids = torch.arange(BAGS * BAG) + dist.get_rank()
    batch = KeyedJaggedTensor(["f"], ids, lengths=torch.full((BAGS,), BAG))
    with Sent() as sent:
        out = model(batch)
        out = out.wait() if hasattr(out, "wait") else out
        (out.values() if pooled else out["f"].values()).sum().backward()
    return sent.bytes


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("__*.distcp"))


def measure(kind: str, path: str) -> dict[str, Any]:
    """Returns what a small job holds, sends, writes and reads."""
    found: dict[str, Any] = {"sent": {}}
    for pooled in (True, False):
        found["sent"][pooled] = train(model_of(kind, pooled), pooled)
    model = model_of(kind)
    checkpoints = Checkpoints(path, full_every=2)
    assign(model, range(ROWS))
    full = quietly(checkpoints.save, model, optimizer_of(model), step=0)
    (one,) = model.module.collection._shards._tables["t"]
    found["rows"], found["bytes"] = one.num_rows, one.stats()["bytes"]
    assign(model, range(CHANGED))
    model.module.collection.table("t").erase(
        torch.arange(ROWS - REMOVED, ROWS)[dist.get_rank() :: RANKS]
    )
    delta = quietly(checkpoints.save, model, optimizer_of(model), step=1)
    checkpoints.close()
    found["full"], found["delta"] = on_disk(full.tables), on_disk(delta.tables)
    found["read"] = 0
    real = FileSystemReader.read_data

    def read_data(reader: Any, plan: Any, planner: Any) -> Any:
        found["read"] += sum(reader.storage_data[i.storage_index].length for i in plan.items)
        return real(reader, plan, planner)

    read = row_reads._read

    def read_piece(piece: Any) -> torch.Tensor:
        block = read(piece)
        found["read"] += block.nbytes
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reads, "_read", read_piece)
        patch.setattr(FileSystemReader, "read_data", read_data)
        quietly(Checkpoints(path).restore, model, optimizer_of(model))
    found["left"] = model.module.collection.table("t").num_rows
    moved = shard_by_hand("table_wise", [([1], 0, DIM)], 2 * ROWS)
    fused = {"optimizer": KINDS[kind], "learning_rate": 0.1}
    sharder = dyn.DynamicEmbeddingBagCollectionSharder(fused_params=fused)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with Sent() as sent:
        sharder.reshard(model.module.collection, {"t": moved}, env)
    found["moved"] = sum(sent.bytes.values())
    return found


def within(part: float, measured: float, formula: float) -> None:
    """Fails if a measured number differs from a formula by more than a part of it."""
    error = measured / formula - 1
    assert abs(error) <= part, f"measured {measured:,}, formula {formula:,.0f}, error {error:+.2%}"


@pytest.mark.parametrize("kind", KINDS)
def test_formulas_are_what_a_small_job_does(scale: Any, tmp_path: Path, kind: str) -> None:
    ranks = workers.run(measure, kind, str(tmp_path / "kept"), world_size=RANKS, timeout=200)
    job = scale.Job(ROWS, RANKS, DIM, getattr(scale, kind.split("_")[-1]), BAGS, BAG)
    for rank in ranks:
        # Rows and states to the byte; the id map at most its largest size.
        size = table_size(rank["rows"], DIM, torch.float32, job.optimizer, deltas=True)
        held = rank["rows"] * (job.row_bytes - scale.ID_BYTES)
        assert size.weights + size.optimizer_state == held < rank["bytes"] <= size.total
        within(0.2, rank["bytes"], size.total)
        assert rank["rows"] <= row_limit(ROWS, RANKS) and size.total < scale.memory(job).total
        # A step: ids do not split evenly, all else is exact.
        pooled, sequence = rank["sent"][True], rank["sent"][False]
        sums = scale.wire_pooled(job)
        assert pooled["_reduce_scatter_base_"] == sums["pooled rows"]
        assert pooled["_allgather_base_"] == sums["gradients"]
        within(0.05, pooled["alltoall_base_"], sums["ids and lengths"])
        by_id = scale.wire_sequence(job, BAGS * BAG)
        within(0.05, sequence["alltoall_base_"], sum(by_id.values()))
        # A restore on as many ranks as have saved reads no chunk too much.
        own, _ = scale.restore_bytes(job, RANKS, [CHANGED])
        within(0.03, rank["read"], own)
    within(0.03, ranks[0]["full"], scale.checkpoint_bytes(job))
    within(0.03, ranks[0]["delta"], scale.delta_bytes(job, CHANGED, REMOVED))
    kept = scale.Job(ROWS - REMOVED, RANKS, DIM, job.optimizer)
    moved = scale.replan_bytes(kept, range(RANKS), [1])
    within(0.03, sum(rank["moved"] for rank in ranks), moved)


@pytest.mark.parametrize(("before", "after"), [(8, 9), (9, 8), (2, 3), (64, 64)])
def test_the_moved_part_is_that_of_owners(scale: Any, before: int, after: int) -> None:
    ids = torch.arange(200_000)
    changed = (owners(ids, before) != owners(ids, after)).double().mean()
    assert abs(float(changed) - scale.moved(range(before), range(after))) < 0.005


@pytest.mark.parametrize(("ids", "exponent"), [(100_000, 1.05), (100_000, 0.8), (500, 1.2)])
def test_distinct_ids_of_a_sample(scale: Any, ids: int, exponent: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.arange(1, ids + 1).double() ** -exponent
    drawn = torch.multinomial(weights, 50_000, replacement=True, generator=generator)
    within(0.02, drawn.unique().numel(), scale.distinct(ids, exponent, 50_000))


def test_the_page_has_the_numbers_of_the_formulas(scale: Any) -> None:
    page = (ROOT / "docs/scale.md").read_text().splitlines()
    missing = [line for line in scale.tables() if line not in page]
    assert not missing, "run benchmarks/scale_formulas.py, and put its lines into docs/scale.md"
