"""The contestants of training end to end: one small click model over sharded tables of several kinds.

All sides start with equal rows and the same dense part and train on the same clicks, so their losses agree,
but for the floor: its rows do not change (free_lookups.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from axes import Workload, ranks
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from free_lookups import make_lookups_free
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

import torchrec_dyn as dyn

PLANS = ("table_wise", "row_wise", "column_wise")
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 1e-8}
FIRST_VALUE = 0.01  # initial value of every row, so that it does not matter which row an id gets
FLOOR_ROWS = 1_000  # a table of the floor; ids are scaled, so that their owners are the same
MCH_INTERVAL = 10  # steps between two evictions of managed collision
CPU = torch.device("cpu")
PIPELINES: dict[str, Any] = {
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
}
DYNAMIC = {  # a table has twice as many rows as ids, so no id is evicted
    "dynamic": dyn.DynamicTableConfig(initializer=dyn.Constant(FIRST_VALUE)),
    "policies": dyn.DynamicTableConfig(
        initializer=dyn.Constant(FIRST_VALUE), eviction=dyn.LeastRecentlyUsed()
    ),
}


@dataclass(frozen=True)
class Setting:
    """Where and how the models of all sides are sharded and trained.

    Attributes:
        plan: one of PLANS.
        device: device of this rank.
        pipeline: a name of PIPELINES.
    """

    plan: str
    device: torch.device = CPU
    pipeline: str = "sparse_dist"


@dataclass
class Clicks(Pipelineable):
    """A batch: features [F, B], labels [B]."""

    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Clicks:
        """Returns the batch on the device."""
        labels = self.labels.to(device, non_blocking=non_blocking)
        return Clicks(self.features.to(device, non_blocking), labels)

    def record_stream(self, stream: Any) -> None:
        """Keeps the memory of the batch until a stream of a GPU has read it."""
        self.features.record_stream(stream)
        if self.labels.is_cuda:
            self.labels.record_stream(stream)

    def pin_memory(self) -> Clicks:
        """Returns the batch in pinned memory, which is copied to a GPU beside other work."""
        return Clicks(self.features.pin_memory(), self.labels.pin_memory())


class Head(nn.Module):
    """The dense part, kept small: one hidden layer and the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, pooled: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss for pooled rows [B, width]."""
        logits = self.last(torch.tanh(self.hidden(pooled))).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


class ClickModel(nn.Module):
    """One collection and the head. The head gets the means of sequences."""

    def __init__(self, sparse: nn.Module, workload: Workload) -> None:
        super().__init__()
        self.sparse = sparse
        self._managed = isinstance(sparse, ManagedCollisionEmbeddingBagCollection)
        self._sequences = [] if workload.pooled else [f"f{t}" for t in range(workload.tables)]
        self._shape = (-1, workload.bag, workload.dim)
        self.head = Head(workload.tables * workload.dim)

    def forward(self, batch: Clicks) -> tuple[Tensor, Tensor]:
        """Returns the loss twice: for the backward, and detached as the output of a pipeline."""
        rows = self.sparse(batch.features)
        if self._managed:  # managed collision returns the remapped ids too
            rows = rows[0]
        if self._sequences:
            means = [rows[key].values().view(self._shape).mean(1) for key in self._sequences]
            pooled = torch.cat(means, 1)
        else:
            pooled = rows.values()
        loss = self.head(pooled, batch.labels)
        return loss, loss.detach()


def raw_ids(rows: Tensor) -> Tensor:
    """Returns an id for each row number: scattered, and not negative, as managed collision requires."""
    multiplier = 0x9E37_79B9_7F4A_7C15 - 2**64  # odd, so that distinct rows stay distinct
    return ((rows + 1) * multiplier) & (2**63 - 1)


def features(workload: Workload, ids: Tensor, bag: int) -> KeyedJaggedTensor:
    """Returns ids [tables * bags * bag], table-major, in bags of one length."""
    keys = [f"f{t}" for t in range(workload.tables)]
    return KeyedJaggedTensor(keys, ids, lengths=torch.full((ids.numel() // bag,), bag))


def clicks(workload: Workload, side: str, device: torch.device = CPU) -> list[Clicks]:
    """Returns this rank's batches, with the ids of a side: raw ids, or row numbers of static tables.

    The batches are on the host, for a GPU in pinned memory.
    """
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = []
    for rows in ranks(workload, batches=8, seed=dist.get_rank()):
        labels = torch.randint(2, (workload.batch,), generator=generator).float()
        ids = rows * FLOOR_ROWS // workload.rows if side == "floor" else rows
        ids = ids if side in ("static", "floor") else raw_ids(rows)
        batch = Clicks(features(workload, ids, workload.bag), labels)
        batches.append(batch if device.type == "cpu" else batch.pin_memory())
    return batches


class ManagedCollisionOnCpu(MCHManagedCollisionModule):
    """TorchRec's module without the reset of rows that get another id: FBGEMM has no CPU kernel for it.

    No id loses its row in this benchmark, so no row needs a reset. Admission and eviction run as usual.
    """

    def evict(self) -> None:
        """Admits and evicts ids, but returns no rows to reset."""
        super().evict()


def _configs(workload: Workload, rows: float, **first: float) -> list[Any]:
    return [
        (EmbeddingBagConfig if workload.pooled else EmbeddingConfig)(
            name=f"t{t}",
            embedding_dim=workload.dim,
            num_embeddings=int(rows),
            feature_names=[f"f{t}"],
            **first,
        )
        for t in range(workload.tables)
    ]


def _collection(side: str, workload: Workload, device: torch.device) -> tuple[nn.Module, Any]:
    """Returns the collection of a side and its sharder."""
    meta, fused, pooled = torch.device("meta"), dict(FUSED), workload.pooled
    if side in DYNAMIC:
        configs = _configs(workload, 2.0 * workload.rows)
        kind = dyn.DynamicEmbeddingBagCollection if pooled else dyn.DynamicEmbeddingCollection
        sharder: Any = dyn.DynamicEmbeddingCollectionSharder
        sharder = dyn.DynamicEmbeddingBagCollectionSharder if pooled else sharder
        return kind(configs, device=meta, dynamic=DYNAMIC[side]), sharder(fused_params=fused)
    first = {"weight_init_min": FIRST_VALUE, "weight_init_max": FIRST_VALUE}
    if side != "managed":
        configs = _configs(workload, FLOOR_ROWS if side == "floor" else workload.rows, **first)
        if pooled:
            stock = EmbeddingBagCollectionSharder(fused_params=fused)
            return EmbeddingBagCollection(configs, device=meta), stock
        return EmbeddingCollection(configs, device=meta), EmbeddingCollectionSharder(fused)
    # Some room: ranks get unequal parts of the ids, and the last place of each rank is not for an id.
    configs = _configs(workload, 1.05 * workload.rows, **first)
    managed_module = ManagedCollisionOnCpu if device.type == "cpu" else MCHManagedCollisionModule
    modules = {
        config.name: managed_module(
            zch_size=config.num_embeddings,
            device=device,
            eviction_policy=LFU_EvictionPolicy(),
            eviction_interval=MCH_INTERVAL,
        )
        for config in configs
    }
    managed = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(configs, device=meta), ManagedCollisionCollection(modules, configs)
    )
    stock = EmbeddingBagCollectionSharder(fused_params=fused)
    return managed, ManagedCollisionEmbeddingBagCollectionSharder(ebc_sharder=stock)


def _plan(kind: str, table: int, world: int) -> Any:
    if kind == "table_wise":
        return table_wise(rank=table % world, compute_kernel="fused")
    if kind == "row_wise":
        return row_wise(compute_kernel="fused")
    return column_wise(ranks=list(range(world)), compute_kernel="fused")


def sharded(side: str, workload: Workload, setting: Setting) -> DistributedModelParallel:
    """Returns the sharded model of a side; all ids have rows.

    Args:
        side: "dynamic", "policies", "static", "managed" or "floor".
        workload: the workload.
        setting: plan and device.
    """
    world = dist.get_world_size()
    torch.manual_seed(0)
    collection, sharder = _collection(side, workload, setting.device)
    plan = construct_module_sharding_plan(
        collection,
        {f"t{t}": _plan(setting.plan, t, world) for t in range(workload.tables)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type=setting.device.type,
    )
    whole = ClickModel(collection, workload)
    whole.head.to(setting.device)  # drawn on the CPU, so that it is the same for all devices
    model = DistributedModelParallel(
        whole,
        device=setting.device,
        plan=ShardingPlan({"sparse": plan}),
        sharders=[sharder],
    )
    if side == "floor":
        make_lookups_free(model.module.sparse, FIRST_VALUE)
    elif side != "static":
        _show_all_ids(model, workload, setting.device)
    return model


def _show_all_ids(
    model: DistributedModelParallel, workload: Workload, device: torch.device
) -> None:
    """Inserts every id, by forwards over batches of the usual size.

    Managed collision sizes its history by its first batch and admits at intervals, so the number of batches
    is a multiple of the interval.
    """
    share = workload.batch * workload.bag
    world, rank = dist.get_world_size(), dist.get_rank()
    calls = -(-workload.rows // (share * world))
    calls = -(-calls // MCH_INTERVAL) * MCH_INTERVAL
    with torch.no_grad():
        for call in range(calls):
            rows = (torch.arange(share) + (call * world + rank) * share) % workload.rows
            ids = raw_ids(rows).repeat(workload.tables)
            batch = features(workload, ids, workload.bag).to(device)
            rows_of_ids = model.module.sparse(batch)
            (rows_of_ids[0] if isinstance(rows_of_ids, tuple) else rows_of_ids).values()


class Stream:
    """An endless iterator over batches, which may be replaced. A pipeline reads some prefetched steps.

    Attributes:
        batches: the batches.
    """

    def __init__(self) -> None:
        self.batches: list[Clicks] = []
        self._read = 0

    def __iter__(self) -> Iterator[Clicks]:
        return self

    def __next__(self) -> Clicks:
        self._read += 1
        return self.batches[self._read % len(self.batches)]


def trainer(
    model: DistributedModelParallel, stream: Stream, setting: Setting
) -> Callable[[], Tensor]:
    """Returns a function over a train pipeline; each call trains one step and returns the loss."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    sgd = KeyedOptimizerWrapper(dense, lambda some: torch.optim.SGD(some, lr=0.01))
    optimizer = CombinedOptimizer([model.fused_optimizer, sgd])
    pipeline = PIPELINES[setting.pipeline](model, optimizer, setting.device)
    return lambda: pipeline.progress(stream)
