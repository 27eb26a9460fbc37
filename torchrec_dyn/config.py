"""DynamicTableConfig: what a user may choose about a dynamic table beyond TorchRec's own config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchrec_dyn.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform


@dataclass(frozen=True)
class DynamicTableConfig:
    """Options of a dynamic table. Frozen, hashable, compared by value.

    Attributes:
        initializer: what a fresh row holds; None takes the table config's own weight_init_min and
            weight_init_max, or uniform in +-1/sqrt(num_embeddings).
        seed: with the table's name and the id it decides the initial rows.
        unseen: what an id without a row reads as in evaluation: "zeros", or "initial" for the row
            it would start with.
        admission: which unseen ids get a row in training; None: all.
        eviction: which ids go when the table is full; None: a full table is an error.
    """

    initializer: Initializer | None = None
    seed: int = 0
    unseen: Literal["zeros", "initial"] = "zeros"
    admission: None = None
    eviction: None = None

    def __post_init__(self) -> None:
        where = "DynamicTableConfig"
        if self.initializer is not None and not isinstance(
            self.initializer, (Uniform, Normal, TruncatedNormal, Constant)
        ):
            raise ValueError(
                f"{where}.initializer: expected Uniform, Normal, TruncatedNormal, Constant or None, "
                f"got {self.initializer!r}."
            )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"{where}.seed: expected an integer, got {self.seed!r}.")
        if self.unseen not in ("zeros", "initial"):
            raise ValueError(f'{where}.unseen: expected "zeros" or "initial", got {self.unseen!r}.')
        for name in ("admission", "eviction"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{where}.{name}: expected None (policies are not built yet), "
                    f"got {getattr(self, name)!r}."
                )
