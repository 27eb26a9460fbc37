"""The contestants of bench_checkpoint.py: dynamic tables, TorchRec's static tables, and plain tensors.

All hold the same number of rows of 64 columns with one number of optimizer state per row. Dynamic tables
and plain tensors also have an id of 8 bytes per row. Each side returns the time of every part of a save and
a load. Right before every part, outside its time, the memory that it will need (tables, page cache) is
touched: otherwise the part pays for what the host of a virtual machine takes to back it (bench_growth.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench_growth import touch_memory
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn
from torchrec_dyn.checkpoint import LoadPlanner, TableWriter
from torchrec_dyn.ops import mix64

DIM = 64
ROW_BYTES = 4 * DIM + 4  # weights and the one number of row-wise Adagrad
ID_BYTES = 8
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02}


class Spent(NamedTuple):
    """Seconds: wall time of the slowest rank, and CPU time summed over ranks."""

    wall: float
    cpu: float


Parts = dict[str, Spent]


class Side(Protocol):
    """Contents that can be saved to a folder and loaded from it.

    Attributes:
        bytes: saved bytes, all ranks together.
    """

    bytes: int

    def save(self, folder: Path, is_synced: bool) -> Parts:
        """Saves to the folder; with `is_synced` the bytes are on the disk afterwards. Collective."""

    def load(self, folder: Path) -> Parts:
        """Loads the saved contents from the folder. Collective."""


@contextmanager
def timed(parts: Parts, name: str, size: int) -> Iterator[None]:
    """Measures the body and stores its time as `parts[name]`. Collective.

    Args:
        parts: times by part.
        name: name of the part.
        size: bytes of fresh memory that the part needs at most, all ranks together.
    """
    if dist.get_rank() == 0:  # for all ranks: what one rank has freed would serve the others, too
        touch_memory(size)
    dist.barrier()
    begin, processor = time.perf_counter(), time.process_time()
    yield
    cpu = torch.tensor(time.process_time() - processor, dtype=torch.float64)
    dist.all_reduce(cpu)
    parts[name] = Spent(time.perf_counter() - begin, float(cpu))


def config(rows: int) -> EmbeddingBagConfig:
    """Returns the config of a table with limit `rows`."""
    return EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=rows, feature_names=["f"])


def sharded(collection: nn.Module, sharder: Any) -> DistributedModelParallel:
    """Returns the collection sharded row-wise over the ranks."""
    ranks = dist.get_world_size()
    plan = construct_module_sharding_plan(
        collection,
        {"t": row_wise(compute_kernel="fused")},
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type="cpu",
    )
    model = nn.Sequential(collection)
    cpu = torch.device("cpu")
    return DistributedModelParallel(
        model, plan=ShardingPlan({"0": plan}), sharders=[sharder], device=cpu
    )


class Saved:
    """A sharded model, saved and loaded by torch.distributed.checkpoint.

    Args:
        model: the model.
        row_bytes: bytes of a saved row.
        rows: number of rows, all ranks together.
        writer: class of the writer.
        planner: function of the folder that returns the load planner; None: DCP's default.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        row_bytes: int,
        rows: int,
        writer: Any = dcp.FileSystemWriter,
        planner: Any = None,
    ) -> None:
        self.model = model
        self.bytes = row_bytes * rows
        self._writer = writer
        self._planner = planner

    def state(self) -> dict[str, Any]:
        """Returns the state dicts to save. Collective."""
        optimizer = self.model.fused_optimizer.state_dict()
        return {"model": self.model.state_dict(), "optimizer": optimizer}

    def take(self, state: dict[str, Any]) -> None:
        """Loads state dicts into the model and its optimizer. Collective."""
        self.model.load_state_dict(state["model"])
        self.model.fused_optimizer.load_state_dict(state["optimizer"])

    def save(self, folder: Path, is_synced: bool) -> Parts:
        """Saves as a training job does. Collective."""
        parts: Parts = {}
        with timed(parts, "state_dict", self.bytes // 4):
            state = self.state()
        with timed(parts, "dcp.save", 2 * self.bytes):
            writer = self._writer(folder, sync_files=is_synced)
            dcp.save(state, storage_writer=writer)
        return parts

    def load(self, folder: Path) -> Parts:
        """Loads as a training job does. Collective."""
        parts: Parts = {}
        with timed(parts, "state_dict", self.bytes // 4):
            state = self.state()
        with timed(parts, "dcp.load", 2 * self.bytes):
            dcp.load(state, checkpoint_id=folder, planner=self._planner and self._planner(folder))
        with timed(parts, "load_state_dict", self.bytes // 4):
            self.take(state)
        return parts


class Plain:
    """The same bytes as plain tensors: each rank holds a share and saves it in a separate file.

    Args:
        rows: number of rows, all ranks together.
    """

    def __init__(self, rows: int) -> None:
        mine = rows // dist.get_world_size()
        self.bytes = (ROW_BYTES + ID_BYTES) * rows
        self._state = {
            "weight": torch.rand(mine, DIM),
            "ids": mix64(torch.arange(mine)),
            "momentum1": torch.rand(mine, 1),
        }

    def save(self, folder: Path, is_synced: bool) -> Parts:
        """Saves with torch.save, which does not sync by itself. Collective."""
        parts: Parts = {}
        with timed(parts, "torch.save", 2 * self.bytes):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{dist.get_rank()}.pt").open("wb") as file:
                torch.save(self._state, file)
                if is_synced:
                    file.flush()
                    os.fsync(file.fileno())
        return parts

    def load(self, folder: Path) -> Parts:
        """Loads into new tensors with torch.load. Collective."""
        parts: Parts = {}
        with timed(parts, "torch.load", 2 * self.bytes):
            self._state = torch.load(folder / f"{dist.get_rank()}.pt")
        return parts


def empty_dynamic(rows: int) -> Saved:
    """Returns a dynamic table without rows."""
    model = sharded(
        dyn.DynamicEmbeddingBagCollection([config(2 * rows)], device=torch.device("meta")),
        dyn.DynamicEmbeddingBagCollectionSharder(fused_params=FUSED),
    )
    row_bytes = ROW_BYTES + ID_BYTES
    return Saved(model, row_bytes, rows, TableWriter, lambda folder: LoadPlanner(path=folder))


def dynamic(rows: int) -> Saved:
    """Returns a dynamic table with `rows` rows."""
    side = empty_dynamic(rows)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    step = 1 << 20
    with torch.no_grad():
        for begin in range(0, rows, step * ranks):
            # One bag per rank: the ids get their rows, and the output is only one row.
            some = torch.arange(begin + rank, min(rows, begin + step * ranks), ranks)
            side.model(KeyedJaggedTensor(["f"], mix64(some), lengths=torch.tensor([some.numel()])))
    return side


def static(rows: int) -> Saved:
    """Returns TorchRec's static table with `rows` rows, all of them written."""
    collection = EmbeddingBagCollection(tables=[config(rows)], device=torch.device("meta"))
    model = sharded(collection, EmbeddingBagCollectionSharder(fused_params=FUSED))
    with torch.no_grad():
        for _, weights in model.named_parameters():
            weights.uniform_(-0.001, 0.001)
    for _, state in model.fused_optimizer.state_dict()["state"].items():
        for one in state.values():
            for shard in one.local_shards():
                shard.tensor.fill_(0.5)
    return Saved(model, ROW_BYTES, rows)


SIDES = {"dynamic": dynamic, "static": static, "torch.save": Plain}
