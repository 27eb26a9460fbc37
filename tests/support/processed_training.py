"""Trains feature-processed collections on several ranks beside unsharded or TorchRec's static collections."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from sharded_cases import Case, Table, usual_plan
from sharded_training import (
    batches,
    check_rows,
    check_same,
    collection_of,
    outputs_by_name,
    parts_of_rank,
)
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingPlan
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import torchrec_dyn as dyn

RATE = 0.05
LONGEST = 6  # number of position weights; bags have at most case.longest_bag ids


class Model(nn.Module):
    """A model of one collection that returns tensors: DDP averages gradients only if it sees the outputs."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        return dict(self.collection(features).to_dict())


def processed(case: Case, collection: Any, form: str) -> FeatureProcessedEmbeddingBagCollection:
    """Returns a feature-processed collection whose position weights all differ."""
    processors: Any
    if form == "collection":
        processors = PositionWeightedModuleCollection(dict.fromkeys(case.features(), LONGEST))
    else:
        processors = {name: PositionWeightedModule(LONGEST) for name in case.features()}
    made = FeatureProcessedEmbeddingBagCollection(collection, processors)
    for name, weight in position_weights(made).items():
        with torch.no_grad():
            weight.copy_(torch.linspace(0.5, 1.5, LONGEST) + 0.1 * (ord(name[-1]) % 5))
    return made


def position_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    return {
        path.split(".")[-1 if "position_weights." in path else -2]: weight
        for path, weight in module.named_parameters()
        if "position_weight" in path
    }


def shard_processed(case: Case, module: nn.Module, sharder: Any = None) -> Any:
    usual = dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(dict(case.fused_params))
    return DistributedModelParallel(
        Model(module),
        plan=ShardingPlan({"collection": {table.name: table.plan for table in case.tables}}),
        sharders=[sharder or usual],
    )


def backward(outputs: dict[str, torch.Tensor], scale: float = 1.0) -> None:
    """Runs backward with a gradient that depends on the output."""
    values = list(outputs.values())
    ramp = [torch.linspace(-1, 1, value.shape[1]).expand_as(value) for value in values]
    grads = [(r + value.detach() * 0.5) * scale for r, value in zip(ramp, values, strict=True)]
    torch.autograd.backward(values, grads)


def learn(module: nn.Module) -> None:
    for weight in position_weights(module).values():
        with torch.no_grad():
            weight -= RATE * weight.grad
        weight.grad = None


def unsharded_outputs(case: Case, module: Any, features: KeyedJaggedTensor) -> Any:
    """Returns the outputs of the unsharded module.

    For a variable batch TorchRec's forward is not used, since it drops the inverse indices.
    """
    if not case.variable:
        return module(features)
    processors, collection = module.split()
    weights = processors(features).weights()
    features = copy.copy(features)
    features._weights, features._jt_dict = weights, None
    return collection(features)


def train_processed(
    case: Case,
    form: str,
    brings_weights: bool = True,
    summed: bool = False,
    moves: dict[str, ParameterSharding] | None = None,
) -> int:
    """Asserts that both sides have equal outputs, rows and position weights; returns the rows here."""
    rank, world = dist.get_rank(), dist.get_world_size()
    unsharded = processed(case, collection_of(case, fused_params=case.fused_params), form)
    sharded = shard_processed(case, copy.deepcopy(unsharded))
    sizes = list(case.batch_sizes or [5] * world)
    for step in range(case.steps):
        if step == 1 and moves is not None:
            sharded.reshard({"collection": (0.0, moves)}, "collection")
            planned = sharded.plan.plan["collection"]
            assert all(planned[n].sharding_type == one.sharding_type for n, one in moves.items())
        per_rank, together = batches(case, step)
        if not brings_weights:
            per_rank[rank]._weights = together._weights = None
        per_rank[rank].to_dict()  # fills the batch's cache, which must not be changed either
        before = copy.deepcopy(per_rank[rank])
        got = sharded(per_rank[rank])
        assert_unchanged(per_rank[rank], before)
        whole = unsharded_outputs(case, unsharded, together)
        expected = parts_of_rank(case, whole, sizes, rank)
        assert set(got) == set(expected)
        for name, value in expected.items():
            check_same(case, got[name], value, f"step {step}, output {name}")
        backward(got)
        backward(outputs_by_name(case, whole), 1 if summed else 1 / world)
        theirs = position_weights(unsharded)
        for name, weight in position_weights(sharded).items():
            if summed:
                theirs[name].grad /= world
            torch.testing.assert_close(weight.grad, theirs[name].grad, rtol=1e-4, atol=1e-6)
            assert float(weight.grad.abs().sum()) > 0
        learn(sharded), learn(unsharded)
    _, collection = sharded.module.collection.split()
    check_rows(case, collection, unsharded.split()[1])
    return sum(collection.table(t.name).num_rows for t in case.tables)


def assert_unchanged(batch: KeyedJaggedTensor, before: KeyedJaggedTensor) -> None:
    assert torch.equal(batch.values(), before.values())
    assert torch.equal(batch.lengths(), before.lengths())
    weights, expected = batch.weights_or_none(), before.weights_or_none()
    assert (weights is None) == (expected is None)
    assert weights is None or torch.equal(weights, expected)


def one_table(kind: str = "row_wise", world: int = 2) -> Case:
    return Case([Table("t", ["a"], usual_plan(kind, 8, world, world))], weighted=True)


def bags(*lengths: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths))
