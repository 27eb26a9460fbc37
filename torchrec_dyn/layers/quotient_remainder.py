"""Quotient-remainder embeddings: two small dynamic tables in the place of a large one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.initializers import Uniform
from torchrec_dyn.layers.quotient_remainder_ids import (
    PAIR_OPS,
    PairOp,
    QuotientRemainderIds,
    TablePair,
)
from torchrec_dyn.layers.quotient_remainder_rows import PooledPairs
from torchrec_dyn.modules import (
    DynamicEmbeddingCollection,
    checked_configs,
    dynamic_config_by_table,
    initializer_of,
    number_by_table,
)

# A factor of about one: the product starts as large as the remainder's row, and neither factor starts
# where the gradient of the other one vanishes.
_FACTORS = Uniform(0.5, 1.5)
_MOST_DIVISOR = 2**63 - 1


class QuotientRemainderEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """An embedding bag collection whose rows are put together of two: pool(Q[id // m] op R[id mod m]).

    Ids are divided as unsigned numbers, so any int64 has its own pair (q, r): -1 is 2^64 - 1. Rows are
    put together before pooling: each id has an embedding. Memory is saved where ids share quotients,
    as numbers in [0, V) do: V / m + m rows instead of V. Ids that are spread over 64 bits share none;
    make numbers of them first, e.g. `ids % (m * m)`. The outputs have the names and widths of an
    EmbeddingBagCollection of the same configs.

    Of a table `t` the dynamic tables are `t_quotient` and `t_remainder`. `rows` holds one
    DynamicEmbeddingCollection for all tables of one width, `rows[str(width)]`: shard them with
    DynamicEmbeddingCollectionSharder.

    Args:
        tables: one config per table; `num_embeddings` limits the distinct quotients and remainders.
        buckets: m, one for all tables or a dict by table name, in [1, 2^63).
        op: "mult": the product of the two rows; "add": their sum; "concat": quotient's and remainder's
            row side by side, each half of `embedding_dim` wide.
        is_weighted: whether every id of a bag comes with a weight. Gradients flow to the weights.
        device: where rows live; None: cpu.
        dynamic: how rows start and live; one for all tables, or a dict by the name of a table, for both
            of its tables, or of one of the two, which goes first. Under "mult" rows of quotients start
            as factors, uniform in [0.5, 1.5], unless the dict names their table.
        fused_params: the optimizer of the rows, as of DynamicEmbeddingCollection.
        most_quotients: limit on the rows of the tables of quotients, one for all or a dict by table
            name; None: `num_embeddings`. For numbers in [0, V) it is ceil(V / m); planners price
            tables by their limits.

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
        self.ids = QuotientRemainderIds(pairs, is_weighted, where)
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
        self.pooling = PooledPairs(pairs, is_weighted, where)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Divides the ids, looks up, puts rows together and pools.

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
        """Gives the configs as the user wrote them."""
        return self._configs

    def is_weighted(self) -> bool:
        """Tells whether bags carry weights."""
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
    """Gives each dynamic table its options, with an initializer that suits the *user's* config."""
    names = [pair.config.name for pair in pairs]
    inner = [table for pair in pairs for table in pair.tables]
    if twice := sorted(set(names) & set(inner)):
        raise ValueError(
            f"{where}: expected table names that the quotient and remainder tables {inner} leave "
            f"free, got {twice}. Rename them."
        )
    given = dynamic_config_by_table(dynamic, [*names, *inner], where)
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
    """Makes the collection of the pairs of one width."""
    configs = []
    for pair in pairs:
        # No table holds more rows than there are quotients of 64 bits, or remainders.
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
