"""The list of TorchRec's sharders and ours, for models with any mix of static and dynamic tables."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from sharded_cases import usual_plan
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

import torchrec_dyn as dyn

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.25}


def bags(name: str) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(num_embeddings=50, embedding_dim=4, name=name, feature_names=["f"])]


def words(name: str) -> list[EmbeddingConfig]:
    return [EmbeddingConfig(num_embeddings=50, embedding_dim=4, name=name, feature_names=["f"])]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.static_pooled = EmbeddingBagCollection(tables=bags("a"))
        self.static_sequence = EmbeddingCollection(tables=words("b"))
        self.pooled = dyn.DynamicEmbeddingBagCollection(bags("c"))
        self.sequence = dyn.DynamicEmbeddingCollection(words("d"))
        self.processed = FeatureProcessedEmbeddingBagCollection(
            dyn.DynamicEmbeddingBagCollection(bags("e"), is_weighted=True),
            PositionWeightedModuleCollection({"f": 2}),
        )
        self.static_processed = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=bags("g"), is_weighted=True),
            PositionWeightedModuleCollection({"f": 2}),
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = [self.static_pooled, self.pooled, self.processed]
        pooled += [self.static_processed] if hasattr(self, "static_processed") else []
        sequence = [self.static_sequence, self.sequence]
        summed = sum(one(features).values().sum() for one in pooled)
        return summed + sum(one(features)["f"].values().sum() for one in sequence)


def check_train(plans: bool, defers: bool) -> None:
    sharders, plan = dyn.default_sharders(SGD), None
    if defers:  # which static tables cannot: they have options of their own
        sharders = dyn.default_sharders({**SGD, "defer_updates": True})
        sharders += [EmbeddingBagCollectionSharder(SGD), EmbeddingCollectionSharder(SGD)]
    model = Model()
    if defers:  # `check_train_processed` has it: one sharder is for both kinds
        del model.static_processed
    if plans:
        topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
        planner = EmbeddingShardingPlanner(topology=topology)
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, sharders=sharders, plan=plan)
    for module in model.module.children():
        assert isinstance(module, ShardedModule)
    for group in model.fused_optimizer.param_groups:
        assert group["lr"] == 0.25
    batch = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    static = getattr(model.module, "static_processed", model.module.static_pooled)
    before = static(batch).values().detach().clone()
    model(batch).backward()
    assert (
        static(batch).values() < before
    ).all()  # by the rate of `SGD`; processors have no optimizer
    if not plans and not defers:
        kind = FeatureProcessedEmbeddingBagCollection
        [sharder] = [one for one in sharders if one.module_type is kind]
        with pytest.raises(ValueError, match="expected dynamic tables, got static ones"):
            sharder.reshard(model.module.static_processed, {}, model._env)
    for collection in (
        model.module.pooled,
        model.module.sequence,
        model.module.processed.split()[1],
    ):
        assert sorted(dyn.read_ids(collection, collection_table(collection)).tolist()) == [1, 2, 3]
    if defers:
        dyn.GradScaler(model.module.processed, "cpu")  # whose tables are dynamic
        with pytest.raises(ValueError, match=r"got .*static_pooled\.a with the kernel fused"):
            dyn.GradScaler(model, "cpu")


def processed(collection: EmbeddingBagCollection) -> FeatureProcessedEmbeddingBagCollection:
    weights = PositionWeightedModuleCollection({"f": 2})
    return FeatureProcessedEmbeddingBagCollection(collection, weights)


def check_train_processed() -> None:
    deferred = {**SGD, "defer_updates": True}
    dynamic = dyn.DynamicEmbeddingBagCollection(bags("e"), is_weighted=True, fused_params=deferred)
    static = EmbeddingBagCollection(tables=bags("g"), is_weighted=True)
    _apply_optimizer_in_backward(torch.optim.SGD, static.parameters(), {"lr": 0.25})
    both = nn.ModuleDict({"dynamic": processed(dynamic), "static": processed(static)})
    sharders = dyn.default_sharders(deferred)
    sharders += [dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder()]
    model = DistributedModelParallel(both, sharders=sharders)
    assert model.plan.plan["static"]["g"].compute_kernel == "fused"
    batch = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    changes = {}
    for name, module in model.module.items():
        before = module(batch).values()
        before.sum().backward()
        changes[name] = (module(batch).values() - before).detach()
    assert not changes["dynamic"].any()  # until step()
    # the sums of two and of one row, each less by the rate
    assert changes["static"].allclose(torch.tensor([[-0.5], [-0.25]]))
    assert all(group["lr"] == 0.25 for group in model.fused_optimizer.param_groups)


def collection_table(collection: nn.Module) -> str:
    (name,) = collection.module_sharding_plan
    return name


def test_each_kind_behind_feature_processors_has_options_of_its_own() -> None:
    workers.run(check_train_processed, world_size=1)


def test_static_and_dynamic_tables_train_with_one_list() -> None:
    workers.run(check_train, False, True, world_size=2)
    workers.run(check_train, True, False, world_size=2)
    workers.run(check_train, False, False, world_size=2)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({**SGD, "defer_updates": True}, "defer_updates=True"),
        ({"optimizer": "ADAM"}, "optimizer='ADAM'"),
        ({"optimizer": "FTRL", "l1": 0.5}, "l1=0.5, optimizer='FTRL'"),
    ],
)
def test_options_that_static_tables_do_not_have(given: dict[str, Any], told: str) -> None:
    sharders = {one.module_type: one for one in dyn.default_sharders(given)}
    plan, of_both = (
        {"a": usual_plan("table_wise", 4, 1, 1, 0, 50)},
        f"tables \\['a'\\], got {told}. Give",
    )
    for collection in (EmbeddingBagCollection(bags("a")), EmbeddingCollection(words("a"))):
        with pytest.raises(ValueError, match=of_both):
            sharders[type(collection)].shard(collection, plan, None, torch.device("cpu"))
    of_collisions = sharders[ManagedCollisionEmbeddingBagCollection]
    assert type(of_collisions._e_sharder) is type(sharders[EmbeddingBagCollection])


def test_has_a_sharder_of_every_type() -> None:
    types = {sharder.module_type for sharder in dyn.default_sharders()}
    assert types == {
        *(sharder.module_type for sharder in get_default_sharders()),
        dyn.DynamicEmbeddingBagCollection,
        dyn.DynamicEmbeddingCollection,
    }
    assert len(types) == len(dyn.default_sharders())


def test_the_given_options_are_copied() -> None:
    given = dict(SGD)
    for sharder in dyn.default_sharders(given):
        if sharder.fused_params:
            assert sharder.fused_params["learning_rate"] == 0.25
            sharder.fused_params["learning_rate"] = 9.0
    assert given == SGD


@pytest.mark.parametrize(
    "sharder",
    [
        dyn.default_sharders,
        dyn.DynamicEmbeddingBagCollectionSharder,
        dyn.DynamicEmbeddingCollectionSharder,
        dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder,
    ],
)
def test_fused_params_that_are_no_dict_are_refused(sharder: Any) -> None:
    with pytest.raises(
        ValueError, match=r"harders?\.fused_params: expected a dict, got 'adam'\. Wr"
    ):
        sharder("adam")


def test_output_dtype_reaches_static_tables_as_torchrec_reads_it() -> None:
    given = [
        sharder.fused_params["output_dtype"]  # type: ignore[attr-defined]
        for sharder in dyn.default_sharders({**SGD, "output_dtype": torch.float16})
        if getattr(sharder, "fused_params", None) is not None
    ]
    assert len(given) >= 4 and set(given) == {SparseType.FP16}
    with pytest.raises(ValueError, match="fused_params of default_sharders: expected output_dtype"):
        dyn.default_sharders({"output_dtype": DataType.INT8})
