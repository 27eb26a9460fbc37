"""The tables of an unsharded collection, and the methods that both collections share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_dyn.compilers import NotScriptable, not_compiled
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.modules.feature_ids import FeatureReader
from torchrec_dyn.modules.optimizer_choice import check_fused_params
from torchrec_dyn.modules.table_configs import dynamic_config_by_table
from torchrec_dyn.modules.unsharded_lookup import UnshardedLookup
from torchrec_dyn.modules.unsharded_table import UnshardedTable
from torchrec_dyn.modules.wrapper_checks import check_not_made_static
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import TableHandle
from torchrec_dyn.table import TableShard, set_clocks


class UnshardedCollection(NotScriptable, FusedOptimizerModule):
    """Mixin for TorchRec's interfaces of collections: methods that both unsharded collections share."""

    def _make_tables(
        self,
        configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig],
        poolings: Sequence[str],
        holder: str,
        is_weighted: bool,
        device: torch.device | str | None,
        dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None,
        fused_params: Mapping[str, Any] | None,
    ) -> None:
        """Makes tables of checked configs, as the attribute `holder`, and their reader and lookup."""
        where = type(self).__name__
        check_fused_params(fused_params, where)
        self.fused_params = None if fused_params is None else dict(fused_params)
        place = torch.device(device if device is not None else "cpu")
        options = dynamic_config_by_table(dynamic, [config.name for config in configs], where)
        tables = [
            UnshardedTable(config, options[config.name], self.fused_params, place, where)
            for config in configs
        ]
        setattr(self, holder, nn.ModuleDict({table.config.name: table for table in tables}))
        self._lookup = UnshardedLookup(tables, poolings, holder)
        self._read = FeatureReader(
            [table.config.feature_names for table in tables],
            is_weighted,
            [table.where for table in tables],
            any(table.dynamic.scores_weights for table in tables),
        )

    @property
    def unsharded_lookup(self) -> UnshardedLookup:
        """The lookup of all tables; its `prefix` is the attribute name of the collection's ModuleDict."""
        return self._lookup

    @property
    def device(self) -> torch.device:
        """The meta device, on which the placeholder parameters are: TorchRec then copies no rows itself."""
        return torch.device("meta")

    @property
    @not_compiled
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of the rows; param_groups[i]["lr"] is their learning rate."""
        return self.unsharded_lookup.fused_optimizer

    @not_compiled
    def table(self, name: str) -> TableHandle:
        """Returns the handle of one table.

        Raises:
            ValueError: if the collection has no such table.
        """
        tables = {table.config.name: table for table in self.unsharded_lookup.tables}
        if name not in tables:
            raise ValueError(
                f"{type(self).__name__}.table: expected a name among {list(tables)}, got {name!r}."
            )
        return tables[name].handle()

    @not_compiled
    def set_time(self, time: int) -> None:
        """Sets the clock of policies that count in time for the next training forwards.

        Args:
            time: an integer of 0 or more, in the unit of the policy, not before the time set last.

        Raises:
            ValueError: if `time` is not valid for the clock of some table; nothing has changed then.
        """
        set_clocks([table.rows() for table in self.unsharded_lookup.tables], time)

    def dynamic_configs(self) -> dict[str, DynamicTableConfig]:
        """Returns the DynamicTableConfig of each table."""
        return {table.config.name: table.dynamic for table in self.unsharded_lookup.tables}

    @not_compiled
    def local_tables(self) -> dict[str, TableShard]:
        """Returns the rows of each table that has been used; the other tables have no rows yet."""
        return {
            table.config.name: rows
            for table in self.unsharded_lookup.tables
            if (rows := table.rows_if_made()) is not None
        }

    @not_compiled
    def reset_parameters(self) -> None:
        """Drops all rows: all ids are unseen again."""
        for table in self.unsharded_lookup.tables:
            table.drop_rows()

    def table_configs(self) -> list[Any]:
        """Returns the configs of the tables; TorchRec's sharded collections read them in the constructor."""
        check_not_made_static(self._where(), self)
        return [table.config for table in self.unsharded_lookup.tables]

    def _where(self) -> str:
        names = [table.config.name for table in self.unsharded_lookup.tables]
        return f"{type(self).__name__}(tables={listed(names)})"

    def _copy_marks(self, other: UnshardedCollection) -> None:
        """Copies optimizer marks and `requires_grad` from the tables of another collection."""
        sources = other.unsharded_lookup.tables
        for table, source in zip(self.unsharded_lookup.tables, sources, strict=True):
            table.copy_marks(source.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # The rows of all tables are verified before any table is loaded. Each table then finds its load in
        # this dict, which is torch's copy.
        problems = []
        for table in self.unsharded_lookup.tables:
            key = f"{prefix}{self.unsharded_lookup.prefix}.{table.config.name}."
            try:
                staged = table.staged(state_dict, key)
            except ValueError as fault:
                problems.append(str(fault))
            else:
                if staged is not None:
                    state_dict[f"{key}weight"] = staged
        if problems:
            raise ValueError("\n".join(problems))
        super()._load_from_state_dict(state_dict, prefix, *args)
