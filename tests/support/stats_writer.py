"""A stand-in for TensorBoard's writer, and a small model whose stats it gets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

from torchrec_dyn import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    DynamicTableConfig,
)


class Writer:
    """Stands for TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Keeps what it gets."""
        self.scalars.append((tag, scalar_value, global_step))

    def steps(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one name, in the order of arrival."""
        return [(step, value) for tag, value, step in self.scalars if tag == name]


class Towers(nn.Module):
    """Three tables in two collections, one of them deep inside."""

    def __init__(self, dynamic: DynamicTableConfig | None = None) -> None:
        super().__init__()
        common: dict[str, Any] = {"embedding_dim": 4, "num_embeddings": 50}
        bags = [
            EmbeddingBagConfig(name=name, feature_names=[name], **common)
            for name in ("user", "item")
        ]
        words = [EmbeddingConfig(name="word", feature_names=["user"], **common)]
        options: dict[str, Any] = {"fused_params": {"learning_rate": 0.1}}
        if dynamic is not None:
            options["dynamic"] = dynamic
        self.deep = nn.ModuleDict({"ebc": DynamicEmbeddingBagCollection(bags, **options)})
        self.ec = DynamicEmbeddingCollection(words, **options)
        self.ordinary = nn.Linear(2, 2)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Returns what both give."""
        return self.deep["ebc"](features), self.ec(features)


def features(*ids: int) -> KeyedJaggedTensor:
    lengths = torch.tensor([len(ids), 1])
    return KeyedJaggedTensor(["user", "item"], torch.tensor([*ids, 7]), lengths=lengths)
