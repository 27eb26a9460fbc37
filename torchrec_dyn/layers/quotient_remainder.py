"""Quotient-remainder embeddings: two small dynamic tables in place of one large table.

`QuotientRemainderIds` divides the ids, collections look up the rows of quotients and remainders, and
`PooledPairs` combines the two rows of each id and pools.

Legend: N ids of a feature, B its bags, D the columns of all outputs together.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.compilers import forward_of_tables
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.initializers import Uniform
from torchrec_dyn.layers.inputs import Part, check_unscored, one_bag_each, pooled_by, read_bags
from torchrec_dyn.modules import (
    DynamicEmbeddingCollection,
    FeatureReader,
    check_unweighted,
    checked_configs,
    dynamic_config_by_table,
    initializer_of,
    number_by_table,
    outputs_by_sample,
    pooled_outputs,
    pooling_of,
)
from torchrec_dyn.name_lists import listed

PairOp = Literal["mult", "add", "concat"]
PAIR_OPS: tuple[PairOp, ...] = get_args(PairOp)
_MOST_DIVISOR = 2**63 - 1
# Factors are near one: the initial product has the size of the remainder's row, and no initial factor is
# zero, so the other factor gets a gradient.
_FACTORS = Uniform(0.5, 1.5)


class QuotientRemainderEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """An embedding bag collection that combines two rows per id: pool(Q[id // m] op R[id mod m]).

    Ids are divided as unsigned numbers, so each int64 has its own pair (q, r): -1 is 2^64 - 1. The two rows
    are combined before pooling, so each id has an embedding. This saves memory if ids share quotients. Ids in
    [0, V) do: V / m + m rows replace V rows. Ids spread over 64 bits do not; map them to a small range first,
    e.g. `ids % (m * m)`. The outputs have the names and widths of an EmbeddingBagCollection with the same
    configs.

    The dynamic tables `t_quotient` and `t_remainder` replace a table `t`. `rows[str(width)]` is the
    DynamicEmbeddingCollection of all tables of one width. Shard these collections with
    DynamicEmbeddingCollectionSharder.

    Args:
        tables: one config per table; `num_embeddings` limits the distinct quotients and remainders.
        buckets: m, one number for all tables or a dict by table name, in [1, 2^63).
        op: "mult": the product of the two rows; "add": their sum; "concat": the quotient's row and the
            remainder's row side by side, each half of `embedding_dim` wide.
        is_weighted: True if every id of a bag has a weight. Weights get gradients.
        device: device of the rows; None: cpu.
        dynamic: options of the tables, one DynamicTableConfig for all tables or a dict. A key of the dict is
            a table's name, for both of its dynamic tables, or the name of a dynamic table, which has
            priority. With "mult", initial rows of quotients are factors, uniform in [0.5, 1.5), unless
            the dict has an initializer for the quotient table's own name.
        fused_params: optimizer of the rows, as in DynamicEmbeddingCollection.
        most_quotients: limit on the rows of a quotient table, one number for all tables or a dict by table
            name; None: `num_embeddings`. For ids in [0, V) pass ceil(V / m), because planners price tables
            by their limits.

    Raises:
        ValueError: if a config, a number or the op is invalid.

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
        self._configs = checked_configs(tables, EmbeddingBagConfig, where, dynamic)
        self._is_weighted = is_weighted
        names = [config.name for config in self._configs]
        _check_op(op, self._configs, where)
        divisors = number_by_table(
            buckets, names, dict.fromkeys(names, _MOST_DIVISOR), f"{where}.buckets"
        )
        quotients = limits = {config.name: config.num_embeddings for config in self._configs}
        if most_quotients is not None:
            quotients = number_by_table(most_quotients, names, limits, f"{where}.most_quotients")
        pairs = [TablePair(config, divisors[config.name], op) for config in self._configs]
        given = dynamic_config_by_table(dynamic, _all_names(pairs, where), where)
        poolings = [pooling_of(config, given[config.name]) for config in self._configs]
        check_unweighted(poolings, is_weighted, where)
        own = set(dynamic) if isinstance(dynamic, Mapping) else set()
        chosen = _dynamic_configs(given, own, pairs, where)
        read = FeatureReader(self._configs, is_weighted, where)
        self.ids = QuotientRemainderIds(pairs, read)
        groups: dict[str, list[TablePair]] = {}
        for pair in pairs:
            groups.setdefault(pair.group, []).append(pair)
        self.rows = nn.ModuleDict(
            {
                group: _collection(members, quotients, chosen, device, fused_params)
                for group, members in groups.items()
            }
        )
        self.pooling = PooledPairs(pairs, poolings, read)

    @forward_of_tables
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Divides the ids, looks up rows, combines the two rows of each id, and pools.

        Args:
            features: bags of ids of at least this collection's features. If features differ in the number
                of bags, inverse_indices must map each sample to its bag.

        Returns:
            [B, D], one key per feature and table, in the order of the tables.

        Raises:
            ValueError: if a feature is missing, or the tensors do not match each other.
        """
        ids = self.ids(features)
        rows = {group: collection(ids[group]) for group, collection in self.rows.items()}
        pooled: KeyedTensor = self.pooling(features, rows)
        return pooled

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the user's configs."""
        return self._configs

    def is_weighted(self) -> bool:
        """Returns True if bags have weights."""
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
    given: Mapping[str, DynamicTableConfig],
    own: Container[str],
    pairs: Sequence[TablePair],
    where: str,
) -> dict[str, DynamicTableConfig]:
    """Returns the options of each dynamic table; the default initializer is that of the *user's* config.

    given: by name of a table or a dynamic table; those of the names `own` have priority.
    """
    chosen = {}
    for pair in pairs:
        quotient, _ = pair.tables
        for table in pair.tables:
            # Pooled here, after the two rows are combined.
            options = (
                given[table] if table in own else replace(given[pair.config.name], pooling=None)
            )
            is_factor = pair.op == "mult" and table == quotient
            if is_factor and not (table in own and options.initializer):
                options = replace(options, initializer=_FACTORS)
            elif options.initializer is None:
                options = replace(options, initializer=initializer_of(pair.config, options))
            check_unscored(options, where)
            chosen[table] = options
    return chosen


def _all_names(pairs: Sequence[TablePair], where: str) -> list[str]:
    names = [pair.config.name for pair in pairs]
    tables = [table for pair in pairs for table in pair.tables]
    if twice := sorted(set(names) & set(tables)):
        raise ValueError(
            f"{where}: expected table names that differ from the quotient and remainder tables "
            f"{listed(tables)}, got {twice}. Rename them."
        )
    return [*names, *tables]


def _collection(
    pairs: Sequence[TablePair],
    quotients: Mapping[str, int],
    dynamic: Mapping[str, DynamicTableConfig],
    device: torch.device | str | None,
    fused_params: Mapping[str, Any] | None,
) -> DynamicEmbeddingCollection:
    """Returns the collection of the pairs of one width."""
    configs, chosen = [], {}
    for pair in pairs:
        # The rows cannot exceed the number of quotients of 64-bit ids, or of remainders.
        limits = (
            min(quotients[pair.config.name], (2**64 - 1) // pair.divisor + 1),
            min(pair.config.num_embeddings, pair.divisor),
        )
        for table, limit in zip(pair.tables, limits, strict=True):
            config = EmbeddingConfig(
                name=table,
                embedding_dim=pair.columns,
                num_embeddings=limit,
                feature_names=pair.features(table),
                data_type=pair.config.data_type,
            )
            configs.append(config)
            uses = (
                replace(use, feature=f"{table}.{use.feature}") for use in dynamic[table].features
            )
            chosen[table] = replace(dynamic[table], features=tuple(uses))
    return DynamicEmbeddingCollection(
        configs, device=device, dynamic=chosen, fused_params=fused_params
    )


@dataclass(frozen=True)
class TablePair:
    """The two dynamic tables that replace one table of the user."""

    config: EmbeddingBagConfig  # the user's
    divisor: int  # m
    op: PairOp

    @property
    def columns(self) -> int:
        """Columns of each of the two tables."""
        return self.config.embedding_dim // (2 if self.op == "concat" else 1)

    @property
    def tables(self) -> tuple[str, str]:
        """Names of the quotient table and of the remainder table."""
        return f"{self.config.name}_quotient", f"{self.config.name}_remainder"

    @property
    def group(self) -> str:
        """Key of the collection that holds the tables; tables of one width share a collection."""
        return str(self.columns)

    def features(self, table: str) -> list[str]:
        """Returns the features of one of the two tables, in the order of the config's features."""
        return [f"{table}.{feature}" for feature in self.config.feature_names]


class QuotientRemainderIds(nn.Module):
    """A module that divides ids into features; it has no parameters, so pipelines may run it ahead."""

    def __init__(self, pairs: Sequence[TablePair], read: FeatureReader) -> None:
        super().__init__()
        self._pairs = list(pairs)
        self._read = read

    def forward(self, features: KeyedJaggedTensor) -> dict[str, KeyedJaggedTensor]:
        """Returns the divided ids of each group, all ids of a feature as a single sequence.

        A lookup of rows needs no bags, so features may differ in their number of bags.
        """
        read = read_bags(features, self._read)
        parts: list[Part] = []
        position = 0
        for pair in self._pairs:
            counts = read.counts[position : position + len(pair.config.feature_names)]
            first = sum(read.counts[:position])
            ids = read.ids[first : first + sum(counts)]
            for table, numbers in zip(
                pair.tables, quotient_and_remainder(ids, pair.divisor), strict=True
            ):
                parts.append(Part(pair.group, pair.features(table), numbers, counts))
            position += len(counts)
        return one_bag_each(parts)


def quotient_and_remainder(ids: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    """Divides ids [N] int64 as unsigned numbers, -1 as 2^64 - 1, by a divisor in [1, 2^63).

    Returns quotients [N], the bits of unsigned numbers, and remainders [N] in [0, divisor).
    """
    # `half` is not negative, so int64 division is exact. With id = 2 half + bit and half = q m + r
    # the id is 2 q m + (2 r + bit), and 2 r + bit is below 2 m. 2 r + bit may not fit into int64, so it is
    # not computed: `above` is 2 r + bit - m, in [-m, m).
    half, bit = (ids >> 1) & (2**63 - 1), ids & 1
    quotient = torch.div(half, divisor, rounding_mode="floor")
    rest = half - quotient * divisor
    above = rest - (divisor - rest - bit)
    once_more = above >= 0
    return (quotient << 1) | once_more, torch.where(once_more, above, above + divisor)


class PooledPairs(nn.Module):
    """A module that combines the two rows of each id and pools the rows of a batch."""

    def __init__(
        self, pairs: Sequence[TablePair], poolings: Sequence[str], read: FeatureReader
    ) -> None:
        super().__init__()
        configs = [pair.config for pair in pairs]
        self._read = read
        # For each output: its pair and its pooling, and the features of the two tables.
        self._outputs = [
            (pair, pooling, *features)
            for pair, pooling in zip(pairs, poolings, strict=True)
            for features in zip(*(pair.features(table) for table in pair.tables), strict=True)
        ]
        self._names, self._columns, self._features = pooled_outputs(configs)

    def forward(
        self, features: KeyedJaggedTensor, rows: Mapping[str, Mapping[str, JaggedTensor]]
    ) -> KeyedTensor:
        """Combines and pools rows, by group and feature: [B, D], in the order of the tables."""
        features = maybe_td_to_kjt(features, None)
        read = self._read(features)
        lengths = torch.split(read.lengths, read.batch_sizes)
        weights: Sequence[Tensor | None] = [None] * len(lengths)
        if read.weights is not None:
            weights = torch.split(read.weights, read.counts)
        pooled = [
            pooled_by(
                pooling,
                _one_row(
                    rows[pair.group][quotient].values(),
                    rows[pair.group][remainder].values(),
                    pair.op,
                ),
                bag_lengths,
                bag_weights,
            )
            for (pair, pooling, quotient, remainder), bag_lengths, bag_weights in zip(
                self._outputs, lengths, weights, strict=True
            )
        ]
        inverse = features.inverse_indices_or_none()
        return KeyedTensor(
            keys=self._names,
            length_per_key=self._columns,
            values=outputs_by_sample(pooled, inverse, self._features),
        )


def _one_row(quotients: Tensor, remainders: Tensor, op: PairOp) -> Tensor:
    """Returns the combined rows, [N, columns], or [N, 2 * columns] with "concat"."""
    if op == "mult":
        return quotients * remainders
    if op == "add":
        return quotients + remainders
    return torch.cat([quotients, remainders], dim=1)
