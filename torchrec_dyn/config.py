"""DynamicTableConfig: the options of a dynamic table beyond TorchRec's own config."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torchrec_dyn.initializers import (
    FanInitializer,
    Initializer,
    make_numbers_plain,
)
from torchrec_dyn.own_policies import OwnEviction, OwnPolicy
from torchrec_dyn.policies import (
    Admission,
    Counting,
    Eviction,
    LowestScore,
    check_admission,
    check_eviction,
    replacement_of,
)

OnNonfinite = Literal["write", "skip", "error"]  # numbered as in csrc/lookup/row_update.h
GradientReduction = Literal["mean_over_ranks", "mean_over_senders", "sum"]


@dataclass(frozen=True)
class FeatureUse:
    """The use of one feature's ids in training: they may insert, count and train.

    By default they do all three. If several features have the same id in a batch, the id gets a row if any of
    them inserts; the row is scored if any of them counts, and updated with the gradients of those that train.
    Evaluation changes nothing in any case.

    Attributes:
        feature: name of the feature.
        inserts: True if an id without a row may get a row. If False, the id reads as the table's `unseen`
            specifies, gets no gradient and does not wait for admission, unless another feature of the same
            batch inserts it.
        counts: True if occurrences count, in the last_seen and count of a row and for admission. If False, a
            row that no other feature has seen may expire, or be evicted in the very step that reads it; the
            id then reads as unseen.
        trains: True if gradients update the rows.
    """

    feature: str
    inserts: bool = True
    counts: bool = True
    trains: bool = True

    def __post_init__(self) -> None:
        where = "FeatureUse"
        if not isinstance(self.feature, str) or not self.feature:
            raise ValueError(
                f"{where}.feature: expected the name of a feature, got {self.feature!r}."
            )
        for name in ("inserts", "counts", "trains"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"{where}.{name}: expected True or False, got {getattr(self, name)!r}."
                )


@dataclass(frozen=True)
class DynamicTableConfig:
    """Options of a dynamic table. Frozen, hashable, compared by value.

    Attributes:
        initializer: distribution of initial rows, in place of the table config's init_fn; None: uniform
            between the table config's weight_init_min and weight_init_max, by default
            +-1/sqrt(num_embeddings).
        seed: seed of the initial rows, of the draws of AdmitWithProbability, and of stochastic rounding.
            All of these also depend on the table's name and on the id.
        unseen: value of an id without a row, in evaluation and, until the id is admitted, in training:
            "zeros", or "initial" for the initial row that the id would get.
        admission: policy for unseen ids in training: AdmitAfter, AdmitWithProbability, Never or an
            OwnAdmission; None: every unseen id gets a row.
        eviction: policy for removing rows: LeastRecentlyUsed, LeastFrequentlyUsed, LowestScore or an
            OwnEviction when the table is full, ExpireAfter by age, or a pair (ExpireAfter, another of these
            policies); None: no row is evicted, and a full table is an error.
        gradient: reduction of an id's gradients over W ranks. Each rank sends the sum over its own
            occurrences of the id. "mean_over_ranks": sum over ranks / W, as in TorchRec;
            "mean_over_senders": sum / number of ranks whose batch has the id; "sum": the sum. Without
            sharding all three are the same.
        on_nonfinite: what to do if an update would make a stored weight or the optimizer state of a row NaN
            or infinite. "write": the update is written, as in FBGEMM. "skip": the row stays unchanged; this
            is decided for each column shard. "error": no row changes in the table or in the tables that are
            updated with it, and backward raises RuntimeError at its end (on a GPU, the next forward raises
            it). stats()["nonfinite"] counts the rows that were not written.
        features: a FeatureUse for each feature that does not insert, count or train, each feature at most
            once; all other features do all three.
        pooling: of a table of a pooled collection without weights: "max" for the largest value of each column
            in each bag, as torch.nn.EmbeddingBag(mode="max"); None: as the pooling of the table's config.
        storage: where rows and their optimizer state are stored. None: in the memory of the table's device;
            HostMemory(gpu_rows): of a table on a GPU, in the host's memory, with a cache on the GPU;
            MappedFiles(directory): in files on a disk, on the CPU only.
    """

    initializer: Initializer | FanInitializer | None = None
    seed: int = 0
    unseen: Literal["zeros", "initial"] = "zeros"
    admission: Admission | None = None
    eviction: Eviction | None = None
    gradient: GradientReduction = "mean_over_ranks"
    on_nonfinite: OnNonfinite = "write"
    features: tuple[FeatureUse, ...] = ()
    storage: HostMemory | MappedFiles | None = None
    pooling: Literal["max"] | None = None

    def __post_init__(self) -> None:
        where = "DynamicTableConfig"
        make_numbers_plain(self)
        if not isinstance(self.initializer, Initializer | FanInitializer | None):
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
        if self.on_nonfinite not in get_args(OnNonfinite):
            raise ValueError(
                f'{where}.on_nonfinite: expected "write", "skip" or "error", got {self.on_nonfinite!r}.'
            )
        if self.pooling not in (None, "max"):
            raise ValueError(
                f'{where}.pooling: expected "max" or None, got {self.pooling!r}. '
                "Sums and means are the `pooling` of an EmbeddingBagConfig."
            )
        if not isinstance(self.storage, HostMemory | MappedFiles | None):
            raise ValueError(
                f"{where}.storage: expected HostMemory, MappedFiles or None, got {self.storage!r}. For rows "
                "beyond a GPU's memory give HostMemory(gpu_rows), for rows on a disk MappedFiles(path)."
            )
        _check_features(self.features, f"{where}.features")
        check_admission(self.admission, f"{where}.admission")
        check_eviction(self.eviction, f"{where}.eviction")

    @property
    def has_life(self) -> bool:
        """True if any policy is set; such a table keeps a score (last_seen, count) for each row."""
        return self.admission is not None or self.eviction is not None

    @property
    def scores_weights(self) -> bool:
        """True if a training batch must have weights, by which the table scores its ids (LowestScore)."""
        return isinstance(replacement_of(self.eviction), LowestScore)

    @property
    def reads_rows(self) -> bool:
        """True if the user's own eviction policy reads whole rows, which column shards do not have."""
        replacement = replacement_of(self.eviction)
        return isinstance(replacement, OwnEviction) and replacement.reads_rows

    @property
    def saved(self) -> dict[str, Any]:
        """The options that checkpoints contain: `pooling`, and names and versions of own policies."""
        both = {"admission": self.admission, "eviction": replacement_of(self.eviction)}
        own = {kind: policy.label for kind, policy in both.items() if isinstance(policy, OwnPolicy)}
        saved = {"pooling": self.pooling, "policies": own}
        return {name: value for name, value in saved.items() if value}

    @property
    def counts_waiting(self) -> bool:
        """True if unseen ids wait for admission (AdmitAfter, OwnAdmission), each with a counter."""
        return isinstance(self.admission, Counting)


def _check_features(features: tuple[FeatureUse, ...], where: str) -> None:
    if not isinstance(features, tuple) or not all(isinstance(use, FeatureUse) for use in features):
        raise ValueError(f"{where}: expected a tuple of FeatureUse, got {features!r}.")
    names = [use.feature for use in features]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{where}: expected one FeatureUse for a feature, got {names.count(name)} for '{name}'."
            )


@dataclass(frozen=True)
class MappedFiles:
    """Storage for a table on the CPU: rows and optimizer state in scratch files that are mapped into memory.

    The operating system reads a page when a row in it is used, and writes it back; memory is its cache. The
    id map, scores and counters stay in memory. Numbers, policies and checkpoints are the same as for a table
    in memory. The files have no name, so nothing is left on the disk, however the process ends.

    If the disk fails while a page is read, the signal SIGBUS ends the process, as it would for bad memory.

    Attributes:
        directory: an existing directory on ext4, xfs or tmpfs, the same path on each rank. Several ranks and
            tables may share it. It is not saved in checkpoints.
    """

    directory: str

    def __post_init__(self) -> None:
        where = "MappedFiles.directory"
        given = self.directory
        if isinstance(given, os.PathLike):
            object.__setattr__(self, "directory", os.fspath(given))
        if not isinstance(self.directory, str) or not os.path.isabs(self.directory):
            raise ValueError(
                f"{where}: expected the absolute path of a directory, got {given!r}. "
                "Give a directory on a local disk, such as '/mnt/nvme/scratch'."
            )


@dataclass(frozen=True)
class HostMemory:
    """Storage for a table on a GPU: rows and optimizer state in the host's memory, which the GPU reads.

    The rows that were used last are in the GPU's memory, too: a training forward loads the rows of its batch,
    in place of the rows that no batch has used for the longest time, which are written back. What finds no
    place is read and updated in the host's memory. So any number of `gpu_rows` gives the same numbers, and
    only the time differs. The id map, scores, counters and marks stay in the GPU's memory. Without effect for
    a table on the CPU.

    Attributes:
        gpu_rows: rows of the whole table that have a place in the memory of GPUs, at least 1. Ranks that
            share the rows of a table have even shares of them.
    """

    gpu_rows: int

    def __post_init__(self) -> None:
        given = self.gpu_rows
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise ValueError(
                f"HostMemory.gpu_rows: expected at least 1, got {given!r}. "
                "Give the rows that the GPUs have memory for; table_size has their bytes."
            )
