"""Unsharded collections in models that DDP and DistributedModelParallel wrap, in real processes."""

import copy

import pytest
import torch
import torch.distributed as dist
import workers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

import torchrec_dyn as dyn

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
NOT_SYNCHRONISED = r"unsharded tables, first 'sparse.0.embedding_bags.t.weight'.*not synchronised"


class Model(nn.Module):
    """A dense layer over a dynamic collection, deeper than the outermost module."""

    def __init__(self) -> None:
        super().__init__()
        # A limit so large that a placeholder with storage would be impossible.
        config = EmbeddingBagConfig(2**40, 4, "t", feature_names=["f"])
        self.sparse = nn.Sequential(dyn.DynamicEmbeddingBagCollection([config], fused_params=SGD))
        self.over = nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.sparse[0](features).values())


def batch(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([1, len(ids) - 1]))


def train_under_ddp() -> tuple[list[int], torch.Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # DDP copies the dense parts of rank 0 to all ranks
    model = Model()
    model.over.register_buffer("kept", torch.ones(1))
    model._ddp_params_and_buffers_to_ignore = ["over.kept"]
    with pytest.warns(UserWarning, match=NOT_SYNCHRONISED):
        ddp = DistributedDataParallel(model)
    assert ddp.parameters_to_ignore == {"over.kept", "sparse.0.embedding_bags.t.weight"}
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        ddp(batch(1, rank + 10, step + 100)).square().sum().backward()
        optimizer.step()
    return model.sparse[0].table("t").ids().tolist(), model.over.weight.detach()


def test_ddp_keeps_dense_parts_alike_and_says_that_rows_are_not() -> None:
    (ids_0, weight_0), (ids_1, weight_1) = workers.run(train_under_ddp, world_size=2)
    assert torch.equal(weight_0, weight_1)
    assert sorted(ids_0) == [1, 10, 100, 101, 102]
    assert sorted(ids_1) == [1, 11, 100, 101, 102]


def train_under_dmp() -> None:
    torch.manual_seed(0)
    model = Model()
    model.sparse[0].table("t").assign(torch.tensor([5]), torch.ones(1, 4))
    twin = copy.deepcopy(model)
    dmp = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({}), sharders=[]
    )
    placeholder = model.sparse[0].embedding_bags["t"].weight
    assert placeholder.is_meta and placeholder.shape == (2**40, 4)
    for one in (dmp, twin):
        dense = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            one(batch(5, 6, 7)).square().sum().backward()
            dense.step()
            dense.zero_grad()
    assert torch.equal(dmp.eval()(batch(5, 6, 7)), twin.eval()(batch(5, 6, 7)))
    (group,) = dmp.fused_optimizer.param_groups
    assert group["lr"] == 0.1
    assert "sparse.0.embedding_bags.t.weight" in dmp.fused_optimizer.params


def test_dmp_without_a_sharder_leaves_the_collection_as_it_is() -> None:
    workers.run(train_under_dmp, world_size=1)
