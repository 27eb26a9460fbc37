"""A trained collection is an argument of a new process, as a static module is, by every way to start one."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import forked
import pytest
import torch
import torch.multiprocessing
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

import torchrec_dyn as dyn

ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1}
IDS = torch.arange(300) * 7919 - 1000


class Model(nn.Module):
    """A pooled and a sequence collection, with and without policies."""

    def __init__(self) -> None:
        super().__init__()
        dynamic = {
            "a": dyn.DynamicTableConfig(on_nonfinite="skip"),
            "b": dyn.DynamicTableConfig(
                admission=dyn.AdmitAfter(2), eviction=dyn.LeastRecentlyUsed()
            ),
        }
        self.pooled = dyn.DynamicEmbeddingBagCollection(
            [
                EmbeddingBagConfig(1000, 4, "a", feature_names=["f"]),
                EmbeddingBagConfig(1000, 8, "b", feature_names=["f"], data_type=DataType.BF16),
            ],
            dynamic=dynamic,
            fused_params=ADAM,
        )
        self.sequence = dyn.DynamicEmbeddingCollection(
            [EmbeddingConfig(1000, 4, "c", feature_names=["f"])], fused_params=ADAM
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids))
        rows = self.sequence(features)["f"].values()
        return torch.cat([self.pooled(features).values(), rows], 1)


def train(model: Model) -> list[float]:
    """Trains two steps; returns numbers that depend on all of the tables."""
    for _ in range(2):
        model.train()(IDS).sin().sum().backward()
    numbers = model.eval()(IDS).double()
    stats = model.pooled.table("b").stats()
    counts = [stats[name] for name in ("rows", "step", "ids_seen", "hits", "waiting")]
    return [float(numbers.sum()), float((numbers**2).sum()), *counts]


def in_child(model: Model, answer: Connection) -> None:
    tables = [
        table for one in (model.pooled, model.sequence) for table in one.local_tables().values()
    ]
    locks = {id(table.lock) for table in tables}
    answer.send((len(locks), train(model)))


@pytest.fixture(params=["file_descriptor", "file_system"])
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(request.param)
    yield request.param
    torch.multiprocessing.set_sharing_strategy(before)


def sent_to_child(model: Model, context: Any) -> Any:
    ours, theirs = context.Pipe()
    process = context.Process(target=in_child, args=(model, theirs), daemon=True)
    process.start()
    theirs.close()
    answer = ours.recv() if ours.poll(60) else None
    process.join()
    return answer


def check(context: Any) -> None:
    model = Model()
    train(model)
    answer = sent_to_child(model, context)
    assert answer == (2, train(model))  # of two collections with a lock each


def test_by_forkserver(strategy: str) -> None:
    check(forked.forkserver())


@pytest.mark.deep
def test_by_spawn() -> None:
    check(torch.multiprocessing.get_context("spawn"))
