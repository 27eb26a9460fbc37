"""The models of the saved files in this folder, and the batches to evaluate them on. Public names only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer

import torchrec_dyn as dyn
from torchrec_dyn import checkpoint, serving

EXTREMES = [-(2**63), 2**63 - 1, 0, -1]
UNSEEN = 987_654_321  # in no batch
FUSED = {"compute_kernel": "fused"}


def learning(kind: Any) -> dict[str, Any]:
    return {"optimizer": kind, "learning_rate": 0.1}


def bag(name: str, dim: int, limit: int = 1000, **options: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, embedding_dim=dim, num_embeddings=limit, feature_names=[name], **options
    )


def word(name: str, dim: int, limit: int = 1000) -> EmbeddingConfig:
    return EmbeddingConfig(name=name, embedding_dim=dim, num_embeddings=limit, feature_names=[name])


BAGS = [
    bag("wide", 8),
    bag("spread", 4, data_type=DataType.FP16),
    bag("whole", 8, pooling=PoolingType.MEAN),
]
WORDS = [word("news", 8, 12)]


class Shared(nn.Module):
    """Saved by two ranks: pooled tables, and a sequence table with a life.

    Args:
        is_told: True if the configs name the initializers; a checkpoint has them too.
    """

    names = tuple(config.name for config in (*BAGS, *WORDS))

    def __init__(self, is_told: bool = True) -> None:
        super().__init__()
        starts: dict[str, Any] = {
            "wide": dyn.Uniform(-0.5, 0.5),
            "spread": dyn.Normal(0.0, 0.25),
            "whole": dyn.Constant(0.125),
            "news": dyn.TruncatedNormal(0.0, 0.5, -1.0, 1.0),
        }
        options: dict[str, dict[str, Any]] = {
            "wide": {"seed": 1, "unseen": "initial"},
            "spread": {"seed": -7},
            "news": {
                "admission": dyn.AdmitAfter(2, counters=8),
                "eviction": (dyn.ExpireAfter(time=100), dyn.LeastRecentlyUsed()),
            },
        }
        dynamic = {
            name: dyn.DynamicTableConfig(
                initializer=start if is_told else None, **options.get(name, {})
            )
            for name, start in starts.items()
        }
        self.bags = dyn.DynamicEmbeddingBagCollection(
            BAGS,
            dynamic={name: dynamic[name] for name in ("wide", "spread", "whole")},
            fused_params=learning(EmbOptimType.EXACT_ROWWISE_ADAGRAD),
        )
        self.words = dyn.DynamicEmbeddingCollection(
            WORDS,
            dynamic={"news": dynamic["news"]},
            fused_params=learning(EmbOptimType.ADAM),
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        words = self.words(features).items()
        return self.bags(features).to_dict() | {name: one.values() for name, one in words}


class Alone(nn.Module):
    """Saved by one process, unsharded: the other optimizers, and modules that hold collections."""

    names = ("brain", "empty", "word", "text", "narrow", "pair", "placed")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        rare = dyn.DynamicTableConfig(
            admission=dyn.AdmitWithProbability(0.8), eviction=dyn.LeastFrequentlyUsed(), seed=5
        )
        old = dyn.DynamicTableConfig(eviction=dyn.ExpireAfter(steps=2))
        adagrad = learning(EmbOptimType.EXACT_ADAGRAD)
        self.pooled = dyn.DynamicEmbeddingBagCollection(
            [bag("brain", 4, 12, data_type=DataType.BF16), bag("empty", 4)],
            dynamic={"brain": rare},
            fused_params=adagrad,
        )
        self.word = dyn.DynamicEmbedding(
            4,
            1000,
            name="word",
            padding_idx=0,
            dynamic=old,
            fused_params=learning(EmbOptimType.PARTIAL_ROWWISE_ADAM),
        )
        self.text = dyn.DynamicEmbeddingBag(
            4, 1000, "mean", name="text", fused_params=learning("ADAMW")
        )
        self.narrow = dyn.BlockEmbeddingBagCollection(
            [bag("narrow", 8)], 4, fused_params=learning(EmbOptimType.EXACT_SGD)
        )
        self.pairs = dyn.QuotientRemainderEmbeddingBagCollection(
            [bag("pair", 4)], buckets=2**62, fused_params=learning(EmbOptimType.ADAM)
        )
        self.placed = FeatureProcessedEmbeddingBagCollection(
            dyn.DynamicEmbeddingBagCollection(
                [bag("placed", 4)], is_weighted=True, fused_params=adagrad
            ),
            PositionWeightedModuleCollection({"placed": 3}),
        )
        with torch.no_grad():  # otherwise they are all 1
            for weights in self.placed.split()[0].parameters():
                weights.copy_(torch.tensor([0.5, 0.25, 2.0]))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        pooled = (self.pooled, self.narrow, self.pairs, self.placed)
        found = {name: one for module in pooled for name, one in module(features).to_dict().items()}
        return found | {
            "word": self.word(features["word"]).values(),
            "text": self.text(features["text"]),
        }


def collections_of(model: nn.Module) -> dict[str, Any]:
    """Returns the collections of an unsharded model by path."""
    kinds = (dyn.DynamicEmbeddingBagCollection, dyn.DynamicEmbeddingCollection)
    return {path: one for path, one in model.named_modules() if isinstance(one, kinds)}


def shard(model: nn.Module, plans: Mapping[str, Any]) -> DistributedModelParallel:
    """Returns a model sharded over all ranks: tables by their plan in `plans`, row-wise without a plan."""
    sharders = [
        dyn.DynamicEmbeddingBagCollectionSharder(),
        dyn.DynamicEmbeddingCollectionSharder(),
        dyn.DynamicFeatureProcessedEmbeddingBagCollectionSharder(),
    ]
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for sharder in sharders:
            if type(module) is sharder.module_type and path.rpartition(".")[0] not in found:
                names = sharder.shardable_parameters(module)
                found[path] = construct_module_sharding_plan(
                    module,
                    {name: plans.get(name, row_wise(**FUSED)) for name in names},
                    sharder=sharder,
                    local_size=dist.get_world_size(),
                    world_size=dist.get_world_size(),
                    device_type="cpu",
                )
    return DistributedModelParallel(
        model, plan=ShardingPlan(found), sharders=sharders, device=torch.device("cpu")
    )


def optimizer_of(model: Any) -> Any:
    """Returns the optimizer of all rows."""
    if isinstance(model, DistributedModelParallel):
        return model.fused_optimizer
    each = [(path, one.fused_optimizer) for path, one in collections_of(model).items()]
    return CombinedOptimizer(each)


def state_of(model: Any) -> dict[str, Any]:
    """Returns the state dicts of a model and its optimizer, to save or to load."""
    return {"model": model.state_dict(), "optimizer": optimizer_of(model).state_dict()}


def save(model: Any, path: Path) -> None:
    is_sharded = isinstance(model, DistributedModelParallel)
    dcp.save(state_of(model), checkpoint_id=path, no_dist=not is_sharded)


def load(model: Any, path: Path) -> Any:
    """Loads a model and its optimizer; returns the model."""
    state, is_sharded = state_of(model), isinstance(model, DistributedModelParallel)
    planner = checkpoint.LoadPlanner()
    dcp.load(state, checkpoint_id=path, planner=planner, no_dist=not is_sharded)
    model.load_state_dict(state["model"])
    optimizer_of(model).load_state_dict(state["optimizer"])
    return model


def read_plain(path: Path) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint or a delta, read by DCP alone, without "cells", which are empty."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(one.size, dtype=one.properties.dtype)
        for key, one in saved.items()
        if hasattr(one, "properties") and not key.endswith(".cells")
    }
    dcp.load(found, checkpoint_id=path, no_dist=True)
    return found


def features(bags: Mapping[str, list[list[int]]]) -> KeyedJaggedTensor:
    ids = [number for some in bags.values() for one in some for number in one]
    lengths = [len(one) for some in bags.values() for one in some]
    return KeyedJaggedTensor(
        list(bags), torch.tensor(ids, dtype=torch.int64), lengths=torch.tensor(lengths)
    )


def questions(names: tuple[str, ...]) -> KeyedJaggedTensor:
    """Returns bags of at most two ids, whose sums are bit-equal in any order."""
    bags = [[one] for one in EXTREMES] + [[100], [101, -1], [], [UNSEEN], [30]]
    return features(dict.fromkeys(names, bags))


def answers(model: Any) -> dict[str, Tensor]:
    """Returns a model's outputs for the questions, in evaluation."""
    names = getattr(model, "module", model).names
    with torch.no_grad():
        found = model.eval()(questions(names))
    model.train()
    return {name: one.clone() for name, one in found.items()}


def life(model: Any) -> dict[str, Tensor]:
    """Returns `last_seen` and the counts of ids of "news"; some ids are waiting, some are unknown."""
    words = getattr(model, "module", model).words
    ids = torch.tensor([*EXTREMES, UNSEEN, *range(70), *range(100, 104)])
    return {
        "ids": ids,
        "last_seen": dyn.read_last_seen(words, "news", ids),
        "counts": dyn.read_counts(words, "news", ids),
    }


def served_answers(folder: Path, unseen: str = "zeros") -> dict[str, Tensor]:
    """Returns the outputs of a served directory for the questions."""
    asked = questions(Shared.names)
    bags = serving.ServingEmbeddingBagCollection(folder, BAGS, unseen=unseen)(asked)
    words = serving.ServingEmbeddingCollection(folder, WORDS, unseen=unseen)(asked)
    return bags.to_dict() | {name: one.values() for name, one in words.items()}
