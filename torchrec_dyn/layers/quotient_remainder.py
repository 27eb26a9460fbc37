"""Quotient-remainder embeddings: two small dynamic tables in place of a large one.

`QuotientRemainderEmbeddingBagCollection` runs three parts in turn: `QuotientRemainderIds` divides the ids,
collections look up the rows of quotients and of remainders, `PooledPairs` makes one row of each two and
pools. A `TablePair` is the two tables that replace one table of the user's.

Legend: N ids of a feature, B its bags, D the columns of all outputs together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
    process_pooled_embeddings,
    reorder_inverse_indices,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.initializers import Uniform
from torchrec_dyn.layers.row_pooling import pooled_rows
from torchrec_dyn.modules import (
    DynamicEmbeddingCollection,
    FeatureReader,
    checked_configs,
    dynamic_config_by_table,
    initializer_of,
    number_by_table,
)

PairOp = Literal["mult", "add", "concat"]
PAIR_OPS: tuple[PairOp, ...] = get_args(PairOp)
_MOST_DIVISOR = 2**63 - 1
# A factor of about one: the product starts as large as the remainder's row, and neither factor starts
# where the gradient of the other one vanishes.
_FACTORS = Uniform(0.5, 1.5)


class QuotientRemainderEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """An embedding bag collection that makes each row of two: pool(Q[id // m] op R[id mod m]).

    Ids are divided as unsigned numbers, so any int64 has its own pair (q, r): -1 is 2^64 - 1. The two rows
    become one before pooling: each id has an embedding. Memory is saved where ids share quotients, as
    numbers in [0, V) do: V / m + m rows instead of V. Ids that are spread over 64 bits share no quotient;
    map them to a small range first, e.g. `ids % (m * m)`. The outputs have the names and widths of an
    EmbeddingBagCollection of the same configs.

    A table `t` becomes the dynamic tables `t_quotient` and `t_remainder`. `rows` holds one
    DynamicEmbeddingCollection for all tables of one width, `rows[str(width)]`: shard them with
    DynamicEmbeddingCollectionSharder.

    Args:
        tables: one config per table; `num_embeddings` limits the distinct quotients and remainders.
        buckets: m, one number for all tables or a dict by table name, in [1, 2^63).
        op: "mult": the product of the two rows; "add": their sum; "concat": the quotient's and the
            remainder's row side by side, each half of `embedding_dim` wide.
        is_weighted: whether every id of a bag comes with a weight. Gradients flow to the weights.
        device: where rows live; None: cpu.
        dynamic: how rows start and live; one for all tables, or a dict. Its keys are names of tables, each
            for both dynamic tables, and names of dynamic tables, which have priority. With "mult", rows of
            quotients start as factors, uniform in [0.5, 1.5], unless the dict has their table's name.
        fused_params: the optimizer of the rows, as of DynamicEmbeddingCollection.
        most_quotients: limit on the rows of the tables of quotients, one for all or a dict by table
            name; None: `num_embeddings`. For ids in [0, V) pass ceil(V / m): planners price tables by
            their limits.

    Raises:
        ValueError: if a config, a number or the op is impossible.

    Source: Shi et al., "Compositional Embeddings Using Complementary Partitions for Memory-Efficient
    Recommendation Systems", 2019, section 3 (operations: 4).
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        buckets: int | Mapping[str, int],
        op: PairOp = "mult",
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None = None,
        fused_params: Mapping[str, Any] | None = None,
        most_quotients: int | Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self._configs = checked_configs(tables, EmbeddingBagConfig, where)
        self._is_weighted = is_weighted
        names = [config.name for config in self._configs]
        _check_op(op, self._configs, where)
        divisors = number_by_table(
            buckets, names, dict.fromkeys(names, _MOST_DIVISOR), f"{where}.buckets"
        )
        limits = {config.name: config.num_embeddings for config in self._configs}
        quotients = limits
        if most_quotients is not None:
            quotients = number_by_table(most_quotients, names, limits, f"{where}.most_quotients")
        pairs = [TablePair(config, divisors[config.name], op) for config in self._configs]
        chosen = _dynamic_configs(dynamic, pairs, where)
        read = FeatureReader(
            [config.feature_names for config in self._configs],
            is_weighted,
            [f"{where}(table='{name}')" for name in names],
        )
        self.ids = QuotientRemainderIds(pairs, read, where)
        self.rows = nn.ModuleDict(
            {
                group: _collection(
                    [pair for pair in pairs if pair.group == group],
                    quotients,
                    chosen,
                    device,
                    fused_params,
                )
                for group in dict.fromkeys(pair.group for pair in pairs)
            }
        )
        self.pooling = PooledPairs(pairs, read)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Divides the ids, looks up, makes one row of each two and pools.

        Args:
            features: bags of ids of at least this collection's features. Where features differ in the
                number of bags, inverse_indices must say which bag serves which sample.

        Returns:
            [B, D], one key per feature and table, in the order of the tables; D columns in all.

        Raises:
            ValueError: if a feature is missing, or the tensors do not fit each other.
        """
        ids = self.ids(features)
        rows = {group: collection(ids[group]) for group, collection in self.rows.items()}
        pooled: KeyedTensor = self.pooling(features, rows)
        return pooled

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the configs as the user wrote them."""
        return self._configs

    def is_weighted(self) -> bool:
        """Returns whether bags carry weights."""
        return self._is_weighted


def _check_op(op: str, configs: Sequence[EmbeddingBagConfig], where: str) -> None:
    if op not in PAIR_OPS:
        raise ValueError(f"{where}: expected op among {list(PAIR_OPS)}, got {op!r}.")
    for config in configs:
        if op == "concat" and config.embedding_dim % 2:
            raise ValueError(
                f"{where}(table='{config.name}'): expected an even embedding_dim with op='concat', "
                f"got {config.embedding_dim}."
            )


def _dynamic_configs(
    dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None,
    pairs: Sequence[TablePair],
    where: str,
) -> dict[str, DynamicTableConfig]:
    """Returns the options of each dynamic table, with an initializer for the *user's* config."""
    names = [pair.config.name for pair in pairs]
    tables = [table for pair in pairs for table in pair.tables]
    if twice := sorted(set(names) & set(tables)):
        raise ValueError(
            f"{where}: expected table names that the quotient and remainder tables {tables} leave "
            f"free, got {twice}. Rename them."
        )
    given = dynamic_config_by_table(dynamic, [*names, *tables], where)
    own = set(dynamic) if isinstance(dynamic, Mapping) else set()
    chosen = {}
    for pair in pairs:
        for table, of_quotients in zip(pair.tables, (True, False), strict=True):
            options = given[table] if table in own else given[pair.config.name]
            if of_quotients and pair.op == "mult" and not (table in own and options.initializer):
                options = replace(options, initializer=_FACTORS)
            elif options.initializer is None:
                options = replace(options, initializer=initializer_of(pair.config, options))
            chosen[table] = options
    return chosen


def _collection(
    pairs: Sequence[TablePair],
    quotients: Mapping[str, int],
    dynamic: Mapping[str, DynamicTableConfig],
    device: torch.device | str | None,
    fused_params: Mapping[str, Any] | None,
) -> DynamicEmbeddingCollection:
    """Returns the collection of the pairs of one width."""
    configs = []
    for pair in pairs:
        # No table has more rows than there are quotients of 64-bit ids, or remainders.
        limits = (
            min(quotients[pair.config.name], (2**64 - 1) // pair.divisor + 1),
            min(pair.config.num_embeddings, pair.divisor),
        )
        configs += [
            EmbeddingConfig(
                name=table,
                embedding_dim=pair.columns,
                num_embeddings=limit,
                feature_names=pair.features(table),
                data_type=pair.config.data_type,
            )
            for table, limit in zip(pair.tables, limits, strict=True)
        ]
    return DynamicEmbeddingCollection(
        configs,
        device=device,
        dynamic={config.name: dynamic[config.name] for config in configs},
        fused_params=fused_params,
    )


@dataclass(frozen=True)
class TablePair:
    """The two dynamic tables that replace one table of the user's.

    Attributes:
        config: as the user wrote it.
        divisor: remainders are below it.
        op: makes one row of the two.
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
        """Key of the collection that holds the tables; tables of one width share it."""
        return str(self.columns)

    def features(self, table: str) -> list[str]:
        """Returns the features of one of the two tables, in the order of the config's.

        Table names have no dot, so features of different tables differ.
        """
        return [f"{table}.{feature}" for feature in self.config.feature_names]


class QuotientRemainderIds(nn.Module):
    """Divides the ids of a batch into features of quotients and of remainders.

    It has no parameters: TorchRec's pipelines may run it ahead of the lookup.

    Args:
        pairs: the tables.
        read: reads all features, in the order of the tables.
        where: the collection, for messages.
    """

    def __init__(self, pairs: Sequence[TablePair], read: FeatureReader, where: str) -> None:
        super().__init__()
        self._pairs = list(pairs)
        self._where = where
        self._read = read

    def forward(self, features: KeyedJaggedTensor) -> dict[str, KeyedJaggedTensor]:
        """Divides all ids.

        Args:
            features: bags of ids.

        Returns:
            By group, all ids of each feature as *one* sequence: a lookup of rows needs no bags, and so
            features may differ in their number.

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
    # half = q m + r the id is 2 q m + (2 r + bit), and 2 r + bit is below 2 m. 2 r + bit may not fit into
    # int64, so it is not computed: `above` is 2 r + bit - m, in [-m, m).
    half, bit = (ids >> 1) & (2**63 - 1), ids & 1
    quotient = torch.div(half, divisor, rounding_mode="floor")
    rest = half - quotient * divisor
    above = rest - (divisor - rest - bit)
    once_more = above >= 0
    return (quotient << 1) | once_more, torch.where(once_more, above, above + divisor)


class PooledPairs(nn.Module):
    """Makes one row of the two rows of each id, and pools the rows of a batch.

    Args:
        pairs: the tables.
        read: reads all features, in the order of the tables.
    """

    def __init__(self, pairs: Sequence[TablePair], read: FeatureReader) -> None:
        super().__init__()
        configs = [pair.config for pair in pairs]
        self._read = read
        # Per output: its pair, and the features of the two tables.
        self._outputs = [
            (pair, *of_tables)
            for pair in pairs
            for of_tables in zip(*(pair.features(table) for table in pair.tables), strict=True)
        ]
        self._features = [name for config in configs for name in config.feature_names]
        self._names = [name for names in get_embedding_names_by_table(configs) for name in names]
        self._columns = [config.embedding_dim for config in configs for _ in config.feature_names]

    def forward(
        self, features: KeyedJaggedTensor, rows: Mapping[str, Mapping[str, JaggedTensor]]
    ) -> KeyedTensor:
        """Pools.

        Args:
            features: the batch.
            rows: by group and feature, as the collections return them.

        Returns:
            [B, D], one key per feature and table, in the order of the tables.
        """
        features = maybe_td_to_kjt(features, None)
        read = self._read(features)
        lengths = torch.split(read.lengths, read.batch_sizes)
        weights: Sequence[Tensor | None] = [None] * len(lengths)
        if read.weights is not None:
            weights = torch.split(read.weights, read.counts)
        pooled = [
            pooled_rows(
                _one_row(
                    rows[pair.group][quotient].values(),
                    rows[pair.group][remainder].values(),
                    pair.op,
                ),
                of_bags,
                of_ids,
                pair.config.pooling == PoolingType.MEAN,
            )
            for (pair, quotient, remainder), of_bags, of_ids in zip(
                self._outputs, lengths, weights, strict=True
            )
        ]
        inverse = reorder_inverse_indices(features.inverse_indices_or_none(), self._features)
        return KeyedTensor(
            keys=self._names,
            length_per_key=self._columns,
            values=process_pooled_embeddings(pooled, inverse),
        )


def _one_row(quotients: Tensor, remainders: Tensor, op: PairOp) -> Tensor:
    """Makes one row of the two rows of each id: [N, columns], or twice as wide with "concat"."""
    if op == "mult":
        return quotients * remainders
    if op == "add":
        return quotients + remainders
    return torch.cat([quotients, remainders], dim=1)
