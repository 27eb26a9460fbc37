"""The stream and the model of the soak, whose numbers are the same under every plan and on every world size.

Batch n depends on the seed and on n alone; each rank takes its slice of the samples. Gradients are small
integers, so their sums are exact in any order. The gradient of an item follows from its row: an update that
is lost, or made twice, changes all later ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sharded_cases import Case, Table, usual_plan
from sharded_training import collection_of, configs_of
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

import torchrec_dyn as dyn

DIM = 16
DENSE = 8  # columns of the dense part
SAMPLES = 32  # of a batch of all ranks
IDS_A_SAMPLE = {"user": 3, "item": 1, "place": 2}
# Small, so that the tables are as large as they will be after some hundred batches.
LIMITS = {"user": 100_000, "item": 300, "place": 100_000}
EXPIRY = 600  # units of event time
_VOCABULARY = 2_000  # ids that may occur in one batch
_PLACES = 400  # all ids of "place"
_LARGEST = 3  # coefficient of a gradient

_DYNAMIC = {
    "user": dyn.DynamicTableConfig(
        initializer=dyn.Uniform(-0.1, 0.1),
        admission=dyn.AdmitAfter(2),
        eviction=dyn.ExpireAfter(time=EXPIRY),
        gradient="sum",
    ),
    "item": dyn.DynamicTableConfig(
        initializer=dyn.Uniform(-1.0, 1.0), eviction=dyn.LeastRecentlyUsed(), gradient="sum"
    ),
    "place": dyn.DynamicTableConfig(initializer=dyn.Normal(0.0, 0.1), gradient="sum"),
}
_PLANS = {  # the rows of "item" stay together: its evictions are those of one table
    "user": ("row_wise", "table_wise", "column_wise"),
    "item": ("table_wise", "column_wise"),
    "place": ("column_wise", "row_wise", "table_wise"),
}


def case_of(seed: int = 0, ranks: int = 1) -> Case:
    """Returns the tables under one of many plans."""
    draw = random.Random(seed)
    tables = []
    for name, limit in LIMITS.items():
        kind = draw.choice(_PLANS[name])
        plan = usual_plan(kind, DIM, ranks, ranks, draw.randrange(ranks), limit)
        tables.append(Table(name, [name], plan, DIM, rows=limit, config=_DYNAMIC[name]))
    return Case(tables, fused_params={"optimizer": "ADAM", "learning_rate": 2**-6})


TABLES = configs_of(case_of())


def event_time(batch: int) -> int:
    """Returns the time of a batch: ten units a batch, uneven, with a night after every 150 batches."""
    return 1_000_000 + 10 * batch + batch * 7 % 10 + 450 * (batch // 150)


@lru_cache
def _zipf_edges(ids: int) -> np.ndarray:
    """Returns the distribution function of Zipf's law with exponent 1.1, [ids]."""
    sums = np.cumsum(1.0 / np.arange(1, ids + 1) ** 1.1)
    edges: np.ndarray = sums / sums[-1]
    return edges


@dataclass
class Batch(Pipelineable):
    """One rank's samples: its ids by feature, and the numbers of which its gradients are made.

    Attributes:
        bags: the ids.
        of_rows: [samples, 3 * DIM], small integers.
        of_dense: [samples, DENSE], small integers.
    """

    bags: KeyedJaggedTensor
    of_rows: torch.Tensor
    of_dense: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.bags.to(device, non_blocking),
            self.of_rows.to(device, non_blocking=non_blocking),
            self.of_dense.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Does nothing: the soak is for the CPU."""


class Stream:
    """The batches from `next` on, the slice of one of `ranks` ranks; it has a position for all ranks."""

    def __init__(self, seed: int, rank: int = 0, ranks: int = 1) -> None:
        self.seed, self.next = seed, 0
        each = SAMPLES // ranks
        self._mine = slice(rank * each, (rank + 1) * each)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.next += 1
            yield self.batch(self.next - 1)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.next = state["next"]

    def batch(self, number: int) -> Batch:
        draw = np.random.default_rng([self.seed, number])
        values, lengths = [], []
        for name, most in IDS_A_SAMPLE.items():
            ids = _PLACES if name == "place" else _VOCABULARY
            ranks = np.searchsorted(_zipf_edges(ids), draw.random((SAMPLES, most)))
            drift = 0 if name == "place" else number // 2  # new ids are the frequent ones
            count = draw.integers(1, most + 1, SAMPLES)
            taken = np.arange(most) < count[:, None]
            mixed = ((drift - ranks) * 0x9E3779B97F4A7C1).astype(np.int64)  # both signs, any size
            values.append(mixed[self._mine][taken[self._mine]])
            lengths.append(count[self._mine])
        bags = KeyedJaggedTensor(
            list(IDS_A_SAMPLE),
            torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths)).long(),
        )
        columns = len(IDS_A_SAMPLE) * DIM + DENSE
        coefficients = draw.integers(-_LARGEST, _LARGEST + 1, (SAMPLES, columns))[self._mine]
        of_rows, of_dense = np.split(coefficients.astype(np.float32), [columns - DENSE], axis=1)
        return Batch(bags, torch.from_numpy(of_rows.copy()), torch.from_numpy(of_dense.copy()))


class Model(nn.Module):
    """Three tables, and a linear layer whose gradient does not depend on the number of ranks."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self._ranks = ranks
        case = case_of()
        self.sparse = collection_of(case, fused_params=case.fused_params)
        self.dense = nn.Linear(DENSE, 1, bias=False)
        nn.init.constant_(self.dense.weight, 0.5)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.sparse(batch.bags)
        # Their order in `values()` depends on the plan.
        rows = torch.cat([pooled[name] for name in IDS_A_SAMPLE], dim=1)
        item = rows.detach()[:, DIM : 2 * DIM]  # one id a bag: the output is the row, to the bit
        back = nn.functional.pad((item * 8).round().clamp(-_LARGEST, _LARGEST), (DIM, DIM))
        loss = (rows * (batch.of_rows + back)).sum()
        # DistributedDataParallel divides by the number of ranks.
        loss = loss + self._ranks * self.dense(batch.of_dense).sum()
        return loss, rows.detach()


def sharded(plan_seed: int) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Returns the model on the ranks of the process group, and the optimizer of all its parameters."""
    ranks = dist.get_world_size()
    model = DistributedModelParallel(
        Model(ranks),
        plan=ShardingPlan(
            {"sparse": {one.name: one.plan for one in case_of(plan_seed, ranks).tables}}
        ),
        sharders=[dyn.DynamicEmbeddingBagCollectionSharder()],
        device=torch.device("cpu"),
    )
    return model, _optimizer_of(model, model.fused_optimizer)


def unsharded() -> tuple[Model, CombinedOptimizer]:
    """Returns the model in this process alone, and the optimizer of all its parameters."""
    model = Model()
    return model, _optimizer_of(model, model.sparse.fused_optimizer)


def _optimizer_of(model: nn.Module, of_tables: Any) -> CombinedOptimizer:
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    return CombinedOptimizer([("", of_tables), ("", dense)])
