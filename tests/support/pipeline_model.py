"""A click model with pooled and sequence collections, and its training batches.

The collections are dynamic, or TorchRec's static collections that start with the same rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from sharded_cases import EXTREME_IDS, Case, Table, usual_plan
from sharded_training import collection_of
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.streamable import Pipelineable

import torchrec_dyn as dyn

FEATURES = ["a", "b", "c", "d"]
ROWS = 1000
DIM = 8
DENSE = 3
BATCH = 6


@dataclass
class Clicks(Pipelineable):
    """A batch: features [F, B], dense [B, DENSE], labels [B]."""

    features: KeyedJaggedTensor
    dense: Tensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Clicks:
        return Clicks(
            self.features.to(device, non_blocking), self.dense.to(device), self.labels.to(device)
        )

    def record_stream(self, stream: Any) -> None:
        """Does nothing: there are no streams on the CPU."""

    def pin_memory(self) -> Clicks:
        """Returns self: pinned memory is not needed on the CPU."""
        return self


@dataclass
class Run:
    """A model and its plan.

    Attributes:
        pooled: a sharding type per pooled table.
        sequences: a sharding type per sequence table.
        beside: True if the model also has a static collection of TorchRec.
        dynamic: True for dynamic collections, False for TorchRec's static ones with the same initial rows.
        mean: True if all pooled tables except the first use MEAN pooling (static tables compute it wrongly).
        largest: True if the pooled tables take maximums.
        variable: True if each feature has a separate batch size.
        warming: True if the learning rate grows from step to step. A static table reads it in its forward, a
            dynamic table in its backward: if lookups run ahead, a static table is one step behind.
        initializer: initializer of the dynamic tables.
        rows: limit of each dynamic table.
        lives: policies that the dynamic tables take in turn.
        drift: distance between the new ids of two consecutive steps; below 300, the ids are used again later.
        dedup: True if sequence collections send each id once.
        processed: True if position weights weight the ids of the pooled tables.
        without_ids: the step whose batch has no ids; None: no step.
        overwrites: True if the dense part writes over the ids of its batch, before any backward.
    """

    pooled: Sequence[str]
    sequences: Sequence[str]
    beside: bool = False
    dynamic: bool = True
    mean: bool = True
    largest: bool = False
    variable: bool = False
    warming: bool = False
    steps: int = 5  # a pipeline is at most three batches ahead
    new_ids: int = 60  # new ids of each step
    longest_bag: int = 6
    initializer: Any = None
    rows: int = ROWS
    lives: Sequence[dict[str, Any]] = ()
    drift: int = 10_000
    dedup: bool = False
    processed: bool = False
    without_ids: int | None = None
    overwrites: bool = False
    fused_params: dict[str, Any] = field(
        default_factory=lambda: {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    )

    def tables(self, name: str) -> list[str]:
        return [f"{name}_{i}" for i in range(len(getattr(self, name)))]

    def case(self, name: str, world: int = 1, local: int = 1) -> Case:
        """Returns the collection `pooled` or `sequences`, and its plan."""
        turn, is_pooled, tables = int(name == "sequences"), name == "pooled", []
        for i, (table, kind) in enumerate(zip(self.tables(name), getattr(self, name), strict=True)):
            life = self.lives[(i + turn) % len(self.lives)] if self.lives else {}
            tables.append(
                Table(
                    table,
                    FEATURES[i % 4 :][:2] if is_pooled else [FEATURES[(i + 1) % 4]],
                    usual_plan(kind, DIM, world, local, i, self.rows),
                    DIM,
                    "MAX" if self.largest and is_pooled else "MEAN" if self.mean and i else "SUM",
                    rows=self.rows,
                    config=dyn.DynamicTableConfig(initializer=self.initializer, **life),
                )
            )
        return Case(tables, pooled=is_pooled, weighted=self.processed and is_pooled)

    def collections(self) -> list[str]:
        """Returns the attribute names of the model's collections."""
        return ["pooled", "sequences", *(["beside"] if self.beside else [])]


class Head(nn.Module):
    """The dense part; a leaf to the pipelines' tracer."""

    def __init__(self, width: int, overwrites: bool) -> None:
        super().__init__()
        self.overwrites = overwrites
        generator = torch.Generator().manual_seed(5)
        self.hidden = nn.Linear(width, 8)
        self.last = nn.Linear(8, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def forward(self, batch: Clicks, pooled: Any, sequences: Any, beside: Any) -> Any:
        """Returns the loss, and the loss and the logits as the output of a pipeline."""
        parts = [batch.dense, pooled.values()]
        for jagged in sequences.values():
            bags = len(jagged.lengths())
            place = batch.dense.device
            bag = torch.repeat_interleave(torch.arange(bags, device=place), jagged.lengths())
            summed = torch.zeros(bags, DIM, device=place).index_add(0, bag, jagged.values())
            parts.append(summed[torch.arange(len(batch.labels), device=place) % bags])
        if beside is not None:
            parts.append(beside.values())
        logits = self.last(torch.tanh(self.hidden(torch.cat(parts, dim=1)))).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        if self.overwrites:
            batch.features.values().fill_(10**12)
        return loss, (loss.detach(), logits.detach())


class ClickModel(nn.Module):
    """Collections and a dense head."""

    def __init__(self, run: Run, dynamic: bool) -> None:
        super().__init__()
        cases = {name: run.case(name) for name in ("pooled", "sequences")}
        options = {"fused_params": run.fused_params} if dynamic else {"is_static": True}
        self.pooled: Any = collection_of(cases["pooled"], **options)
        self.sequences: Any = collection_of(cases["sequences"], **options)
        if run.processed:
            weights = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, run.longest_bag))
            self.pooled = FeatureProcessedEmbeddingBagCollection(self.pooled, weights)
        self.beside = None
        if run.beside:
            small = EmbeddingBagConfig(ROWS, DIM, "beside_0", feature_names=["small"])
            self.beside = EmbeddingBagCollection([small])
        outputs = [len(table.features) for case in cases.values() for table in case.tables]
        widths = [DIM * count for count in [*outputs, *([1] if run.beside else [])]]
        self.head = Head(DENSE + sum(widths), run.overwrites)

    def forward(self, batch: Clicks) -> Any:
        pooled, sequences = self.pooled(batch.features), self.sequences(batch.features)
        beside = self.beside(batch.features) if self.beside is not None else None
        return self.head(batch, pooled, sequences, beside)


def sharded_model(run: Run, **options: Any) -> Any:
    """Returns the model of a run under DistributedModelParallel, which gets the options."""
    world = dist.get_world_size()
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    plan: dict[str, Any] = {
        name: {table.name: table.plan for table in run.case(name, world, local).tables}
        for name in ("pooled", "sequences")
    }
    options.setdefault("device", torch.device("cpu"))
    if run.beside:
        beside = usual_plan("table_wise", DIM, world, local, device=str(options["device"]))
        plan["beside"] = {"beside_0": beside}
    model = DistributedModelParallel(
        ClickModel(run, run.dynamic),
        plan=ShardingPlan(plan),
        sharders=[
            dyn.DynamicEmbeddingBagCollectionSharder(),
            dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(),
            dyn.DynamicEmbeddingCollectionSharder(use_index_dedup=run.dedup),
            EmbeddingBagCollectionSharder(fused_params=dict(run.fused_params)),
            EmbeddingCollectionSharder(fused_params=dict(run.fused_params)),
        ],
        **options,
    )
    _write_first_rows(run, model)
    return model


def batches(run: Run, first_step: int = 0) -> list[Clicks]:
    """Returns this rank's batches: of raw ids for a dynamic run, of row numbers for a static run."""
    return [_batch(run, first_step + step, dist.get_rank()) for step in range(run.steps)]


def _batch(run: Run, step: int, rank: int) -> Clicks:
    generator = torch.Generator().manual_seed(100 * step + rank)
    bags = [BATCH - number if run.variable else BATCH for number in range(len(FEATURES))]
    lengths = torch.randint(run.longest_bag + 1, (sum(bags) + BATCH,), generator=generator)
    if step == run.without_ids:
        lengths.zero_()
    large = int(lengths[: sum(bags)].sum())
    known = _ids_at(run, step)
    ids = known[torch.randint(known.numel(), (large,), generator=generator)]
    small = torch.randint(ROWS, (int(lengths.sum()) - large,), generator=generator)
    if not run.dynamic:
        ids = torch.searchsorted(_vocabulary(run), ids)
    keys = [*FEATURES, "small"]
    options: dict[str, Any] = {}
    if run.variable:
        inverse = torch.stack([torch.arange(BATCH) % count for count in [*bags, BATCH]])
        options["stride_per_key_per_rank"] = [[count] for count in [*bags, BATCH]]
        options["inverse_indices"] = (keys, inverse)
    features = KeyedJaggedTensor(keys, torch.cat([ids, small]), lengths=lengths, **options)
    dense = torch.rand(BATCH, DENSE, generator=generator)
    return Clicks(features, dense, (torch.rand(BATCH, generator=generator) < 0.5).float())


def _ids_at(run: Run, step: int) -> Tensor:
    """Returns the pool of ids of a step: ids of all steps, extreme ids among them, and its new ids."""
    first = 10_000 + run.drift * step % 300 if run.drift < 300 else run.drift * (step + 1)
    return torch.tensor(
        [*EXTREME_IDS, *range(100, 100 + run.new_ids), *range(first, first + run.new_ids)]
    )


def _vocabulary(run: Run) -> Tensor:
    """Returns all ids that a run may draw, sorted; the row of an id in a static table is its place here."""
    ids = torch.unique(torch.cat([_ids_at(run, step) for step in range(run.steps)]))
    assert ids.numel() <= ROWS
    return ids


def _write_first_rows(run: Run, model: Any) -> None:
    """Writes the initial rows of the dynamic table of the same name into every static table."""
    first: dict[str, Tensor] = {}
    if run.beside:
        rows = torch.rand(ROWS, DIM, generator=torch.Generator().manual_seed(9)) - 0.5
        first["beside.embedding_bags.beside_0.weight"] = rows
    if not run.dynamic:
        ids = _vocabulary(run)
        features = KeyedJaggedTensor(
            FEATURES, ids.repeat(4), lengths=torch.full((4,), ids.numel()).long()
        )
        source = ClickModel(run, dynamic=True)
        for name, holder in (("pooled", "embedding_bags"), ("sequences", "embeddings")):
            collection = getattr(source, name)
            with torch.no_grad():
                collection(features)
            for table in run.tables(name):
                rows, found = collection.table(table).lookup(ids)
                assert bool(found.all())
                padding = torch.zeros(ROWS - len(rows), DIM)
                first[f"{name}.{holder}.{table}.weight"] = torch.cat([rows, padding])
    held = model.state_dict() if first else {}
    for name, rows in first.items():
        for shard in held[name].local_shards():
            (row, column), size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(rows[row : row + size[0], column : column + size[1]])
