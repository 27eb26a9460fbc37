"""The unsharded pooled collection: dynamic tables in one process.

Legend: F features, B bags per feature, D columns of all features together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, pooling_type_to_str
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.compilers import forward_of_tables
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.lookup import repeat_rows
from torchrec_dyn.modules.collection_tables import UnshardedCollection
from torchrec_dyn.modules.table_configs import checked_configs
from torchrec_dyn.name_lists import listed
from torchrec_dyn.storage import host_numbers


class DynamicEmbeddingBagCollection(UnshardedCollection, EmbeddingBagCollectionInterface):
    """Pools the rows of bags of ids, as TorchRec's EmbeddingBagCollection does, for any int64 ids.

    In training an unseen id gets a row, and backward updates the rows with the fused optimizer. In
    evaluation nothing changes. The collection can be used unsharded, or sharded with
    `DynamicEmbeddingBagCollectionSharder`.

    Args:
        tables: one config per table. `num_embeddings` limits the number of rows and reserves no memory.
        is_weighted: True if every id of a bag has a weight. Unsharded, the weights get gradients.
        device: device of the rows; None: cpu.
        dynamic: options of the rows: one `DynamicTableConfig` for all tables, or a dict by table name.
        fused_params: the optimizer of the rows, in the form of TorchRec's sharders, e.g.
            {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01}.

    Raises:
        ValueError: if a config is not valid.
    """

    embedding_bags: nn.ModuleDict

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None = None,
        fused_params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        configs = checked_configs(tables, EmbeddingBagConfig, where, dynamic)
        self._is_weighted = is_weighted
        poolings = [pooling_type_to_str(config.pooling) for config in configs]
        self._make_tables(
            configs, poolings, "embedding_bags", is_weighted, device, dynamic, fused_params
        )
        self._embedding_names = [
            name for names in get_embedding_names_by_table(configs) for name in names
        ]
        self._features = [name for config in configs for name in config.feature_names]
        self._columns = [config.embedding_dim for config in configs for _ in config.feature_names]

    @forward_of_tables
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up and pools.

        Args:
            features: bags of ids of at least this collection's features. If features differ in the number
                of bags, `inverse_indices` must contain the bag of each sample.

        Returns:
            [B, D], one key per feature and table, in the order of the tables.

        Raises:
            ValueError: if a feature is missing, or the tensors do not match each other.
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
        if inverse_indices is not None:
            checked_inverse(features, self._features, type(self).__name__)
        if self.training:
            self._lookup.note_training()
        pooled = self._lookup.pooled(read, self.training)
        if inverse_indices is not None and len(pooled) == 1:
            pooled = list(torch.split(pooled[0], self._columns, dim=1))
        if inverse_indices is not None or len(pooled) > 1:
            pooled = [outputs_by_sample(pooled, inverse_indices, self._features)]
        return KeyedTensor(
            keys=self._embedding_names, length_per_key=self._columns, values=pooled[0]
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the configs of the tables, in order."""
        return self.table_configs()

    def is_weighted(self) -> bool:
        """Returns True if bags have weights."""
        return self._is_weighted

    def without_rows(self) -> DynamicEmbeddingBagCollection:
        """Returns the same collection without rows, on the meta device."""
        collection = DynamicEmbeddingBagCollection(
            self.embedding_bag_configs(),
            self._is_weighted,
            "meta",
            self.dynamic_configs(),
            self.fused_params,
        )
        collection._copy_marks(self)
        return collection


def outputs_by_sample(
    pooled: Sequence[Tensor], inverse_indices: tuple[list[str], Tensor] | None, names: list[str]
) -> Tensor:
    """Returns the outputs of all features side by side, with the bags that each sample refers to.

    TorchRec's `process_pooled_embeddings` does the same, but adds gradients in any order on CUDA.

    pooled: [bags, columns] of each feature; names: the feature of each output. inverse_indices: feature
    names, and for each of them the bag of each sample, [features, B]; None if bag i belongs to sample i.

    Returns [B, sum of columns].
    """
    if inverse_indices is not None:
        bags = bags_of_samples(inverse_indices, names)
        pooled = [repeat_rows(rows, bag) for rows, bag in zip(pooled, bags, strict=True)]
    return torch.cat(list(pooled), dim=1)


def checked_inverse(
    features: KeyedJaggedTensor, names: Sequence[str], where: str
) -> tuple[list[str], Tensor]:
    """Returns the inverse_indices of a batch, checked for the features `names`."""
    given = features.inverse_indices_or_none()
    keys, bags = given if given is not None else ([], torch.empty(0, 0))
    if missing := sorted(set(names) - set(keys)):
        raise ValueError(
            f"{where}: expected inverse_indices of every feature where the number of bags varies "
            f"by feature, {features.stride_per_key()}, got none of features {listed(missing)}. "
            "Pass them in the KeyedJaggedTensor."
        )
    if len(set(keys)) != len(keys) or bags.dim() != 2 or len(bags) != len(keys):
        raise ValueError(
            f"{where}: expected inverse_indices [features, samples] with a line for each feature, got "
            f"{list(bags.shape)} for features {listed(keys)}."
        )
    if not features.variable_stride_per_key():
        raise ValueError(
            f"{where}: expected inverse_indices only with stride_per_key_per_rank, got them with one "
            f"number of bags, {features.stride()}, for all features. Pass stride_per_key_per_rank="
            f"[[{features.stride()}], ...] if samples share bags, or leave inverse_indices out."
        )
    return keys, bags


def bags_of_samples(inverse_indices: tuple[list[str], Tensor], features: Sequence[str]) -> Tensor:
    """Returns the bag of each sample, [F, B] int64, for some features in their order.

    As TorchRec's `reorder_inverse_indices`, without a wait of the host, and with any names.

    inverse_indices: feature names, and for each of them the bag of each sample, [features, B].
    """
    names, bags = inverse_indices
    place = {name: i for i, name in enumerate(names)}
    order = host_numbers([place[feature] for feature in features])
    return bags.index_select(0, order.to(bags.device, non_blocking=True))
