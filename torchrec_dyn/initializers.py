"""What a fresh row holds.

Every initializer is a pure function of (seed, table name, id, column): the same id starts with the same
row on any rank, under any plan, in any order. The numbers come from Philox (csrc/philox.h) and, for the
normal ones, the normal quantile function (csrc/initial_rows.h).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Protocol

_CONSTANT, _UNIFORM, _NORMAL = 0, 1, 2
_MOST = (2 - 2**-23) * 2.0**127  # of float32, in which rows are made


class Initializer(Protocol):
    """Describes the distribution of each value of a fresh row."""

    def parameters(self) -> tuple[int, list[float]]:
        """Returns the kind and the six parameters of `ops.init_rows_`."""
        ...


def _check_finite(where: str, **values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not abs(value) <= _MOST:
            raise ValueError(f"{where}.{name}: expected a finite number, got {value!r}.")


def _check_order(where: str, low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"{where}: expected low < high, got {low} and {high}.")


def _check_deviation(where: str, std: float) -> None:
    if not std > 0:
        raise ValueError(f"{where}.std: expected a number > 0, got {std}.")


@dataclass(frozen=True)
class Uniform:
    """Uniform in [low, high)."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_finite("Uniform", low=self.low, high=self.high)
        _check_order("Uniform", self.low, self.high)
        _check_finite("Uniform", **{"high - low": self.high - self.low})

    def parameters(self) -> tuple[int, list[float]]:
        """Returns the kind and the six parameters of `ops.init_rows_`."""
        return _UNIFORM, [self.low, self.high, 0.0, 1.0, 0.0, 1.0]


@dataclass(frozen=True)
class Normal:
    """Normal with the given mean and standard deviation."""

    mean: float
    std: float

    def __post_init__(self) -> None:
        _check_finite("Normal", mean=self.mean, std=self.std)
        _check_deviation("Normal", self.std)

    def parameters(self) -> tuple[int, list[float]]:
        """Returns the kind and the six parameters of `ops.init_rows_`."""
        return _NORMAL, [-math.inf, math.inf, self.mean, self.std, 0.0, 1.0]


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal conditioned on [low, high], absolute bounds as in `torch.nn.init.trunc_normal_`."""

    mean: float
    std: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_finite("TruncatedNormal", mean=self.mean, std=self.std, low=self.low, high=self.high)
        _check_deviation("TruncatedNormal", self.std)
        _check_order("TruncatedNormal", self.low, self.high)
        *_, low_probability, high_probability = self.parameters()[1]
        if not low_probability < high_probability:
            raise ValueError(
                "TruncatedNormal: expected low and high between which the normal has some "
                f"probability, got {self.low} and {self.high} with mean {self.mean}, std {self.std}."
            )

    def parameters(self) -> tuple[int, list[float]]:
        """Returns the kind and the six parameters of `ops.init_rows_`."""
        # Probabilities near 1 have no digits left for the upper tail: there the lower one is mirrored.
        sign = -1.0 if self.low > self.mean else 1.0
        scale = sign * self.std * math.sqrt(2.0)
        ends = [0.5 * math.erfc((self.mean - bound) / scale) for bound in (self.low, self.high)]
        return _NORMAL, [self.low, self.high, self.mean, sign * self.std, min(ends), max(ends)]


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def __post_init__(self) -> None:
        _check_finite("Constant", value=self.value)

    def parameters(self) -> tuple[int, list[float]]:
        """Returns the kind and the six parameters of `ops.init_rows_`."""
        return _CONSTANT, [self.value, self.value, 0.0, 1.0, 0.0, 1.0]


def default_initializer(num_embeddings: int) -> Uniform:
    """Returns TorchRec's default: uniform in +-1/sqrt(num_embeddings).

    Source: torchrec.modules.embedding_configs.BaseEmbeddingConfig.get_weight_init_min and _max.
    """
    bound = math.sqrt(1.0 / num_embeddings)
    return Uniform(-bound, bound)


def table_key(seed: int, table: str, purpose: str) -> int:
    """Returns 64 bits, as int64, that stand for a seed, a table's name and what is drawn.

    Args:
        seed: any integer.
        table: the table's name.
        purpose: at most 16 ASCII letters; streams of different purposes are independent.

    Source: BLAKE2b with an 8 byte digest (RFC 7693), personalised by the purpose.
    """
    text = f"{seed}\0{table}".encode()
    digest = hashlib.blake2b(text, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little", signed=True)
