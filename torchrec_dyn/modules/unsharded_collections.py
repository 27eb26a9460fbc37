"""The unsharded collections: dynamic tables in one process.

Legend: F features, B bags per feature, D columns of all features together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_dyn.compilers import forward_of_tables, not_compiled, refuse_script
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.lookup import repeat_rows
from torchrec_dyn.modules.description import Description
from torchrec_dyn.modules.feature_ids import FeatureReader
from torchrec_dyn.modules.optimizer_choice import check_fused_params
from torchrec_dyn.modules.table_configs import (
    check_unweighted,
    checked_configs,
    dynamic_config_by_table,
    pooled_outputs,
    pooling_of,
)
from torchrec_dyn.modules.unsharded_lookup import UnshardedLookup
from torchrec_dyn.modules.unsharded_table import UnshardedTable
from torchrec_dyn.modules.wrapper_checks import check_not_made_static
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import TableHandle
from torchrec_dyn.storage import host_numbers
from torchrec_dyn.table import TableShard, present_gpu, set_clocks

_Collection = TypeVar("_Collection", bound="UnshardedCollection")


class UnshardedCollection(FusedOptimizerModule):
    """Mixin for TorchRec's interfaces of collections: methods that both unsharded collections share."""

    __prepare_scriptable__ = refuse_script

    def _make_tables(
        self,
        configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig],
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
        place = present_gpu(device if device is not None else "cpu")
        options = dynamic_config_by_table(dynamic, [config.name for config in configs], where)
        tables = [
            UnshardedTable(config, options[config.name], self.fused_params, place, where)
            for config in configs
        ]
        setattr(self, holder, nn.ModuleDict({table.config.name: table for table in tables}))
        poolings = [pooling_of(config, options[config.name]) for config in configs]
        check_unweighted(poolings, is_weighted, where)
        self.unsharded_lookup = UnshardedLookup(tables, poolings, holder)
        is_scored = any(table.dynamic.scores_weights for table in tables)
        self._read = FeatureReader(configs, is_weighted, where, is_scored)

    @property
    def device(self) -> torch.device:
        """The meta device of the placeholder parameters. With it, TorchRec copies no rows itself."""
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
    def describe(self) -> Description:
        """Returns which tables share a call, with their rows and bytes. `print` it.

        Raises:
            ValueError: if the rows are on the meta device.
        """
        return self.unsharded_lookup.describe()

    @not_compiled
    def set_time(self, time: int) -> None:
        """Sets the clock of policies that count in time for the next training forwards.

        Args:
            time: an integer of 0 or more, in the unit of the policy, not before the last time that was set.

        Raises:
            ValueError: if `time` is not valid for the clock of a table; nothing has changed then.
        """
        set_clocks([table.rows() for table in self.unsharded_lookup.tables], time)

    def dynamic_configs(self) -> dict[str, DynamicTableConfig]:
        """Returns the DynamicTableConfig of each table."""
        return {table.config.name: table.dynamic for table in self.unsharded_lookup.tables}

    @not_compiled
    def local_tables(self) -> dict[str, TableShard]:
        """Returns the rows of each table that has been used; the other tables have no rows yet."""
        return {
            table.config.name: table.shard
            for table in self.unsharded_lookup.tables
            if table.shard is not None
        }

    @not_compiled
    def reset_parameters(self) -> None:
        """Drops all rows, so that all ids are unseen again."""
        for table in self.unsharded_lookup.tables:
            table.drop_rows()

    def table_configs(self) -> list[Any]:
        """Returns the configs of the tables; TorchRec's sharded collections read them in the constructor."""
        names = [table.config.name for table in self.unsharded_lookup.tables]
        check_not_made_static(f"{type(self).__name__}(tables={listed(names)})", self)
        return [table.config for table in self.unsharded_lookup.tables]

    def _without_rows(self, kind: Callable[..., _Collection], **options: bool) -> _Collection:
        """Returns a collection with the configs, options and marks of this one, on the meta device."""
        options_of_rows = {"dynamic": self.dynamic_configs(), "fused_params": self.fused_params}
        collection = kind(self.table_configs(), device="meta", **options_of_rows, **options)
        copies = collection.unsharded_lookup.tables
        for table, source in zip(copies, self.unsharded_lookup.tables, strict=True):
            table.copy_marks(source.weight)
        return collection

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


class DynamicEmbeddingCollection(UnshardedCollection, EmbeddingCollectionInterface):
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
        configs = checked_configs(tables, EmbeddingConfig, type(self).__name__, dynamic)
        self._need_indices = need_indices
        self._make_tables(configs, "embeddings", False, device, dynamic, fused_params)
        self._embedding_names_by_table = get_embedding_names_by_table(configs)
        self._output_names = [name for names in self._embedding_names_by_table for name in names]

    @forward_of_tables
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up rows.

        Args:
            features: ids of at least this collection's features. The number of samples may differ between
                features.

        Returns:
            Outputs by feature name ("feature@table" if several tables share the feature), with values [ids of
            the feature, embedding_dim].

        Raises:
            ValueError: if a feature is missing, or the tensors do not match each other.
        """
        if not isinstance(features, KeyedJaggedTensor):
            features = maybe_td_to_kjt(features, None)
        read = self._read(features)
        outputs = self.unsharded_lookup.look_up(read, self.training)
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
        return self.unsharded_lookup.tables[0].config.embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the output names of each table."""
        return self._embedding_names_by_table

    def need_indices(self) -> bool:
        """Returns True if outputs contain the ids."""
        return self._need_indices

    def use_gather_select(self) -> bool:
        """Returns False: TorchRec does not select features with torch.gather."""
        return False

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """Returns None: the selection is the same for all sharding types."""
        return None

    def use_sorted_select(self) -> bool:
        """Returns False: TorchRec (from 1.9 on) does not sort before it selects."""
        return False

    def without_rows(self) -> DynamicEmbeddingCollection:
        """Returns the same collection without rows, on the meta device."""
        return self._without_rows(DynamicEmbeddingCollection, need_indices=self._need_indices)


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
        configs = checked_configs(tables, EmbeddingBagConfig, type(self).__name__, dynamic)
        self._is_weighted = is_weighted
        self._make_tables(configs, "embedding_bags", is_weighted, device, dynamic, fused_params)
        self._embedding_names, self._columns, self._features = pooled_outputs(configs)

    @forward_of_tables
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up and pools rows.

        Args:
            features: bags of ids of at least this collection's features. If features differ in the number
                of bags, `inverse_indices` must contain the bag of each sample.

        Returns:
            [B, D], one key per feature and table, in the order of the tables.

        Raises:
            ValueError: if a feature is missing, or the tensors do not match each other.
        """
        if not isinstance(features, KeyedJaggedTensor):
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
        pooled = self.unsharded_lookup.look_up(read, self.training)
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
        return self._without_rows(DynamicEmbeddingBagCollection, is_weighted=self._is_weighted)


def outputs_by_sample(
    pooled: Sequence[Tensor], inverse_indices: tuple[list[str], Tensor] | None, names: list[str]
) -> Tensor:
    """Returns the outputs [bags, columns] of all features side by side, in the bag of each sample: [B, D].

    TorchRec's `process_pooled_embeddings` does the same, but adds gradients in any order on CUDA. `names`
    are the features of the outputs. Without inverse_indices bag i belongs to sample i.
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
    """Returns the bag of each sample, [F, B] int64, for features in order, without a wait of the host."""
    names, bags = inverse_indices
    place = {name: i for i, name in enumerate(names)}
    order = host_numbers([place[feature] for feature in features])
    return bags.index_select(0, order.to(bags.device, non_blocking=True))
