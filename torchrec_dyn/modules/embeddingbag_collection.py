"""The pooled collection a user prototypes with: dynamic tables in one process.

Letters: F features, B bags per feature, D the columns of all features together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, pooling_type_to_str
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
    process_pooled_embeddings,
    reorder_inverse_indices,
)
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
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


class DynamicEmbeddingBagCollection(EmbeddingBagCollectionInterface, FusedOptimizerModule):
    """Pools the rows of bags of ids, any int64, as TorchRec's EmbeddingBagCollection does.

    In training an unseen id gets a row, and backward updates the rows with the fused optimizer. In
    evaluation nothing changes. Sharded with DynamicEmbeddingBagCollectionSharder, or used as it is.

    Args:
        tables: one config per table; `num_embeddings` limits its rows and reserves nothing.
        is_weighted: whether every id of a bag comes with a weight. Gradients flow to the weights.
        device: where the rows live; None: cpu.
        dynamic: how rows start and live; one for all tables or a dict by table name.
        fused_params: the optimizer of the rows, as TorchRec's sharders take it, e.g.
            {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01}.

    Raises:
        ValueError: if a config is impossible.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None = None,
        fused_params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        teach_ddp_to_skip_placeholders()
        where = type(self).__name__
        configs = checked_configs(tables, EmbeddingBagConfig, where)
        names = [config.name for config in configs]
        self._is_weighted = is_weighted
        self.fused_params = None if fused_params is None else dict(fused_params)
        self.embedding_bags = local_tables(
            configs,
            dynamic_config_by_table(dynamic, names, where),
            self.fused_params,
            device,
            where,
        )
        self._lookup = LocalLookup(
            self._tables(),
            [pooling_type_to_str(config.pooling) for config in configs],
            "embedding_bags",
        )
        self._embedding_names = [
            name for names in get_embedding_names_by_table(configs) for name in names
        ]
        self._feature_names = [config.feature_names for config in configs]
        self._read = FeatureReader(
            self._feature_names, is_weighted, [table.where for table in self._tables()]
        )
        self._columns = [config.embedding_dim for config in configs for _ in config.feature_names]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up and pools.

        Args:
            features: bags of ids of at least this collection's features. Where features differ in
                the number of bags, inverse_indices must say which bag serves which sample.

        Returns:
            [B, D], one key per feature and table, in the order of the tables.

        Raises:
            ValueError: if a feature is missing, or the tensors do not fit each other.
        """
        features = maybe_td_to_kjt(features, None)
        read = self._read(features)
        inverse_indices = features.inverse_indices_or_none()
        if inverse_indices is None and read.varies:
            raise ValueError(
                f"{type(self).__name__}: expected as many bags for each feature, got "
                f"{read.batch_sizes}. "
                "Pass inverse_indices in the KeyedJaggedTensor."
            )
        if self.training:
            self._lookup.warn_if_nobody_chose_an_optimizer()
        pooled = self._lookup.pooled(read, self.training)
        if inverse_indices is not None and len(pooled) == 1:
            pooled = list(torch.split(pooled[0], self._columns, dim=1))
        if inverse_indices is not None or len(pooled) > 1:
            names = [name for names in self._feature_names for name in names]
            pooled = [
                process_pooled_embeddings(pooled, reorder_inverse_indices(inverse_indices, names))
            ]
        return KeyedTensor(
            keys=self._embedding_names, length_per_key=self._columns, values=pooled[0]
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Gives the configs of the tables, in order."""
        return [table.config for table in self._tables()]

    def is_weighted(self) -> bool:
        """Tells whether bags carry weights."""
        return self._is_weighted

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
        return handle_of(self.embedding_bags, name, type(self).__name__)

    def set_time(self, time: int) -> None:
        """Sets the clock of `ExpireAfter(time=...)` for the training forwards to come.

        Args:
            time: an integer from 0 on, in the unit of the policy; it never goes back.
        """
        set_time(self.embedding_bags, time)

    def dynamic_configs(self) -> dict[str, DynamicTableConfig]:
        """Gives the DynamicTableConfig of each table."""
        return {table.config.name: table.dynamic for table in self._tables()}

    def without_rows(self) -> DynamicEmbeddingBagCollection:
        """Makes the same collection without rows, on the meta device."""
        made = DynamicEmbeddingBagCollection(
            self.embedding_bag_configs(),
            self._is_weighted,
            "meta",
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
        return [table for table in self.embedding_bags.values() if isinstance(table, LocalTable)]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        check_saved_rows(self.embedding_bags, state_dict, prefix + "embedding_bags.")
        super()._load_from_state_dict(state_dict, prefix, *args)
