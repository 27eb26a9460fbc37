"""Ids as pairs of a quotient and a remainder: unsigned, so that every int64 has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.modules import FeatureReader

PairOp = Literal["mult", "add", "concat"]
PAIR_OPS: tuple[PairOp, ...] = get_args(PairOp)


def quotient_and_remainder(ids: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    """Divides ids as unsigned numbers: -1 is 2^64 - 1.

    Args:
        ids: [N] int64.
        divisor: in [1, 2^63).

    Returns:
        quotient: [N] int64, the bits of an unsigned number; beyond 2^63 only with divisor 1.
        remainder: [N] int64 in [0, divisor).
    """
    # Half of the id is not negative, so int64 division is exact. With id = 2 half + bit and
    # half = q m + r the id is 2 q m + (2 r + bit), and 2 r + bit is below 2 m. What could leave int64 is
    # kept from it: `above` is 2 r + bit - m, in [-m, m).
    half, bit = (ids >> 1) & (2**63 - 1), ids & 1
    quotient = torch.div(half, divisor, rounding_mode="floor")
    rest = half - quotient * divisor
    above = rest - (divisor - rest - bit)
    once_more = above >= 0
    return (quotient << 1) | once_more, torch.where(once_more, above, above + divisor)


@dataclass(frozen=True)
class TablePair:
    """The two dynamic tables that stand for one table of a config.

    Table names have no dot, and both tables' names have a suffix: no two can be equal.

    Attributes:
        config: as the user wrote it.
        divisor: remainders are below it.
        op: how a row of each becomes one.
    """

    config: EmbeddingBagConfig
    divisor: int
    op: PairOp

    @property
    def columns(self) -> int:
        """Columns of both tables."""
        return self.config.embedding_dim // (2 if self.op == "concat" else 1)

    @property
    def tables(self) -> tuple[str, str]:
        """Names of the table of quotients and of that of remainders."""
        return f"{self.config.name}_quotient", f"{self.config.name}_remainder"

    @property
    def group(self) -> str:
        """Which collection holds the tables: those of one width are in one."""
        return str(self.columns)

    def features(self, table: str) -> list[str]:
        """Gives the features of one of the two tables, in the order of the config's."""
        return [f"{table}.{feature}" for feature in self.config.feature_names]


def reader_of(pairs: Sequence[TablePair], weighted: bool, where: str) -> FeatureReader:
    """Makes the reader of all features in the order of the tables.

    Args:
        pairs: the tables.
        weighted: whether bags carry weights.
        where: the collection, for messages.
    """
    return FeatureReader(
        [pair.config.feature_names for pair in pairs],
        weighted,
        [f"{where}(table='{pair.config.name}')" for pair in pairs],
    )


class QuotientRemainderIds(nn.Module):
    """Makes, of a batch, what the collections of quotient and remainder tables look up.

    A module without parameters, so that TorchRec's pipelines may run it ahead of the lookup.

    Args:
        pairs: the tables.
        weighted: whether bags carry weights.
        where: the collection, for messages.
    """

    def __init__(self, pairs: Sequence[TablePair], weighted: bool, where: str) -> None:
        super().__init__()
        self._pairs = list(pairs)
        self._where = where
        self._read = reader_of(pairs, weighted, where)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, KeyedJaggedTensor]:
        """Divides all ids.

        Args:
            features: bags of ids.

        Returns:
            By group; of each feature all ids as *one* sequence: where a bag ends does not matter to a
            lookup of rows, and so features may differ in the number of bags.

        Raises:
            ValueError: if a feature is missing, or the tensors do not fit each other.
        """
        features = maybe_td_to_kjt(features, None)
        read = self._read(features)
        if read.varies and features.inverse_indices_or_none() is None:
            raise ValueError(
                f"{self._where}: expected as many bags for each feature, got {read.batch_sizes}. "
                "Pass inverse_indices in the KeyedJaggedTensor."
            )
        keys: dict[str, list[str]] = {pair.group: [] for pair in self._pairs}
        values: dict[str, list[Tensor]] = {pair.group: [] for pair in self._pairs}
        lengths: dict[str, list[int]] = {pair.group: [] for pair in self._pairs}
        position = 0
        for pair in self._pairs:
            counts = read.counts[position : position + len(pair.config.feature_names)]
            first = sum(read.counts[:position])
            ids = read.ids[first : first + sum(counts)]
            for table, numbers in zip(
                pair.tables, quotient_and_remainder(ids, pair.divisor), strict=True
            ):
                keys[pair.group] += pair.features(table)
                values[pair.group].append(numbers)
                lengths[pair.group] += counts
            position += len(counts)
        return {
            group: KeyedJaggedTensor(
                keys=names,
                values=torch.cat(values[group]),
                lengths=torch.tensor(lengths[group], device=read.ids.device),
                stride=1,
            )
            for group, names in keys.items()
        }
