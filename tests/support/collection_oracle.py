"""Stock TorchRec collections as the oracle of dynamic collections.

The ids of a test are drawn from a small pool, extreme ids included. The stock collection has one row per
pool entry. It starts with the initial rows of the dynamic collection and gets positions in the pool as ids.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, 2**62, -(10**12)]
POOL = EXTREMES + [7919 * k - 3 for k in range(33)]


class Batches:
    """Draws batches of ids; later batches use more of the pool, so each batch may have new ids."""

    def __init__(self, keys: Sequence[str], seed: int = 0) -> None:
        self.keys = list(keys)
        self._random = random.Random(seed)
        self._reach = 10

    def draw(
        self, size: int | Sequence[int], weighted: bool = False, longest: int = 4
    ) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
        """Returns one batch in two forms: with ids, and with positions in the pool."""
        sizes = [size] * len(self.keys) if isinstance(size, int) else list(size)
        lengths = [self._random.randint(0, longest) for count in sizes for _ in range(count)]
        self._reach = min(len(POOL), self._reach + 6)
        positions = [self._random.randrange(self._reach) for _ in range(sum(lengths))]
        weights = [self._random.uniform(-2.0, 2.0) for _ in positions] if weighted else None
        varies = {} if isinstance(size, int) else {"stride_per_key_per_rank": [[n] for n in sizes]}

        def batch(values: list[int]) -> KeyedJaggedTensor:
            return KeyedJaggedTensor(
                keys=self.keys,
                values=torch.tensor(values, dtype=torch.int64),
                lengths=torch.tensor(lengths, dtype=torch.int64),
                weights=torch.tensor(weights, requires_grad=True) if weighted else None,
                **varies,
            )

        return batch([POOL[position] for position in positions]), batch(positions)


def stock_config(
    config: EmbeddingBagConfig | EmbeddingConfig,
) -> EmbeddingBagConfig | EmbeddingConfig:
    """Returns the config of the same table with one row per pool entry."""
    same = {name: getattr(config, name) for name in ("embedding_dim", "name", "feature_names")}
    if isinstance(config, EmbeddingBagConfig):
        return EmbeddingBagConfig(num_embeddings=len(POOL), pooling=config.pooling, **same)
    return EmbeddingConfig(num_embeddings=len(POOL), **same)


def initial_rows(collection: nn.Module, config: EmbeddingBagConfig | EmbeddingConfig) -> Tensor:
    """Returns the initial rows of the pool, [len(POOL), embedding_dim], read by a forward in evaluation.

    The table must read unseen ids as "initial".
    """
    every = [name for one in _configs(collection) for name in one.feature_names]
    keys = list(dict.fromkeys(every))
    first = config.feature_names[0]
    ids = KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor(POOL),
        lengths=torch.tensor([int(key == first) for key in keys for _ in POOL]),
        weights=torch.ones(len(POOL)),
    )
    was_training = collection.training
    output = collection.eval()(ids)
    collection.train(was_training)
    name = f"{first}@{config.name}" if every.count(first) > 1 else first
    read = output[name]
    return (read if isinstance(read, Tensor) else read.values()).detach().clone()


def copy_initial_rows(collection: nn.Module, stock: nn.Module) -> None:
    """Copies the initial rows of the dynamic collection into the stock collection."""
    for config in _configs(collection):
        stock.get_parameter(f"{_holder(stock)}.{config.name}.weight").data.copy_(
            initial_rows(collection, config)
        )


def assert_same_rows(collection: nn.Module, stock: nn.Module, tolerance: float) -> None:
    """Asserts that each row in use equals its row in the stock table, and that there are more than 10."""
    for config in _configs(collection):
        rows, found = collection.table(config.name).lookup(torch.tensor(POOL))
        assert found.sum() > 10
        assert found.sum() == collection.table(config.name).num_rows
        weight = stock.get_parameter(f"{_holder(stock)}.{config.name}.weight")
        torch.testing.assert_close(rows[found], weight[found], rtol=tolerance, atol=tolerance)


def _configs(collection: nn.Module) -> Sequence[EmbeddingBagConfig | EmbeddingConfig]:
    if hasattr(collection, "embedding_bag_configs"):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def _holder(collection: nn.Module) -> str:
    return "embedding_bags" if hasattr(collection, "embedding_bag_configs") else "embeddings"
