"""What TorchRec's sharded collections get to see of the dynamic collection they shard.

TorchRec reads the tables, their optimizers and the state dict of the module it shards.
This view answers with the tables, with one choice of optimizer per table and with
placeholders: no rows are copied, and the module stays as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_dyn.modules import (
    DEFAULT_FUSED_PARAMS,
    LocalTable,
    chosen_fused_params,
    chosen_optimizer,
)
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks import TableLayout, config_of_share, row_limit
from torchrec_dyn.sharding import OPTIONS_KEY, KernelOptions, TableOptions


def merged_fused_params(
    of_sharder: Mapping[str, Any] | None, of_module: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Merges the sharder's `fused_params` over the module's.

    A sharder that names an optimizer names its hyper-parameters too: those of the
    module belong to another optimizer.
    """
    sharder, module = dict(of_sharder or {}), dict(of_module or {})
    if "optimizer" in sharder:
        module = {key: value for key, value in module.items() if key == "output_dtype"}
    return {**module, **sharder}


class _Placeholder(nn.Module):
    """One table's meta parameter, marked with its optimizer the way TorchRec reads it."""

    def __init__(self, weight: nn.Parameter, fused_params: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(weight, device="meta"))
        marked: Any = self.weight
        marked._optimizer_classes = [None]
        marked._optimizer_kwargs = [fused_params]


class ShardableView(nn.Module):
    """The read-only face of a dynamic collection while TorchRec shards it.

    Args:
        module: the collection.
        configs: its tables' configs.
        tables: its tables by name.
        holder: the name under which it holds them, "embedding_bags" or "embeddings".
        layouts: where the pieces of each table go.
        fused_params: what applies where the table's parameter says nothing.
        where: the collection, for messages.

    Raises:
        ValueError: if a table's optimizer is not supported.
    """

    def __init__(
        self,
        module: Any,
        configs: Sequence[BaseEmbeddingConfig],
        tables: Mapping[str, LocalTable],
        holder: str,
        layouts: Mapping[str, TableLayout],
        fused_params: Mapping[str, Any],
        where: str,
    ) -> None:
        super().__init__()
        # In a list: a child module would put the rows into this view's state dict.
        self._module: list[Any] = [module]
        self._configs = copy.deepcopy(list(configs))
        options = {
            config.name: TableOptions(
                config=config_of_share(tables[config.name].dynamic, layouts[config.name].row_ranks),
                row_limit=row_limit(config.num_embeddings, layouts[config.name].row_ranks),
                ids_mixed=layouts[config.name].rows_are_spread,
                is_frozen=tables[config.name].is_frozen,
            )
            for config in configs
        }
        of_all = KernelOptions(options)
        placeholders = nn.ModuleDict()
        self.tables_by_default: list[str] = []
        self.optimizers: dict[str, RowOptimizer] = {}
        for config in configs:
            weight = tables[config.name].weight
            table = f"{where}(table='{config.name}')"
            self.optimizers[config.name] = chosen_optimizer(weight, fused_params, table)
            chosen = chosen_fused_params(weight, fused_params, table)
            if chosen is None:
                self.tables_by_default.append(config.name)
                chosen = dict(DEFAULT_FUSED_PARAMS)
            chosen[OPTIONS_KEY] = of_all
            placeholders[config.name] = _Placeholder(weight, chosen)
        self.add_module(holder, placeholders)

    @property
    def device(self) -> torch.device:
        """Meta: TorchRec then copies no weights. Rows are carried over by `carry_over`."""
        return torch.device("meta")

    def embedding_bag_configs(self) -> list[Any]:
        """Returns the configs of a pooled collection."""
        return self._configs

    def embedding_configs(self) -> list[Any]:
        """Returns the configs of a sequence collection."""
        return self._configs

    def use_gather_select(self) -> bool:
        """Returns whether TorchRec gathers deduplicated ids in another way: no dedupe here."""
        return False

    def use_gather_select_per_sharding(self) -> None:
        """Returns the same per sharding type."""

    def use_sorted_select(self) -> bool:
        """Returns whether TorchRec (after 1.8) sorts deduplicated ids: no dedupe here."""
        return False

    def is_weighted(self) -> bool:
        """Returns whether bags carry weights."""
        return self._module[0].is_weighted()

    def need_indices(self) -> bool:
        """Returns whether outputs carry their ids."""
        return self._module[0].need_indices()

    def embedding_dim(self) -> int:
        """Returns the width of a sequence collection."""
        return self._module[0].embedding_dim()

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the output names of each table of a sequence collection."""
        return self._module[0].embedding_names_by_table()
