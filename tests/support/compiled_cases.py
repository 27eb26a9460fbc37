"""Served tables with a dense part, and a delta with which their maps and rows grow."""

from __future__ import annotations

from pathlib import Path

import torch
from serving_cases import Plain, bag_configs, save, save_delta
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from torchrec_dyn import serving

A = Plain("a b", 16).with_random(range(-50, 50))
B = Plain("b", 16).with_random([2**63 - 1, -(2**63), 7, 9], seed=1)
EMPTY = Plain("c", 128)
GROWN = A.with_random(range(20, 2000), seed=2).without(range(-50, -40))
FILLED = EMPTY.with_random(range(5), seed=3)
IDS = [*range(-60, 60), 1999, 2**63 - 1, -(2**63)]
FEATURES = {"a b": ["f1", "f2"], "b": ["f2"], "c": ["f3"]}
COLUMNS = 3 * 16 + 128


def configs_of() -> list[EmbeddingBagConfig]:
    """Returns the configs of the three tables; one of these has mean pooling."""
    return bag_configs(A, B, EMPTY, features=FEATURES, pooling={"b": PoolingType.MEAN})


class Scores(nn.Module):
    """A served collection with a dense part, whose output is the probabilities and the pooled rows."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        self.bottom = nn.Linear(3, 4)
        self.top = nn.Sequential(nn.Linear(4 + COLUMNS, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense, features):
        pooled = self.ebc(features).values()
        return self.top(torch.cat([self.bottom(dense), pooled], 1)).sigmoid(), pooled


def built(folder: Path, dtype: torch.dtype) -> Path:
    save(folder / "checkpoint", A, B, EMPTY)
    serving.build(folder / "checkpoint", folder / "served", rows=dtype)
    return folder / "served"


def grow(served: Path) -> None:
    """Applies a delta with which the map and the rows of a table grow, and an empty table gets rows."""
    save_delta(served.parent / "delta", [A, B, EMPTY], [GROWN, B, FILLED])
    serving.apply_delta(served, served.parent / "delta")
