"""Block embeddings: narrow dynamic tables, and a projection per table that widens the pooled rows.

Legend: V rows, b columns of a narrow table, E columns of its outputs, B bags per feature, D the output
columns of all features together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_dyn.compilers import forward_of_tables
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.modules import (
    DynamicEmbeddingBagCollection,
    checked_configs,
    number_by_table,
    pooled_outputs,
)


class BlockEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """An embedding bag collection with rows of `block_dim` columns and outputs of `embedding_dim`.

    y = L pool(W[ids]) with W [V, b] a dynamic table and L [E, b] a parameter. Pooling is linear, so this
    equals pooling the projected rows. It saves V (E - b) - b E numbers compared with rows of full width.
    The outputs have the names and widths of an EmbeddingBagCollection with the same configs.

    `rows` is the DynamicEmbeddingBagCollection of the narrow tables: shard it with
    DynamicEmbeddingBagCollectionSharder. `projections` has ordinary parameters: DistributedModelParallel
    averages their gradients over the ranks, and the user's dense optimizer updates them.

    Args:
        tables: one config per table; `embedding_dim` is the width of the outputs.
        block_dim: columns of the rows, one number for all tables or a dict by table name, from 1 to
            `embedding_dim`; a table of full width has no projection.
        is_weighted: True if every id of a bag has a weight. Weights get gradients.
        device: device of rows and projections; None: cpu.
        dynamic: options of the tables, one DynamicTableConfig for all tables or a dict by table name.
        fused_params: optimizer of the rows, as in DynamicEmbeddingBagCollection.

    Raises:
        ValueError: if a config or a block_dim is invalid.

    Source: Ginart et al., "Mixed Dimension Embeddings with Application to Memory-Efficient
    Recommendation Systems", 2019.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        block_dim: int | Mapping[str, int],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None = None,
        fused_params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self._configs = checked_configs(tables, EmbeddingBagConfig, where, dynamic)
        columns = number_by_table(
            block_dim,
            [config.name for config in self._configs],
            {config.name: config.embedding_dim for config in self._configs},
            f"{where}.block_dim",
        )
        self.rows = DynamicEmbeddingBagCollection(
            [replace(config, embedding_dim=columns[config.name]) for config in self._configs],
            is_weighted=is_weighted,
            device=device,
            dynamic=dynamic,
            fused_params=fused_params,
        )
        self._is_weighted = is_weighted
        self.projections = PooledProjections(self._configs, columns, device)

    @forward_of_tables
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up, pools and projects rows.

        Args:
            features: as in DynamicEmbeddingBagCollection.

        Returns:
            [B, D], one key per feature and table, in the order of the tables.

        Raises:
            ValueError: if a feature is missing, or the tensors do not match each other.
        """
        widened: KeyedTensor = self.projections(self.rows(features))
        return widened

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the user's configs; their `embedding_dim` is the width of the outputs."""
        return self._configs

    def is_weighted(self) -> bool:
        """Returns True if bags have weights."""
        return self._is_weighted


class PooledProjections(nn.Module):
    """A module that projects the pooled outputs of narrow tables, of `columns` each, to full width."""

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        columns: Mapping[str, int],
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                config.name: Projection(
                    columns[config.name], config.embedding_dim, bias=False, device=device
                )
                for config in configs
                if columns[config.name] < config.embedding_dim
            }
        )
        self._names, self._widths, _ = pooled_outputs(configs)
        self._tables = [config.name for config in configs for _ in config.feature_names]

    def forward(self, pooled: KeyedTensor) -> KeyedTensor:
        """Projects each output with the matrix of its table: [B, D], outputs in the order of the tables.

        pooled [B, sum of b] has outputs in any order: in a sharded collection the plan decides the order.
        """
        narrow, wide = pooled.to_dict(), []
        for name, table in zip(self._names, self._tables, strict=True):
            rows = narrow[name]
            if table in self.tables:
                projection = cast(Projection, self.tables[table])
                rows = projection(rows.to(projection.weight.dtype))
            wide.append(rows)
        return KeyedTensor(self._names, self._widths, torch.cat(wide, dim=1))


class Projection(nn.Linear):
    """A linear projection: y = x L^T with pooled rows x [B, b]; L [E, b] is Xavier normal."""

    def reset_parameters(self) -> None:
        """Draws the initial L. DistributedModelParallel calls it if L was on the meta device."""
        nn.init.xavier_normal_(self.weight)
