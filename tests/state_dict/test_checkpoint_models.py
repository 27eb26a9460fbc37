"""Whole models: two dynamic collections, a static one and dense layers, in torch's own checkpoint calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import LOCAL_SIZES, contents, differences, plan_of, quietly
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from workers import run

import torchrec_dyn as dyn
from torchrec_dyn.state_dict.load_planner import LoadPlanner

FUSED = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
DIM = 12


class Model(nn.Module):
    """Each kind of part once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        bags = {"embedding_dim": DIM, "num_embeddings": 1000}
        self.pooled = dyn.DynamicEmbeddingBagCollection(
            [EmbeddingBagConfig(name="p", feature_names=["a"], **bags)]
        )
        self.sequence = dyn.DynamicEmbeddingCollection(
            [EmbeddingConfig(name="s", feature_names=["b"], **bags)]
        )
        self.static = EmbeddingBagCollection(
            [EmbeddingBagConfig(name="static", feature_names=["c"], **bags)],
            device=torch.device("meta"),
        )
        self.dense = nn.Linear(2 * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = torch.cat([self.pooled(features).values(), self.static(features).values()], 1)
        return self.dense(pooled).sum() + self.sequence(features)["b"].values().sum()


def sharded(world: int, kind: str) -> Any:
    """The model on some ranks."""
    local = LOCAL_SIZES[world]
    plan = {
        "pooled": {"p": plan_of(kind, world, local, 0, True)},
        "sequence": {"s": plan_of(kind, world, local, 1, False)},
        "static": {"static": plan_of("row_wise", world, local, 0, True)},
    }
    sharders = [
        dyn.DynamicEmbeddingBagCollectionSharder(fused_params=dict(FUSED)),
        dyn.DynamicEmbeddingCollectionSharder(fused_params=dict(FUSED)),
        EmbeddingBagCollectionSharder(fused_params=dict(FUSED)),
    ]
    cpu = torch.device("cpu")
    return DistributedModelParallel(Model(), device=cpu, plan=ShardingPlan(plan), sharders=sharders)


def learn(model: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        lengths = torch.randint(4, (9,), generator=generator)
        ids = torch.randint(900, (int(lengths.sum()),), generator=generator)
        model(KeyedJaggedTensor(["a", "b", "c"], ids, lengths=lengths)).backward()


def parts(model: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": model.fused_optimizer}


def state_of(model: Any) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in parts(model).items()}


def learn_and_save(world: int, kind: str, folder: str) -> None:
    model = sharded(world, kind)
    learn(model, range(3))
    quietly(dcp.save, parts(model), checkpoint_id=f"{folder}/stateful")
    quietly(dcp.save, state_of(model), checkpoint_id=f"{folder}/dicts")
    # Static ShardedTensors cannot be staged by the default stager (torch 2.13).
    future = quietly(
        dcp.async_save,
        state_of(model),
        checkpoint_id=f"{folder}/async",
        process_group=dist.new_group(),
        async_stager=BlockingAsyncStager(),
    )
    learn(model, range(3, 5))
    quietly(future.result)


def load_and_save(world: int, kind: str, folder: str) -> None:
    """Loads objects that have a state dict, and state dicts; saves both again."""
    model = sharded(world, kind)
    learn(model, range(7, 9))
    quietly(dcp.load, parts(model), checkpoint_id=f"{folder}/stateful", planner=LoadPlanner())
    quietly(dcp.save, parts(model), checkpoint_id=f"{folder}/stateful again")
    model = sharded(world, kind)
    state = state_of(model)
    quietly(dcp.load, state, checkpoint_id=f"{folder}/dicts", planner=LoadPlanner())
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    quietly(dcp.save, state_of(model), checkpoint_id=f"{folder}/dicts again")


def test_all_parts_of_a_model_move_together(tmp_path: Path) -> None:
    run(learn_and_save, 2, "row_wise", str(tmp_path), world_size=2, timeout=120)
    saved = contents(tmp_path / "stateful")
    for key in ("pooled.embedding_bags.p.ids", "sequence.embeddings.s.ids", "dense.weight"):
        assert saved[f"model/{key}"].numel() > 1
    assert saved["model/static.embedding_bags.static.weight"].shape == (1000, DIM)
    assert not differences(contents(tmp_path / "dicts"), saved)
    run(load_and_save, 3, "three_columns", str(tmp_path), world_size=3, timeout=120)
    for name in ("stateful again", "dicts again"):
        assert not differences(contents(tmp_path / name), saved)


def test_static_and_dynamic_tables_are_saved_while_training_goes_on(tmp_path: Path) -> None:
    run(learn_and_save, 2, "column_wise", str(tmp_path), world_size=2, timeout=120)
    assert not differences(contents(tmp_path / "async"), contents(tmp_path / "dicts"))
