"""DynamicTableConfig: what a user may choose about a dynamic table beyond TorchRec's own config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchrec_dyn.initializers import (
    Constant,
    FanInitializer,
    Initializer,
    Normal,
    TruncatedNormal,
    Uniform,
)
from torchrec_dyn.policies import Admission, Eviction, check_admission, check_eviction

GradientReduction = Literal["mean_over_ranks", "mean_over_senders", "sum"]


@dataclass(frozen=True)
class DynamicTableConfig:
    """Options of a dynamic table. Frozen, hashable, compared by value.

    Attributes:
        initializer: what a fresh row holds; None takes the table config's own weight_init_min and
            weight_init_max, or uniform in +-1/sqrt(num_embeddings).
        seed: with the table's name and the id it decides the initial rows.
        unseen: what an id without a row reads as, in evaluation and in training while it is not
            admitted: "zeros", or "initial" for the row it would start with.
        admission: which unseen ids get a row in training: AdmitAfter, AdmitWithProbability,
            Never; None: all.
        eviction: which ids lose theirs: LeastRecentlyUsed or LeastFrequentlyUsed when the table is
            full, ExpireAfter by age, or a pair (ExpireAfter, one of the former); None: none, and a
            full table is an error.
        gradient: what the gradients g_r of an id become that W ranks send, each the sum over the id's
            occurrences there: "mean_over_ranks" sum / W, as TorchRec does; "mean_over_senders" sum / the
            number of ranks whose batch has the id; "sum". One process alone sends no gradients:
            all three are the same.
    """

    initializer: Initializer | FanInitializer | None = None
    seed: int = 0
    unseen: Literal["zeros", "initial"] = "zeros"
    admission: Admission | None = None
    eviction: Eviction | None = None
    gradient: GradientReduction = "mean_over_ranks"

    def __post_init__(self) -> None:
        where = "DynamicTableConfig"
        if self.initializer is not None and not isinstance(
            self.initializer, (Uniform, Normal, TruncatedNormal, Constant, FanInitializer)
        ):
            raise ValueError(
                f"{where}.initializer: expected Uniform, Normal, TruncatedNormal, Constant, "
                "XavierUniform, XavierNormal, KaimingUniform, KaimingNormal or None, got "
                f"{self.initializer!r}."
            )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"{where}.seed: expected an integer, got {self.seed!r}.")
        if self.unseen not in ("zeros", "initial"):
            raise ValueError(f'{where}.unseen: expected "zeros" or "initial", got {self.unseen!r}.')
        if self.gradient not in get_args(GradientReduction):
            raise ValueError(
                f'{where}.gradient: expected "mean_over_ranks", "mean_over_senders" or "sum", '
                f"got {self.gradient!r}."
            )
        check_admission(self.admission, f"{where}.admission")
        check_eviction(self.eviction, f"{where}.eviction")

    @property
    def has_life(self) -> bool:
        """Whether any policy is set: such a table keeps of each row when and how often it was seen."""
        return self.admission is not None or self.eviction is not None
