"""Rows of a quotient and of a remainder become one row per id; these are pooled.

Letters: N ids of a feature, B its bags, D the columns of all outputs together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import (
    get_embedding_names_by_table,
    process_pooled_embeddings,
    reorder_inverse_indices,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.layers.quotient_remainder_ids import PairOp, TablePair, reader_of
from torchrec_dyn.layers.row_pooling import pooled_rows


def paired(quotients: Tensor, remainders: Tensor, op: PairOp) -> Tensor:
    """Makes one row per id of two.

    Args:
        quotients: [N, columns], rows of the ids' quotients.
        remainders: [N, columns], rows of their remainders.
        op: "mult", "add" or "concat".

    Returns:
        [N, columns], or twice as wide with "concat".
    """
    if op == "mult":
        return quotients * remainders
    if op == "add":
        return quotients + remainders
    return torch.cat([quotients, remainders], dim=1)


class PooledPairs(nn.Module):
    """Pools the pairs of rows that were looked up for a batch.

    Args:
        pairs: the tables.
        weighted: whether bags carry weights.
        where: the collection, for messages.
    """

    def __init__(self, pairs: Sequence[TablePair], weighted: bool, where: str) -> None:
        super().__init__()
        configs = [pair.config for pair in pairs]
        self._read = reader_of(pairs, weighted, where)
        # Per output: its pair, and the features of the two tables that it comes of.
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
            rows: by group and feature, as the collections gave them.

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
                paired(
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
