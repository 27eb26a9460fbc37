"""Block embeddings: narrow dynamic tables, and a projection per table that widens the pooled rows.

Legend: V rows, b columns of a narrow table, E columns of its outputs, B bags per feature, D the output
columns of all features together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.modules import DynamicEmbeddingBagCollection, checked_configs, number_by_table


class BlockEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """An embedding bag collection with rows of `block_dim` columns and outputs of `embedding_dim`.

    y = L pool(E[ids]) with E [V, b] a dynamic table and L [E, b] a parameter: pooling is linear, so this
    equals pooling the projected rows. Against rows of full width V (E - b) - b E numbers are saved. The
    outputs have the names and widths of an EmbeddingBagCollection of the same configs.

    `rows` is the DynamicEmbeddingBagCollection of the narrow tables: shard it with
    DynamicEmbeddingBagCollectionSharder. `projections` has ordinary parameters: DistributedModelParallel
    averages their gradients over the ranks, and an optimizer of the user's trains them.

    Args:
        tables: one config per table; `embedding_dim` is the width of the outputs.
        block_dim: columns of the rows, one for all tables or a dict by table name, from 1 to
            `embedding_dim`; a table of full width has no projection.
        is_weighted: whether every id of a bag comes with a weight. Gradients flow to the weights.
        device: where rows and projections live; None: cpu.
        dynamic: how rows start and live; one for all tables or a dict by table name.
        fused_params: the optimizer of the rows, as of DynamicEmbeddingBagCollection.

    Raises:
        ValueError: if a config or a block_dim is impossible.

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
        self._configs = checked_configs(tables, EmbeddingBagConfig, where)
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

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up, pools and projects.

        Args:
            features: as of DynamicEmbeddingBagCollection.

        Returns:
            [B, D], one key per feature and table, in the order of the tables.

        Raises:
            ValueError: if a feature is missing, or the tensors do not fit each other.
        """
        widened: KeyedTensor = self.projections(self.rows(features))
        return widened

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the configs as the user wrote them, with `embedding_dim` the width of the outputs."""
        return self._configs

    def is_weighted(self) -> bool:
        """Returns whether bags carry weights."""
        return self._is_weighted


class PooledProjections(nn.Module):
    """Widens the pooled outputs of narrow tables.

    Args:
        configs: of the tables, as the user wrote them.
        columns: b of each table; tables with b = E have no projection.
        device: where the projections live.
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        columns: Mapping[str, int],
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                config.name: Projection(columns[config.name], config.embedding_dim, device)
                for config in configs
                if columns[config.name] < config.embedding_dim
            }
        )
        self._outputs = [
            (name, config.name)
            for names, config in zip(get_embedding_names_by_table(configs), configs, strict=True)
            for name in names
        ]
        self._widths = [config.embedding_dim for config in configs for _ in config.feature_names]

    def forward(self, pooled: KeyedTensor) -> KeyedTensor:
        """Projects each output by the matrix of its table.

        Args:
            pooled: [B, sum of b], outputs in any order: a sharded collection has its plan's order.

        Returns:
            [B, D], outputs in the order of the tables.
        """
        narrow = pooled.to_dict()
        wide = [self._projected(narrow[name], table) for name, table in self._outputs]
        return KeyedTensor(
            keys=[name for name, _ in self._outputs],
            length_per_key=self._widths,
            values=torch.cat(wide, dim=1),
        )

    def _projected(self, pooled: Tensor, table: str) -> Tensor:
        if table not in self.tables:
            return pooled
        projection = cast(Projection, self.tables[table])
        projected: Tensor = projection(pooled.to(projection.weight.dtype))
        return projected


class Projection(nn.Linear):
    """y = x L^T without a bias, x the pooled rows [B, b]; L [E, b] starts Xavier normal."""

    def __init__(self, columns: int, embedding_dim: int, device: torch.device | str | None) -> None:
        super().__init__(columns, embedding_dim, bias=False, device=device)

    def reset_parameters(self) -> None:
        """Draws L anew; DistributedModelParallel calls it where L was on the meta device."""
        nn.init.xavier_normal_(self.weight)
