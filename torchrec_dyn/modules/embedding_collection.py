"""The unsharded sequence collection: dynamic tables in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.compilers import forward_of_tables
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.modules.collection_tables import UnshardedCollection
from torchrec_dyn.modules.table_configs import checked_configs


class DefaultSelection:
    """Mixin of what TorchRec's sharded collection asks a module before it selects features.

    Its default selection is correct for any ids.
    """

    def use_gather_select(self) -> bool:
        """Returns False: TorchRec does not select with torch.gather."""
        return False

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """Returns None: the selection is the same for all sharding types."""
        return None

    def use_sorted_select(self) -> bool:
        """Returns False: TorchRec (from 1.9 on) does not sort before it selects."""
        return False


class DynamicEmbeddingCollection(
    DefaultSelection, UnshardedCollection, EmbeddingCollectionInterface
):
    """Looks up the row of each id, as TorchRec's EmbeddingCollection does, for any int64 ids.

    In training an unseen id gets a row, and backward updates the rows with the fused optimizer. In
    evaluation nothing changes. The collection can be used unsharded, or sharded with
    `DynamicEmbeddingCollectionSharder`.

    Args:
        tables: one config per table, all with the same embedding_dim. `num_embeddings` limits the number of
            rows and reserves no memory.
        device: device of the rows; None: cpu.
        need_indices: True if outputs contain the ids, as their weights.
        dynamic: options of the rows: one `DynamicTableConfig` for all tables, or a dict by table name.
        fused_params: the optimizer of the rows, in the form of TorchRec's sharders, e.g.
            {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01}.

    Raises:
        ValueError: if a config is not valid.
    """

    embeddings: nn.ModuleDict

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None = None,
        fused_params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        configs = checked_configs(tables, EmbeddingConfig, where, dynamic)
        widths = {config.name: config.embedding_dim for config in configs}
        if len(set(widths.values())) > 1:
            raise ValueError(f"{where}: expected one embedding_dim for all tables, got {widths}.")
        self._need_indices = need_indices
        poolings = ["none"] * len(configs)
        self._make_tables(configs, poolings, "embeddings", False, device, dynamic, fused_params)
        self._embedding_names_by_table = get_embedding_names_by_table(configs)
        self._output_names = [name for names in self._embedding_names_by_table for name in names]

    @forward_of_tables
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up rows.

        Args:
            features: ids of at least this collection's features. The number of samples may differ between
                features.

        Returns:
            The outputs by feature name ("feature@table" if several tables share the feature), with values
            [ids of the feature, embedding_dim].

        Raises:
            ValueError: if a feature is missing, or the tensors do not match each other.
        """
        features = maybe_td_to_kjt(features, None)
        read = self._read(features)
        if self.training:
            self._lookup.note_training()
        outputs = self._lookup.sequences(read, self.training)
        lengths = torch.split(read.lengths, read.batch_sizes)
        ids: Sequence[Tensor | None] = [None] * len(outputs)
        if self._need_indices:
            ids = torch.split(read.ids, read.counts)
        return {
            name: JaggedTensor(values=values, lengths=bag_lengths, weights=as_weights)
            for name, values, bag_lengths, as_weights in zip(
                self._output_names, outputs, lengths, ids, strict=True
            )
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns the configs of the tables, in order."""
        return self.table_configs()

    def embedding_dim(self) -> int:
        """Returns the number of columns of every table."""
        return self._lookup.tables[0].config.embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the output names of each table."""
        return self._embedding_names_by_table

    def need_indices(self) -> bool:
        """Returns True if outputs contain the ids."""
        return self._need_indices

    def without_rows(self) -> DynamicEmbeddingCollection:
        """Returns the same collection without rows, on the meta device."""
        collection = DynamicEmbeddingCollection(
            self.embedding_configs(),
            "meta",
            self._need_indices,
            self.dynamic_configs(),
            self.fused_params,
        )
        collection._copy_marks(self)
        return collection
