"""A trainer that saves entries, and readers of served rows, for the tests of followers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoint_cases import quietly
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import torchrec_dyn as dyn
from torchrec_dyn import serving
from torchrec_dyn.checkpoint import Checkpoints

TABLES = [
    EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=1000, feature_names=[name])
    for name in ("user", "item")
]
IDS = torch.arange(300)


class Trainer:
    """A model that trains and saves; what it saved of each table as dicts."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.sparse = dyn.DynamicEmbeddingBagCollection(
            TABLES, fused_params={"optimizer": "EXACT_ADAGRAD", "learning_rate": 0.1}
        )
        self.model.over = nn.Linear(2, 1)
        dense = KeyedOptimizerWrapper(
            {f"over.{name}": one for name, one in self.model.over.named_parameters()},
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        self.optimizer = CombinedOptimizer([("sparse", self.model.sparse.fused_optimizer), dense])
        self.checkpoints = Checkpoints(folder, **options)
        self.step = 0

    def train(self, *ids: int) -> None:
        values = torch.tensor(ids * 2)
        features = KeyedJaggedTensor(["user", "item"], values, lengths=torch.ones_like(values))
        self.model.sparse(features).values().sum().backward()
        with torch.no_grad():
            self.model.over.bias += 1

    def save(self) -> Any:
        self.step += 1
        return quietly(self.checkpoints.save, self.model, self.optimizer, step=self.step)

    def rows(self) -> torch.Tensor:
        return rows_of(self.model.sparse.eval())


def rows_of(collection: Any) -> torch.Tensor:
    """The rows of all ids, [300, 8]; zeros for ids without a row."""
    features = KeyedJaggedTensor(["user", "item"], IDS.repeat(2), lengths=torch.ones(600).long())
    with torch.no_grad():
        values = collection(features).values()
    getattr(collection, "train", lambda: None)()
    return values.clone()


def sorted_ids(of_tables: Any) -> dict[str, list[int]]:
    return {name: sorted(ids.tolist()) for name, ids in of_tables.items()}


def served_rows(folder: Path) -> torch.Tensor:
    return rows_of(serving.ServingEmbeddingBagCollection(folder, TABLES))
