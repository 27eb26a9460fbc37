"""Block embeddings: narrow dynamic tables, and a projection per table that widens their rows.

Legend: V rows, b columns of a narrow table, E columns of its outputs, B bags per feature, D the output
columns of all features together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.compilers import forward_of_tables
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.layers.inputs import Part, check_unscored, one_bag_each, pooled_by, read_bags
from torchrec_dyn.modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    FeatureReader,
    check_unweighted,
    checked_configs,
    dynamic_config_by_table,
    number_by_table,
    outputs_by_sample,
    pooled_outputs,
)


class BlockEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """An embedding bag collection with rows of `block_dim` columns and outputs of `embedding_dim`.

    y = pool(L W[ids]) with W [V, b] a dynamic table and L [E, b] a parameter. It saves V (E - b) - b E
    numbers compared with rows of full width. The outputs have the names and widths of an
    EmbeddingBagCollection with the same configs.

    Sums and means are linear, so their rows are pooled before they are projected: `rows` is the
    DynamicEmbeddingBagCollection of their tables, or None without any. Shard it with
    DynamicEmbeddingBagCollectionSharder. A maximum is taken of projected rows: `rows_of_max[str(width)]` is
    the DynamicEmbeddingCollection of all narrow tables of one width with pooling="max". Shard it with
    DynamicEmbeddingCollectionSharder. `projections` has ordinary parameters: DistributedModelParallel
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
        names = [config.name for config in self._configs]
        options = dynamic_config_by_table(dynamic, names, where)
        pooled, of_max = _parted(self._configs, columns, options)
        for config in of_max:
            check_unscored(options[config.name], where)
        check_unweighted(["max"] * len(of_max), is_weighted, where)
        common: dict[str, Any] = {"device": device, "fused_params": fused_params}
        self.rows: nn.Module | None = None
        if pooled:
            self.rows = DynamicEmbeddingBagCollection(
                [replace(config, embedding_dim=columns[config.name]) for config in pooled],
                is_weighted=is_weighted,
                dynamic={config.name: options[config.name] for config in pooled},
                **common,
            )
        self.rows_of_max = _rows_of_max(of_max, columns, options, common)
        self._is_weighted = is_weighted
        # Two modules: TorchRec's pipelines trace into every module that contains a sharded module.
        self.ids_of_max = IdsOfMax(of_max, columns, where)
        self.projections = Projections(self._configs, pooled, columns, self.ids_of_max.read, device)

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
        pooled = None if self.rows is None else self.rows(features)
        rows = None
        if len(self.rows_of_max):
            ids = self.ids_of_max(features)
            rows = {group: one(ids[group]) for group, one in self.rows_of_max.items()}
        widened: KeyedTensor = self.projections(features, pooled, rows)
        return widened

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the user's configs; their `embedding_dim` is the width of the outputs."""
        return self._configs

    def is_weighted(self) -> bool:
        """Returns True if bags have weights."""
        return self._is_weighted


def _parted(
    configs: Sequence[EmbeddingBagConfig],
    columns: Mapping[str, int],
    options: Mapping[str, DynamicTableConfig],
) -> tuple[list[EmbeddingBagConfig], list[EmbeddingBagConfig]]:
    """Returns the tables that are pooled before they are projected, if at all, and the others."""
    of_max = [
        config
        for config in configs
        if options[config.name].pooling == "max" and columns[config.name] < config.embedding_dim
    ]
    return [config for config in configs if config not in of_max], of_max


def _rows_of_max(
    configs: Sequence[EmbeddingBagConfig],
    columns: Mapping[str, int],
    options: Mapping[str, DynamicTableConfig],
    common: Mapping[str, Any],
) -> nn.ModuleDict:
    """Returns a collection of the tables of each width, whose rows are looked up one by one."""
    collections = nn.ModuleDict()
    for width in sorted({columns[config.name] for config in configs}):
        members = [config for config in configs if columns[config.name] == width]
        dynamic = {}
        for config in members:
            uses = [
                replace(use, feature=_own_name(config.name, use.feature))
                for use in options[config.name].features
            ]
            dynamic[config.name] = replace(options[config.name], pooling=None, features=tuple(uses))
        tables = [
            EmbeddingConfig(
                name=config.name,
                embedding_dim=width,
                num_embeddings=config.num_embeddings,
                feature_names=[_own_name(config.name, feature) for feature in config.feature_names],
                data_type=config.data_type,
                weight_init_min=config.weight_init_min,
                weight_init_max=config.weight_init_max,
            )
            for config in members
        ]
        collections[str(width)] = DynamicEmbeddingCollection(tables, dynamic=dynamic, **common)
    return collections


def _own_name(table: str, feature: str) -> str:
    """Returns the name of a feature for one table, so that none is of several tables."""
    return f"{table}.{feature}"


class IdsOfMax(nn.Module):
    """A module that reads the ids of tables with max pooling; pipelines may run it ahead."""

    def __init__(
        self, configs: Sequence[EmbeddingBagConfig], columns: Mapping[str, int], where: str
    ) -> None:
        super().__init__()
        self._features = [
            (str(columns[config.name]), _own_name(config.name, feature))
            for config in configs
            for feature in config.feature_names
        ]
        self.read = FeatureReader(configs, False, where)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, KeyedJaggedTensor]:
        """Returns the ids of the tables of each width, all ids of a feature as a single sequence."""
        found = read_bags(features, self.read)
        ids = torch.split(found.ids, found.counts)
        return one_bag_each(
            [
                Part(group, [name], values, [count])
                for (group, name), values, count in zip(
                    self._features, ids, found.counts, strict=True
                )
            ]
        )


class Projections(nn.Module):
    """A module that projects the outputs of narrow tables, of `columns` each, to full width.

    `pooled` are the configs of the tables whose bags are pooled before; `read` reads the bags of the others.
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        pooled: Sequence[EmbeddingBagConfig],
        columns: Mapping[str, int],
        read: FeatureReader,
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
        self._outputs = _pairs(configs)
        outputs = zip(pooled_outputs(pooled)[0], _pairs(pooled), strict=True) if pooled else ()
        self._name_of = {pair: name for name, pair in outputs}
        of_max = [config for config in configs if config not in pooled]
        self._of_max = _pairs(of_max)
        self._group_of = {config.name: str(columns[config.name]) for config in of_max}
        self._read = read

    def forward(
        self,
        features: KeyedJaggedTensor,
        pooled: KeyedTensor | None,
        rows: Mapping[str, Mapping[str, JaggedTensor]] | None,
    ) -> KeyedTensor:
        """Projects each output with the matrix of its table: [B, D], outputs in the order of the tables.

        pooled [B, sum of b] has outputs in any order: in a sharded collection the plan decides the order.
        rows: those of the bags of `features` whose maximum is taken, by group and feature.
        """
        narrow = {} if pooled is None else pooled.to_dict()
        largest = {} if rows is None else self._largest(features, rows)
        wide: list[Tensor] = []
        for pair in self._outputs:
            if pair in largest:
                wide.append(largest[pair])
            else:
                wide.append(self._projected(pair[0], narrow[self._name_of[pair]]))
        return KeyedTensor(self._names, self._widths, torch.cat(wide, dim=1))

    def _projected(self, table: str, rows: Tensor) -> Tensor:
        if table not in self.tables:
            return rows
        projection = cast(Projection, self.tables[table])
        projected: Tensor = projection(rows.to(projection.weight.dtype))
        return projected

    def _largest(
        self, features: KeyedJaggedTensor, rows: Mapping[str, Mapping[str, JaggedTensor]]
    ) -> dict[tuple[str, str], Tensor]:
        """Returns the largest values of projected rows, [B, E], by the table and feature of each output."""
        found = self._read(maybe_td_to_kjt(features, None))
        inverse = features.inverse_indices_or_none()
        outputs: dict[tuple[str, str], Tensor] = {}
        lengths = torch.split(found.lengths, found.batch_sizes)
        for (table, feature), bag_lengths in zip(self._of_max, lengths, strict=True):
            own = rows[self._group_of[table]][_own_name(table, feature)].values()
            largest = pooled_by("max", self._projected(table, own), bag_lengths, None)
            outputs[table, feature] = outputs_by_sample([largest], inverse, [feature])
        return outputs


def _pairs(configs: Sequence[EmbeddingBagConfig]) -> list[tuple[str, str]]:
    """Returns the table and the feature of each output, in order."""
    return [(config.name, feature) for config in configs for feature in config.feature_names]


class Projection(nn.Linear):
    """A linear projection: y = x L^T with pooled rows x [B, b]; L [E, b] is Xavier normal."""

    def reset_parameters(self) -> None:
        """Draws the initial L. DistributedModelParallel calls it if L was on the meta device."""
        nn.init.xavier_normal_(self.weight)
