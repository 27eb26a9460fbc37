"""The planner and the pipelines take feature processors."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import workers
from processed_training import Model, backward, bags, one_table, processed
from sharded_cases import FUSED_PARAMS, Case
from sharded_training import batches, collection_of
from test_feature_processors import tables_of
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

import torchrec_dyn as dyn
from torchrec_dyn.distributed.feature_processors import (
    ShardedDynamicFeatureProcessedEmbeddingBagCollection,
)
from torchrec_dyn.planner import DynamicStorageEstimator, make_planner


def plan_and_train(constraints: dict[str, ParameterConstraints] | None) -> str:
    case = one_table()
    model = Model(processed(case, collection_of(case), "collection"))
    sharders = [dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(dict(FUSED_PARAMS))]
    planner = make_planner(Topology(2, "cpu"), constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    backward(model(bags(2, 1)))
    (chosen,) = plan.plan["collection"].values()
    return chosen.sharding_type


def test_the_planner_plans_them() -> None:
    kinds = workers.run(plan_and_train, None, world_size=2)
    assert set(kinds) <= {"table_wise", "column_wise", "table_column_wise"}
    asked = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    assert set(workers.run(plan_and_train, asked, world_size=2)) == {"row_wise"}


def test_storage_is_priced_as_of_dynamic_tables() -> None:

    case = one_table()
    topology = Topology(2, "cpu")
    prices = []
    for wrapped in (False, True):
        collection = collection_of(case, fused_params=FUSED_PARAMS)
        module = Model(processed(case, collection, "dict") if wrapped else collection)
        sharders = [
            dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(),
            dyn.DynamicEmbeddingBagCollectionSharder(),
        ]
        enumerator = EmbeddingEnumerator(topology, 4, None, [DynamicStorageEstimator(topology)])
        options = enumerator.enumerate(module, sharders[:1] if wrapped else sharders[1:])
        (one,) = [each for each in options if each.sharding_type == "table_wise"]
        prices.append(one.shards[0].storage.ddr)
    assert prices[0] == prices[1]


@dataclass
class Batch(Pipelineable):
    """Bags, as a pipeline takes them."""

    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Moves the batch."""
        return Batch(self.features.to(device, non_blocking))

    def record_stream(self, stream: object) -> None:
        """Does nothing: there are no streams on the CPU."""

    def pin_memory(self) -> "Batch":
        """Does nothing."""
        return self


class Loss(nn.Module):
    """A leaf to the pipelines' tracer."""

    def forward(self, pooled) -> Tensor:
        """Sums squares."""
        return (pooled.values() - 1).square().sum()


class LossModel(nn.Module):
    """A collection and its loss."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection
        self.loss = Loss()

    def forward(self, batch: Batch):
        """Returns the loss, twice."""
        loss = self.loss(self.collection(batch.features))
        return loss, loss.detach()


def run_pipeline(kind: str, form: str, name: str) -> list[float]:
    case = Case(tables_of([kind] * 3, 2, 2), weighted=True, steps=4)
    module = processed(case, collection_of(case), form)
    plan = ShardingPlan({"collection": {table.name: table.plan for table in case.tables}})
    sharders = [dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(dict(FUSED_PARAMS))]
    model = DistributedModelParallel(
        LossModel(module), device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert len(dense) == len(case.features())
    optimizer = CombinedOptimizer(
        [
            model.fused_optimizer,
            KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.05)),
        ]
    )
    given = [Batch(batches(case, step)[0][dist.get_rank()]) for step in range(case.steps)]
    for step, batch in enumerate(given):
        if step % 2:
            batch.features._weights = None
    before = given[0].features.weights().clone()
    losses, left = [], iter(given)
    pipeline = getattr(train_pipelines, name)(model, optimizer, torch.device("cpu"))
    for _ in range(3):
        losses.append(float(pipeline.progress(left)))
    if name != "TrainPipelineBase":
        (pipelined,) = pipeline._pipelined_modules
        assert type(pipelined) is ShardedDynamicFeatureProcessedEmbeddingBagCollection
        pipeline.detach()  # afterwards positions are still computed, though TorchRec's flag stays
    assert given[0].features.weights().equal(before)
    assert given[1].features.weights_or_none() is None
    with torch.no_grad():
        losses.append(float(model.eval()(given[1])[0]))
    return losses


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "grid_shard"])
def test_pipelines(kind: str) -> None:
    for form in ("collection", "dict"):
        base = workers.run(run_pipeline, kind, form, "TrainPipelineBase", world_size=2)
        ahead = workers.run(run_pipeline, kind, form, "TrainPipelineSparseDist", world_size=2)
        assert base == ahead and len(set(base[0])) == 4
