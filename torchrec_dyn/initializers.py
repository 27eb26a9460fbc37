"""Initializers: the distributions of fresh rows.

A value of a fresh row is a pure function of (seed, table name, id, column): the same id starts with the
same row on any rank, under any plan, in any order. The numbers are from Philox (csrc/philox.h) and, for
normal distributions, the normal quantile function (csrc/storage/initial_rows.h).

The Xavier and Kaiming initializers scale with the width of a row. For a weight [N, D] torch uses the fans
D and N. A dynamic table has a limit but no N, so the scale depends on D only: fan_in = fan_out = D, as for a
square weight. They become Uniform or Normal when a table is created.

Legend: N rows; D = embedding_dim, the width of the whole row, also under column-wise plans.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal

from torch.nn.init import calculate_gain

_CONSTANT, _UNIFORM, _NORMAL = 0, 1, 2
_MOST = (2 - 2**-23) * 2.0**127  # the largest float32: initial rows are computed in float32


def make_numbers_plain(value: Any) -> None:
    """Converts numpy's and other numbers in the fields of a frozen dataclass to Python's."""
    for field in fields(value):
        number = getattr(value, field.name)
        if isinstance(number, Real) and type(number) not in (bool, int, float):
            plain = int(number) if isinstance(number, Integral) else float(number)
            object.__setattr__(value, field.name, plain)


def _check_finite(where: str, **values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not abs(value) <= _MOST:
            raise ValueError(f"{where}.{name}: expected a finite number, got {value!r}.")


def _check_numbers(distribution: Any) -> None:
    """Checks that the fields are finite, `std` above 0 and `low` below `high`, if it has them."""
    make_numbers_plain(distribution)
    where, numbers = type(distribution).__name__, vars(distribution)
    _check_finite(where, **numbers)
    if "std" in numbers and not distribution.std > 0:
        raise ValueError(f"{where}.std: expected a number > 0, got {distribution.std}.")
    if "low" in numbers and not distribution.low < distribution.high:
        raise ValueError(
            f"{where}: expected low < high, got {distribution.low} and {distribution.high}."
        )


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution in [low, high), rounded to the dtype of the rows: `high` may occur."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_finite("Uniform", **{"high - low": self.high - self.low})

    def parameters(self) -> tuple[int, list[float]]:
        """Returns the kind and the six parameters of `ops.init_rows_`."""
        return _UNIFORM, [self.low, self.high, 0.0, 1.0, 0.0, 1.0]


@dataclass(frozen=True)
class Normal:
    """Normal distribution with the given mean and standard deviation."""

    mean: float
    std: float

    def __post_init__(self) -> None:
        _check_numbers(self)

    def parameters(self) -> tuple[int, list[float]]:
        """Returns the kind and the six parameters of `ops.init_rows_`."""
        return _NORMAL, [-math.inf, math.inf, self.mean, self.std, 0.0, 1.0]


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal distribution conditioned on [low, high], absolute bounds as in `torch.nn.init.trunc_normal_`."""

    mean: float
    std: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_numbers(self)
        *_, low_probability, high_probability = self.parameters()[1]
        if not low_probability < high_probability:
            raise ValueError(
                "TruncatedNormal: expected low and high between which the normal has some "
                f"probability, got {self.low} and {self.high} with mean {self.mean}, std {self.std}."
            )

    def parameters(self) -> tuple[int, list[float]]:
        """Returns the kind and the six parameters of `ops.init_rows_`."""
        # Probabilities near 1 lose the digits of the upper tail: bounds above the mean are mirrored.
        sign = -1.0 if self.low > self.mean else 1.0
        scale = sign * self.std * math.sqrt(2.0)
        ends = [0.5 * math.erfc((self.mean - bound) / scale) for bound in (self.low, self.high)]
        return _NORMAL, [self.low, self.high, self.mean, sign * self.std, min(ends), max(ends)]


@dataclass(frozen=True)
class Constant:
    """One value for all columns of all rows."""

    value: float

    def __post_init__(self) -> None:
        _check_numbers(self)

    def parameters(self) -> tuple[int, list[float]]:
        """Returns the kind and the six parameters of `ops.init_rows_`."""
        return _CONSTANT, [self.value, self.value, 0.0, 1.0, 0.0, 1.0]


def default_initializer(num_embeddings: int) -> Uniform:
    """Returns TorchRec's default: uniform in +-1/sqrt(num_embeddings) (BaseEmbeddingConfig)."""
    bound = math.sqrt(1.0 / num_embeddings)
    return Uniform(-bound, bound)


def table_key(seed: int, table: str, purpose: str) -> int:
    """Returns an int64 key for a seed, a table's name and a purpose of at most 16 ASCII letters."""
    # BLAKE2b with an 8 byte digest (RFC 7693): keys of different purposes give independent numbers.
    text = f"{seed}\0{table}".encode()
    digest = hashlib.blake2b(text, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little", signed=True)


def _check_gain(xavier: Any) -> None:
    make_numbers_plain(xavier)
    gain = xavier.gain
    if not isinstance(gain, (int, float)) or not math.isfinite(gain) or not gain > 0:
        where = type(xavier).__name__
        raise ValueError(f"{where}.gain: expected a finite number > 0, got {gain!r}.")


@dataclass(frozen=True)
class XavierUniform:
    """Uniform distribution in +-gain sqrt(6 / (D + D)).

    Source: Glorot, Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    AISTATS 2010; `torch.nn.init.xavier_uniform_` for a weight [D, D].

    Attributes:
        gain: factor of the bounds, above 0.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        _check_gain(self)

    def for_dimension(self, embedding_dim: int) -> Uniform:
        """Returns the Uniform for rows of `embedding_dim` columns."""
        bound = self.gain * math.sqrt(6.0 / (embedding_dim + embedding_dim))
        return Uniform(-bound, bound)


@dataclass(frozen=True)
class XavierNormal:
    """Normal distribution with mean 0 and standard deviation gain sqrt(2 / (D + D)).

    Source: as for XavierUniform; `torch.nn.init.xavier_normal_` for a weight [D, D].

    Attributes:
        gain: factor of the standard deviation, above 0.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        _check_gain(self)

    def for_dimension(self, embedding_dim: int) -> Normal:
        """Returns the Normal for rows of `embedding_dim` columns."""
        return Normal(0.0, self.gain * math.sqrt(2.0 / (embedding_dim + embedding_dim)))


def _gain_of(kaiming: Any) -> float:
    """Returns torch's gain of the nonlinearity, sqrt(2 / (1 + a^2)) for "leaky_relu"."""
    where = type(kaiming).__name__
    if kaiming.mode not in ("fan_in", "fan_out"):
        raise ValueError(f'{where}.mode: expected "fan_in" or "fan_out", got {kaiming.mode!r}.')
    # So that a * a does not overflow.
    if not isinstance(kaiming.a, (int, float)) or not abs(kaiming.a) < 1e154:
        raise ValueError(f"{where}.a: expected a finite number below 1e154, got {kaiming.a!r}.")
    try:
        return float(calculate_gain(kaiming.nonlinearity, float(kaiming.a)))
    except ValueError:
        raise ValueError(
            f"{where}.nonlinearity: expected a name that torch.nn.init.calculate_gain accepts, e.g. "
            f'"relu" or "leaky_relu", got {kaiming.nonlinearity!r}.'
        ) from None


def _check_kaiming(kaiming: Any) -> None:
    make_numbers_plain(kaiming)
    _gain_of(kaiming)


@dataclass(frozen=True)
class KaimingUniform:
    """Uniform distribution in +-g sqrt(3 / D).

    g is the gain of the nonlinearity, by default sqrt(2 / (1 + a^2)).

    Source: He, Zhang, Ren, Sun, "Delving deep into rectifiers", ICCV 2015;
    `torch.nn.init.kaiming_uniform_` for a weight [D, D].

    Attributes:
        a: negative slope of "leaky_relu"; ignored for other nonlinearities.
        mode: "fan_in" or "fan_out", as in torch; both are D.
        nonlinearity: a name that `torch.nn.init.calculate_gain` accepts.
    """

    a: float = 0.0
    mode: Literal["fan_in", "fan_out"] = "fan_in"
    nonlinearity: str = "leaky_relu"

    def __post_init__(self) -> None:
        _check_kaiming(self)

    def for_dimension(self, embedding_dim: int) -> Uniform:
        """Returns the Uniform for rows of `embedding_dim` columns."""
        bound = _gain_of(self) * math.sqrt(3.0 / embedding_dim)
        return Uniform(-bound, bound)


@dataclass(frozen=True)
class KaimingNormal:
    """Normal distribution with mean 0 and standard deviation g / sqrt(D); the rest as KaimingUniform.

    Source: as for KaimingUniform; `torch.nn.init.kaiming_normal_` for a weight [D, D].
    """

    a: float = 0.0
    mode: Literal["fan_in", "fan_out"] = "fan_in"
    nonlinearity: str = "leaky_relu"

    def __post_init__(self) -> None:
        _check_kaiming(self)

    def for_dimension(self, embedding_dim: int) -> Normal:
        """Returns the Normal for rows of `embedding_dim` columns."""
        return Normal(0.0, _gain_of(self) / math.sqrt(embedding_dim))


Initializer = Uniform | Normal | TruncatedNormal | Constant
FanInitializer = XavierUniform | XavierNormal | KaimingUniform | KaimingNormal


def for_dimension(initializer: Initializer | FanInitializer, embedding_dim: int) -> Initializer:
    """Returns the initializer for rows of `embedding_dim` columns: Uniform or Normal for a FanInitializer."""
    if isinstance(initializer, FanInitializer):
        return initializer.for_dimension(embedding_dim)
    return initializer
