"""Unsharded collections in models that DDP and DistributedModelParallel wrap, in real processes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    get_default_sharders,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import torchrec_dyn as dyn

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
PLACEHOLDER = "sparse.0.embedding_bags.t.weight"


def pooled(limit: int, device: str = "cpu") -> dyn.DynamicEmbeddingBagCollection:
    config = EmbeddingBagConfig(limit, 4, "t", feature_names=["f"])
    return dyn.DynamicEmbeddingBagCollection([config], device=device, fused_params=SGD)


class Model(nn.Module):
    """A dense layer over a dynamic collection, deeper than the outermost module."""

    def __init__(self, dense: bool = True, device: str = "cpu") -> None:
        super().__init__()
        # A limit so large that a placeholder with storage would be impossible.
        self.sparse = nn.Sequential(pooled(2**40, device))
        self.over = nn.Linear(4, 1) if dense else nn.Identity()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.sparse[0](features).values())


def batch(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([1, len(ids) - 1]))


def dmp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedModelParallel(model, **options)


def shard_fully(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh, **options)


def processed() -> nn.Module:
    """A collection inside TorchRec's module, for which TorchRec has a sharder of the same type of module."""
    configs = [
        EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["f"])
    ]
    collection = dyn.DynamicEmbeddingBagCollection(configs, is_weighted=True)
    return FeatureProcessedEmbeddingBagCollection(collection, {"f": PositionWeightedModule(4)})


def beside_static(model: Model) -> Model:
    table = EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="s", feature_names=["f"])
    model.static = EmbeddingBagCollection(tables=[table])
    model.sparse[0] = pooled(limit=100)  # the planner counts placeholders as dense parameters
    return model


def sequence() -> nn.Module:
    configs = [EmbeddingConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["f"])]
    return nn.Sequential(dyn.DynamicEmbeddingCollection(configs))


OURS = [dyn.DynamicEmbeddingBagCollectionSharder()]
ALONE = {"init_parameters": False, "init_data_parallel": False}

WRAPPED: list[Callable[[], nn.Module]] = [
    lambda: DistributedDataParallel(Model()),
    lambda: DistributedDataParallel(Model(device="meta")),
    lambda: DistributedDataParallel(pickle.loads(pickle.dumps(Model().sparse[0]))),
    lambda: dmp(Model()),
    lambda: dmp(Model(dense=False), sharders=get_default_sharders()),
    lambda: dmp(sequence(), sharders=OURS),
    lambda: dmp(Model(), sharders=OURS, plan=ShardingPlan({})),
    lambda: shard_fully(Model()),
]
REFUSED = (
    r"^Dynamic\w+Collection\(tables?=.*'t'.*\): expected a sharded collection under "
    r"(DistributedDataParallel|DistributedModelParallel|fully_shard) on 2 ranks, got an unsharded one: .* "
    r"Pass sharders=torchrec_dyn.default_sharders\(\) to DistributedModelParallel, .*\.$"
)


def check_refuse() -> None:
    for wrap in WRAPPED:
        with pytest.raises(ValueError, match=REFUSED):
            wrap()
    late = Model()
    late.sparse[0] = nn.Identity()
    wrapped = dmp(late)
    late.sparse[0] = pooled(100)
    for model in (dmp(Model(), **ALONE), dmp(beside_static(Model()), **ALONE), wrapped):
        for _ in range(2):
            with pytest.raises(ValueError, match=REFUSED):
                model(batch(1, 2, 3))
        assert model.eval()(batch(1, 2, 3)).shape == (2, 1)


def test_a_wrapper_of_several_ranks_or_its_first_training_forward_is_an_error() -> None:
    workers.run(check_refuse, world_size=2)


def check_refuse_to_be_static() -> None:
    message = (
        r"^DynamicEmbeddingBagCollection\(tables=\['t'\]\): expected a sharder of torchrec_dyn, got "
        r"TorchRec's, .* Pass sharders=torchrec_dyn.default_sharders\(\) .*\.$"
    )
    with pytest.raises(ValueError, match=message):
        dmp(nn.Sequential(processed()))
    words, sharder = sequence()[0], dyn.DynamicEmbeddingCollectionSharder()
    by_table = {"t": table_wise(rank=0, compute_kernel="fused")}
    plan = construct_module_sharding_plan(words, by_table, sharder, 1, 1, "cpu")
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with pytest.raises(ValueError, match=r"^DynamicEmbeddingCollection\(.* got TorchRec's"):
        # As TorchRec's sharder of managed collision calls it.
        EmbeddingCollectionSharder().shard(words, plan, env, torch.device("cpu"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_made_static_by_torchrecs_sharders_is_an_error(world_size: int) -> None:
    workers.run(check_refuse_to_be_static, world_size=world_size)


def train_local_copies() -> tuple[list[int], torch.Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # DDP copies the dense parts of rank 0 to all ranks
    model = Model()
    inside = shard_fully(nn.Sequential(nn.Linear(1, 1)))
    model.over = DistributedDataParallel(model.over)  # brings the weights of rank 0 to all
    assert next(name for name, _ in model.named_parameters()) == PLACEHOLDER
    assert model.sparse[0].fused_optimizer.param_groups[0]["lr"] == 0.1
    optimizer = torch.optim.SGD([*model.parameters(), *inside.parameters()], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        inside(model(batch(1, rank + 10, step + 100))).square().sum().backward()
        optimizer.step()
    assert f"{PLACEHOLDER[:-6]}ids" in model.state_dict()
    return model.sparse[0].table("t").ids().tolist(), model.over.module.weight.detach()


def test_local_copies_in_a_process_group_are_legal() -> None:
    (ids_0, weight_0), (ids_1, weight_1) = workers.run(train_local_copies, world_size=2)
    assert torch.equal(weight_0, weight_1)
    assert sorted(ids_0) == [1, 10, 100, 101, 102]
    assert sorted(ids_1) == [1, 11, 100, 101, 102]


def assert_trains_alike(wrapped: nn.Module, twin: nn.Module) -> None:
    for one in (wrapped, twin):
        dense = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            one(batch(5, 6, 7)).square().sum().backward()
            dense.step()
            dense.zero_grad()
    assert torch.equal(wrapped.eval()(batch(5, 6, 7)), twin.eval()(batch(5, 6, 7)))


def check_train_on_one_rank(wrap: str) -> None:
    torch.manual_seed(0)
    model = Model()
    model.over.register_buffer("kept", torch.ones(1))
    model._ddp_params_and_buffers_to_ignore = ["over.kept"]
    twin = copy.deepcopy(model)
    wrapped = ON_ONE_RANK[wrap](model)
    if isinstance(wrapped, DistributedDataParallel):
        assert wrapped.parameters_to_ignore == {"over.kept", PLACEHOLDER}
        wrapped = copy.deepcopy(wrapped)
    assert_trains_alike(wrapped, twin)


def ddp_over_a_part_of_a_mesh(model: nn.Module) -> nn.Module:
    """With such a mesh the constructor walks the model before it has a list of names to skip."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    return DistributedDataParallel(model, device_mesh=mesh["data"])


ON_ONE_RANK: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "DDP, mesh": ddp_over_a_part_of_a_mesh,
    "fully_shard": shard_fully,
}


@pytest.mark.parametrize("wrap", ON_ONE_RANK)
def test_wrapped_on_one_rank_trains_as_without(wrap: str) -> None:
    workers.run(check_train_on_one_rank, wrap, world_size=1)


def check_train_under_dmp() -> None:
    torch.manual_seed(0)
    model = Model()
    model.sparse[0].table("t").assign(torch.tensor([5]), torch.ones(1, 4))
    twin = copy.deepcopy(model)
    dmp = DistributedModelParallel(model, plan=ShardingPlan({}), sharders=[])
    placeholder = model.sparse[0].embedding_bags["t"].weight
    assert placeholder.is_meta and placeholder.shape == (2**40, 4)
    assert_trains_alike(dmp, twin)
    (group,) = dmp.fused_optimizer.param_groups
    assert group["lr"] == 0.1
    assert "sparse.0.embedding_bags.t.weight" in dmp.fused_optimizer.params


def test_dmp_without_a_sharder_leaves_the_collection_as_it_is() -> None:
    workers.run(check_train_under_dmp, world_size=1)


def count_parameters_compiled() -> int:
    model = Model()

    @torch.compile(backend="eager", fullgraph=True)
    def count(zero: torch.Tensor) -> torch.Tensor:
        return zero + len(list(model.parameters()))

    return int(count(torch.zeros(())))


def test_a_compiler_traces_a_walk_of_the_parameters() -> None:
    assert workers.run(count_parameters_compiled, world_size=1) == [3]
