"""The sequence collection a user prototypes with: dynamic tables in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.modules.collection_tables import (
    check_saved_rows,
    handle_of,
    local_tables,
    mark_alike,
    set_time,
)
from torchrec_dyn.modules.data_parallel import teach_ddp_to_skip_placeholders
from torchrec_dyn.modules.feature_ids import FeatureReader
from torchrec_dyn.modules.table_configs import checked_configs, dynamic_config_by_table
from torchrec_dyn.modules.table_handle import TableHandle
from torchrec_dyn.modules.unsharded_lookup import LocalLookup
from torchrec_dyn.modules.unsharded_table import LocalTable
from torchrec_dyn.table import DynamicTable


class DynamicEmbeddingCollection(EmbeddingCollectionInterface, FusedOptimizerModule):
    """Gives the row of each id, as TorchRec's EmbeddingCollection does, for any int64 ids.

    In training an unseen id gets a row, and backward updates the rows with the fused optimizer. In
    evaluation nothing changes. Sharded with DynamicEmbeddingCollectionSharder, or used as it is.

    Args:
        tables: one config per table, all of one embedding_dim; `num_embeddings` limits its rows and
            reserves nothing.
        device: where the rows live; None: cpu.
        need_indices: whether outputs carry the ids, as their weights.
        dynamic: how rows start and live; one for all tables or a dict by table name.
        fused_params: the optimizer of the rows, as TorchRec's sharders take it, e.g.
            {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01}.

    Raises:
        ValueError: if a config is impossible.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None = None,
        fused_params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        teach_ddp_to_skip_placeholders()
        where = type(self).__name__
        configs = checked_configs(tables, EmbeddingConfig, where)
        names = [config.name for config in configs]
        widths = {config.name: config.embedding_dim for config in configs}
        if len(set(widths.values())) > 1:
            raise ValueError(f"{where}: expected one embedding_dim for all tables, got {widths}.")
        self._need_indices = need_indices
        self.fused_params = None if fused_params is None else dict(fused_params)
        self.embeddings = local_tables(
            configs,
            dynamic_config_by_table(dynamic, names, where),
            self.fused_params,
            device,
            where,
        )
        self._lookup = LocalLookup(self._tables(), ["none"] * len(configs), "embeddings")
        self._embedding_names_by_table = get_embedding_names_by_table(configs)
        self._output_names = [name for names in self._embedding_names_by_table for name in names]
        self._read = FeatureReader(
            [config.feature_names for config in configs],
            False,
            [table.where for table in self._tables()],
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up.

        Args:
            features: ids of at least this collection's features; they may differ in the number of
                samples.

        Returns:
            by feature (and table, where several share it), values [ids of the feature,
            embedding_dim].

        Raises:
            ValueError: if a feature is missing, or the tensors do not fit each other.
        """
        features = maybe_td_to_kjt(features, None)
        read = self._read(features)
        if self.training:
            self._lookup.warn_if_nobody_chose_an_optimizer()
        outputs = self._lookup.sequences(read, self.training)
        lengths = torch.split(read.lengths, read.batch_sizes)
        ids: Sequence[Tensor | None] = [None] * len(outputs)
        if self._need_indices:
            ids = torch.split(read.ids, read.counts)
        return {
            name: JaggedTensor(values=values, lengths=of_bags, weights=as_weights)
            for name, values, of_bags, as_weights in zip(
                self._output_names, outputs, lengths, ids, strict=True
            )
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Gives the configs of the tables, in order."""
        return [table.config for table in self._tables()]

    def embedding_dim(self) -> int:
        """Gives the columns of every table."""
        return self._tables()[0].config.embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Gives the names of the outputs, table by table."""
        return self._embedding_names_by_table

    def need_indices(self) -> bool:
        """Tells whether outputs carry the ids."""
        return self._need_indices

    # TorchRec's sharded collection asks how to pick inputs apart; the plain way is right for any
    # ids.

    def use_gather_select(self) -> bool:
        """Tells TorchRec not to select with torch.gather."""
        return False

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """Tells TorchRec that no sharding type differs in that."""
        return None

    def use_sorted_select(self) -> bool:
        """Tells TorchRec (from 1.9 on) not to sort before selecting."""
        return False

    @property
    def device(self) -> torch.device:
        """Meta, where the placeholder parameters are: TorchRec then copies no rows itself."""
        return torch.device("meta")

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of the rows; param_groups[i]["lr"] is their learning rate."""
        return self._lookup.fused_optimizer

    def table(self, name: str) -> TableHandle:
        """Gives a handle on one table.

        Raises:
            ValueError: if the collection has no such table.
        """
        return handle_of(self.embeddings, name, type(self).__name__)

    def set_time(self, time: int) -> None:
        """Sets the clock of `ExpireAfter(time=...)` for the training forwards to come.

        Args:
            time: an integer from 0 on, in the unit of the policy; it never goes back.
        """
        set_time(self.embeddings, time)

    def dynamic_configs(self) -> dict[str, DynamicTableConfig]:
        """Gives the DynamicTableConfig of each table."""
        return {table.config.name: table.dynamic for table in self._tables()}

    def without_rows(self) -> DynamicEmbeddingCollection:
        """Makes the same collection without rows, on the meta device."""
        made = DynamicEmbeddingCollection(
            self.embedding_configs(),
            "meta",
            self._need_indices,
            self.dynamic_configs(),
            self.fused_params,
        )
        mark_alike(made._tables(), self._tables())
        return made

    def local_tables(self) -> dict[str, DynamicTable]:
        """Gives the rows of the tables that have been used; the others have none yet."""
        return {
            one.config.name: rows
            for one in self._tables()
            if (rows := one.rows_if_made()) is not None
        }

    def reset_parameters(self) -> None:
        """Drops all rows: every id is unseen again."""
        for table in self._tables():
            table.forget_rows()

    def _tables(self) -> list[LocalTable]:
        return [table for table in self.embeddings.values() if isinstance(table, LocalTable)]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        check_saved_rows(self.embeddings, state_dict, prefix + "embeddings.")
        super()._load_from_state_dict(state_dict, prefix, *args)
