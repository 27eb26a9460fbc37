"""Synthetic views of items by users, generated on the fly. Each id is popular for a limited time.

At any time the numbers of living users and living items are fixed. Their places in the popularity follow
Zipf's law. After `lifetime` batches a new id replaces the id of a place, and the old id never occurs again.
Some ids occur only once, as in real logs: visitors without a cookie, misprints.

Every id has a hidden trait, a pure function of the id. The traits of both ids of a view decide the
probability of a click. So only a trained row helps to predict clicks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from parts.click_stream import hidden_effect, mix64
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

FEATURES = ("user", "item")
ZIPF_EXPONENT = 1.1
SEEN_ONCE = 0.2  # share of the ids of a batch
EFFECT = 1.5  # standard deviation of the trait of one id on the logit


@dataclass(frozen=True)
class Views:
    """One batch.

    Attributes:
        ids: [2, B] int64, users and items.
        labels: [B] float32, 1 for clicked.
        probabilities: [B], the true click probabilities, which no model can beat.
    """

    ids: np.ndarray
    labels: np.ndarray
    probabilities: np.ndarray

    def part(self, rank: int, world_size: int) -> Views:
        """Returns the rank's share of the batch; the shares in the order of ranks are the batch."""
        share = slice(
            len(self.labels) * rank // world_size, len(self.labels) * (rank + 1) // world_size
        )
        return Views(self.ids[:, share], self.labels[share], self.probabilities[share])

    def features(self) -> KeyedJaggedTensor:
        """Returns the ids as TorchRec's input, one id per bag."""
        return KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.from_numpy(self.ids.reshape(-1).copy()),
            lengths=torch.ones(self.ids.size, dtype=torch.int32),
        )


@dataclass(frozen=True)
class DriftingStream:
    """The stream of one seed: batch n is a pure function of seed and n.

    Attributes:
        seed: seed of the ids and of their traits.
        batch_size: views in a batch.
        living: number of living users, and of living items, at a time.
        lifetime: number of batches for which an id keeps its place in the popularity.
    """

    seed: int
    batch_size: int
    living: int
    lifetime: int

    def batch(self, number: int) -> Views:
        """Returns batch `number`, from 0 on."""
        random = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        place = self._places(random.random((len(FEATURES), self.batch_size)))
        ids = self._living_ids(place, number)
        once = random.random(ids.shape) < SEEN_ONCE
        ids[once] = random.integers(-(2**63), 2**63, int(once.sum()), dtype=np.int64)
        logits = EFFECT * hidden_effect(self.seed, ids).sum(axis=0)
        probabilities = 1.0 / (1.0 + np.exp(-logits))
        labels = random.random(self.batch_size) < probabilities
        return Views(ids, labels.astype(np.float32), probabilities)

    def _places(self, uniform: np.ndarray) -> np.ndarray:
        """Returns places for numbers in [0, 1); place 0 is the most popular.

        Source: the inverse of the distribution function of the bounded Pareto, rounded down.
        """
        power = 1.0 - ZIPF_EXPONENT
        tail = (self.living + 1.0) ** power
        return ((1.0 + uniform * (tail - 1.0)) ** (1.0 / power)).astype(np.uint64) - np.uint64(1)

    def _living_ids(self, place: np.ndarray, number: int) -> np.ndarray:
        """Returns the [2, B] ids that hold these places at batch `number`.

        Each place has its own phase, so new ids appear all the time, not all at once.
        """
        feature = np.arange(len(FEATURES), dtype=np.uint64)[:, None]
        holder = mix64((place << np.uint64(8)) + feature + mix64(np.uint64(self.seed)))
        lifetime = np.uint64(self.lifetime)
        generation = (np.uint64(number) + holder % lifetime) // lifetime
        return mix64(holder ^ mix64(generation)).view(np.int64)
