"""Initial rows scaled by the width of a row: Xavier's and Kaiming's.

torch takes the fans of a weight [N, D] to be D and N. A row is made alone and its table has no N but a
limit, so nothing but D may decide: fan_in = fan_out = D, as of a square weight [D, D]. (ReCIS takes the
fans of the block of rows that it allocates, so that there the scale depends on the block's size.)

They become Uniform or Normal when a table is made. So the core knows two kinds, a checkpoint names
those, and whatever reads it needs nothing else.

Legend: N rows, D = embedding_dim, the whole row's under column-wise plans too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch.nn.init import calculate_gain

from torchrec_dyn.initializers import Initializer, Normal, Uniform


def _check_gain(where: str, gain: float) -> None:
    if not isinstance(gain, (int, float)) or not math.isfinite(gain) or not gain > 0:
        raise ValueError(f"{where}.gain: expected a finite number > 0, got {gain!r}.")


def _kaiming_gain(where: str, a: float, mode: str, nonlinearity: str) -> float:
    """Returns torch's gain of a nonlinearity, sqrt(2 / (1 + a^2)) for "leaky_relu"."""
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f'{where}.mode: expected "fan_in" or "fan_out", got {mode!r}.')
    if not isinstance(a, (int, float)) or not abs(a) < 1e154:  # its square is a float
        raise ValueError(f"{where}.a: expected a finite number below 1e154, got {a!r}.")
    try:
        return float(calculate_gain(nonlinearity, float(a)))  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(
            f"{where}.nonlinearity: expected one that torch.nn.init.calculate_gain knows, e.g. "
            f'"relu" or "leaky_relu", got {nonlinearity!r}.'
        ) from None


@dataclass(frozen=True)
class XavierUniform:
    """Uniform in +-gain sqrt(6 / (D + D)).

    Source: Glorot, Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    AISTATS 2010; torch.nn.init.xavier_uniform_ of a weight [D, D].
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        _check_gain("XavierUniform", self.gain)

    def for_dimension(self, embedding_dim: int) -> Uniform:
        """Returns it for rows of `embedding_dim` columns."""
        bound = self.gain * math.sqrt(6.0 / (embedding_dim + embedding_dim))
        return Uniform(-bound, bound)


@dataclass(frozen=True)
class XavierNormal:
    """Normal with mean 0 and standard deviation gain sqrt(2 / (D + D)).

    Source: as XavierUniform; torch.nn.init.xavier_normal_ of a weight [D, D].
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        _check_gain("XavierNormal", self.gain)

    def for_dimension(self, embedding_dim: int) -> Normal:
        """Returns it for rows of `embedding_dim` columns."""
        return Normal(0.0, self.gain * math.sqrt(2.0 / (embedding_dim + embedding_dim)))


@dataclass(frozen=True)
class KaimingUniform:
    """Uniform in +-g sqrt(3 / D), g the gain of the nonlinearity: sqrt(2 / (1 + a^2)) as it stands.

    Source: He, Zhang, Ren, Sun, "Delving deep into rectifiers", ICCV 2015; torch.nn.init.kaiming_uniform_ of
    a weight [D, D].

    Attributes:
        a: negative slope of "leaky_relu"; other nonlinearities have none.
        mode: "fan_in" or "fan_out", as in torch; both are D.
        nonlinearity: one of torch.nn.init.calculate_gain.
    """

    a: float = 0.0
    mode: Literal["fan_in", "fan_out"] = "fan_in"
    nonlinearity: str = "leaky_relu"

    def __post_init__(self) -> None:
        _kaiming_gain("KaimingUniform", self.a, self.mode, self.nonlinearity)

    def for_dimension(self, embedding_dim: int) -> Uniform:
        """Returns it for rows of `embedding_dim` columns."""
        gain = _kaiming_gain("KaimingUniform", self.a, self.mode, self.nonlinearity)
        bound = gain * math.sqrt(3.0 / embedding_dim)
        return Uniform(-bound, bound)


@dataclass(frozen=True)
class KaimingNormal:
    """Normal with mean 0 and standard deviation g / sqrt(D), g the gain of the nonlinearity.

    Source: as KaimingUniform; torch.nn.init.kaiming_normal_ of a weight [D, D].

    Attributes:
        a: as of KaimingUniform.
        mode: likewise.
        nonlinearity: likewise.
    """

    a: float = 0.0
    mode: Literal["fan_in", "fan_out"] = "fan_in"
    nonlinearity: str = "leaky_relu"

    def __post_init__(self) -> None:
        _kaiming_gain("KaimingNormal", self.a, self.mode, self.nonlinearity)

    def for_dimension(self, embedding_dim: int) -> Normal:
        """Returns it for rows of `embedding_dim` columns."""
        gain = _kaiming_gain("KaimingNormal", self.a, self.mode, self.nonlinearity)
        return Normal(0.0, gain / math.sqrt(embedding_dim))


FanInitializer = XavierUniform | XavierNormal | KaimingUniform | KaimingNormal


def for_dimension(initializer: Initializer | FanInitializer, embedding_dim: int) -> Initializer:
    """Gives the initializer of rows of `embedding_dim` columns: one that depends on nothing else."""
    if isinstance(initializer, FanInitializer):
        return initializer.for_dimension(embedding_dim)
    return initializer
