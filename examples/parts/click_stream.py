"""An endless synthetic click log, generated on the fly, in Criteo's format, with predictable labels.

A click is a pure function of (seed, chunk number). So any number of ranks can read the stream, it can be
read again, and it needs no memory. It has three properties of a real log:

* Ids are Zipf distributed: a few ids are in every batch, most ids occur once.
* Items change. One item holds a popularity (1st, 2nd, ..) for `lifetime` clicks. Then a new item with an
  unused id replaces it. Features with few values (a weekday) never change their ids.
* Every id has a hidden effect on the click, a pure function of the id. So an id that occurs again helps to
  predict the click, and a new id does not. If ids shared a row, their effects would be mixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from parts.clicks import NUM_CATEGORICALS, NUM_INTEGERS, Clicks

FOREVER = np.uint64(1) << np.uint64(60)

# Popularities per feature: from 4 to a million, like the 26 columns of the Criteo log.
POPULARITIES = np.array([int(4 * 10 ** (5.4 * i / 25)) for i in range(NUM_CATEGORICALS)])
ZIPF_EXPONENT = 1.1
KEEPS_ITS_IDS_BELOW = 100  # features with fewer popularities than this never get new ids

MISSING_EVERY_THIRD_FEATURE = (
    0.15  # share of empty fields in these features; the other features are always present
)
CLICK_LOGIT = -1.2  # logit of an average click: about one label in four is 1, as in Criteo
EFFECT = 0.45  # standard deviation of the effect of one id on the logit


@dataclass(frozen=True)
class ClickStream:
    """The stream of one seed.

    Attributes:
        seed: seed of the ids and of their effects.
        chunk_size: clicks in a chunk.
        lifetime: number of clicks after which a new item takes over a popularity.
    """

    seed: int = 0
    chunk_size: int = 1024
    lifetime: int = 2_000_000

    def chunk(self, number: int) -> Clicks:
        """Returns the clicks [number * chunk_size, (number + 1) * chunk_size) of the stream."""
        random = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        when = number * self.chunk_size + np.arange(self.chunk_size, dtype=np.uint64)
        ids = self._ids(self._popularity(random), when)
        present = np.ones(ids.shape, dtype=bool)
        present[:, ::3] = random.random(present[:, ::3].shape) >= MISSING_EVERY_THIRD_FEATURE
        integers = np.floor(np.exp(random.normal(1.0, 1.5, (self.chunk_size, NUM_INTEGERS))))
        probability = click_probability(self.seed, integers, ids, present)
        labels = (random.random(self.chunk_size) < probability).astype(np.int64)
        return Clicks(labels=labels, integers=integers, ids=ids, present=present)

    def read(self, first: int, end: int, rank: int = 0, world_size: int = 1) -> Iterator[Clicks]:
        """Yields this rank's chunks among [first, end): chunk number % world size == rank."""
        for number in range(first, end):
            if number % world_size == rank:
                yield self.chunk(number)

    def _popularity(self, random: np.random.Generator) -> np.ndarray:
        """Returns random popularities [B, 26], 0 is the most popular, by Zipf's law with an upper bound.

        Source: the inverse of the distribution function of the bounded Pareto, rounded down.
        """
        uniform = random.random((self.chunk_size, NUM_CATEGORICALS))
        power = 1.0 - ZIPF_EXPONENT
        tail = (POPULARITIES + 1.0) ** power
        return ((1.0 + uniform * (tail - 1.0)) ** (1.0 / power)).astype(np.uint64) - np.uint64(1)

    def _ids(self, popularity: np.ndarray, when: np.ndarray) -> np.ndarray:
        """Returns the [B, 26] ids of the items that hold the popularities at click `when` [B].

        Each popularity has its own phase, so new items appear all the time, not all at once.
        """
        feature = np.arange(NUM_CATEGORICALS, dtype=np.uint64)
        place = mix64((popularity << np.uint64(8)) + feature + mix64(np.uint64(self.seed)))
        lifetime = np.where(KEEPS_ITS_IDS_BELOW > POPULARITIES, FOREVER, np.uint64(self.lifetime))
        generation = (when[:, None] + place % lifetime) // lifetime
        return mix64(place ^ mix64(generation)).view(np.int64)


def click_probability(
    seed: int, integers: np.ndarray, ids: np.ndarray, present: np.ndarray
) -> np.ndarray:
    """Returns the true click probabilities [B], which no model can beat."""
    effects = np.where(present, EFFECT * hidden_effect(seed, ids), 0.0)
    logit = CLICK_LOGIT + effects.sum(axis=1) + 0.2 * (np.log1p(integers[:, 0]) - 1.3)
    return 1.0 / (1.0 + np.exp(-logit))


def hidden_effect(seed: int, ids: np.ndarray) -> np.ndarray:
    """Returns the effect of each id on the logit: mean 0, standard deviation 1, uniform."""
    mixed = mix64(ids.view(np.uint64) ^ mix64(np.uint64(seed) + np.uint64(1)))
    return (mixed / np.float64(2**63) - 1.0) * np.sqrt(3.0)


def mix64(values: np.ndarray | np.uint64) -> np.ndarray:
    """Returns 64 well mixed bits for 64 bits, one to one; for a scalar an array of one number.

    Source: splitmix64, Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    mixed = np.atleast_1d(values) + np.uint64(0x9E3779B97F4A7C15)  # arrays wrap around silently
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
