"""Small static collections, trained by torch's optimizers, to compare `from_static` with."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.optim import RowWiseAdagrad

ROWS = {"a": 12, "b": 30}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "EXACT_SGD": lambda params: torch.optim.SGD(params, lr=0.2),
    "EXACT_ADAGRAD": lambda params: torch.optim.Adagrad(
        params, lr=0.2, eps=1e-3, initial_accumulator_value=0.1
    ),
    "EXACT_ROWWISE_ADAGRAD": lambda params: RowWiseAdagrad(params, lr=0.2, eps=1e-3),
    "ADAM": lambda params: torch.optim.Adam(params, lr=0.05, betas=(0.8, 0.97), eps=1e-4),
    "ADAMW": lambda params: torch.optim.AdamW(params, lr=0.05, betas=(0.8, 0.97), weight_decay=0.0),
}


def ebc(**options: Any) -> EmbeddingBagCollection:
    pooling = PoolingType.SUM if options.get("is_weighted") else PoolingType.MEAN
    tables = [
        EmbeddingBagConfig(ROWS["a"], 8, "a", feature_names=["f", "g"], pooling=pooling),
        EmbeddingBagConfig(ROWS["b"], 4, "b", feature_names=["h"]),
    ]
    return EmbeddingBagCollection(tables, **options)


def batch(collection: nn.Module, draw: random.Random) -> KeyedJaggedTensor:
    """Returns two samples per feature, 6 random ids and then every id once: Adam updates all rows."""
    pooled = isinstance(collection, EmbeddingBagCollection)
    keys = {"f": "a", "g": "a", "h": "b"} if pooled else {"f_a": "a", "f_b": "b"}
    values, lengths = [], []
    for table in keys.values():
        values += [draw.randrange(ROWS[table]) for _ in range(6)] + list(range(ROWS[table]))
        lengths += [6, ROWS[table]]
    weights = torch.tensor([draw.uniform(0.5, 2.0) for _ in values])
    return KeyedJaggedTensor(
        list(keys), torch.tensor(values), lengths=torch.tensor(lengths), weights=weights
    )


def loss_of(collection: nn.Module, features: KeyedJaggedTensor) -> torch.Tensor:
    output = collection(features)
    parts = output.values() if not isinstance(output, dict) else [*output.values()]
    if isinstance(parts, list):
        parts = torch.cat([part.values().flatten() for part in parts])
    return (parts - torch.linspace(-1, 1, parts.numel()).view(parts.shape)).square().sum()


def weights_of(collection: nn.Module) -> dict[str, torch.Tensor]:
    pooled = isinstance(collection, EmbeddingBagCollection)
    tables = collection.embedding_bags if pooled else collection.embeddings
    return {name: table.weight.detach() for name, table in tables.items()}


def assert_same_rows(made: nn.Module, static: nn.Module, exact: bool = True) -> None:
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for name, weight in weights_of(static).items():
        rows, found = made.table(name).lookup(torch.arange(len(weight)))
        assert found.all() and made.table(name).num_rows == len(weight)
        torch.testing.assert_close(rows, weight, **tolerance)
