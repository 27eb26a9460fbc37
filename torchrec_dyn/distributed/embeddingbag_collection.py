"""The sharded pooled collection: TorchRec's collection with our shardings, stitching and MEAN."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import (
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.distributed.local_shards import LocalShards
from torchrec_dyn.distributed.sharding_setup import ShardingSetup
from torchrec_dyn.distributed.stages import BatchContext, ShardedTables
from torchrec_dyn.modules import DynamicEmbeddingBagCollection
from torchrec_dyn.sharding import (
    POOLED_SHARDINGS,
    BatchCheck,
    divide,
    mean_divisor,
    with_an_example,
    without_examples,
)
from torchrec_dyn.storage import host_numbers


@dataclass
class PooledContext(BatchContext, EmbeddingBagCollectionContext):
    """State of one forward; `has_examples` is False if one was added (`with_an_example`)."""

    has_examples: bool = True


class ShardedDynamicEmbeddingBagCollection(ShardedTables, ShardedEmbeddingBagCollection):
    """A `DynamicEmbeddingBagCollection` whose tables are on several ranks.

    Created by `DynamicEmbeddingBagCollectionSharder`. Rows trained before sharding are copied; `module`
    is not changed. The arguments are those of TorchRec's class.

    Raises:
        ValueError: if the plan is not valid; raised before anything is built.
    """

    def __init__(
        self,
        module: DynamicEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        module_fqn: str | None = None,
    ) -> None:
        setup = ShardingSetup(
            module,
            "embedding_bags",
            table_name_to_parameter_sharding,
            env,
            fused_params,
            list(POOLED_SHARDINGS),
            device,
            module_fqn,
        )
        super().__init__(
            setup,
            setup.plan,
            env,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
            module_fqn=module_fqn,
        )
        # TorchRec's divisor also divides outputs of other tables; `_mean` replaces it.
        self._has_mean_pooling_callback = False
        self._divided_by = self._features_of_means(setup)
        self._check_batch = BatchCheck(
            setup.features, module.is_weighted(), True, setup.where, setup.is_scored
        )
        self._shards = LocalShards(setup, self, env, "embedding_bags")
        self._shards.fill_from(module)
        self._output_names = list(self._embedding_names)

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[Any, KeyedJaggedTensor, Tensor, Tensor]:
        """Creates the sharding of all tables of one type."""
        kind = POOLED_SHARDINGS[sharding_infos[0].param_sharding.sharding_type]
        options: dict[str, Any] = {"qcomm_codecs_registry": qcomm_codecs_registry}
        if issubclass(kind, CwPooledEmbeddingSharding):
            options["permute_embeddings"] = permute_embeddings
        return kind(sharding_infos, env, device, **options)

    @not_compiled
    def input_dist(
        self, ctx: PooledContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Checks a batch and sends its ids, any int64, to their owners."""
        return self.send(ctx, self.checked_batch(features))

    def checked_batch(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Checks a batch, and returns it with the features of the first batch, in the same order."""
        return self._check_batch(features, self.training)

    def send(
        self, ctx: PooledContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Sends the ids of a batch that `checked_batch` returned to their owners."""
        self._open(ctx, features.device())
        if features.variable_stride_per_key() and not features.inverse_indices()[1].numel():
            features, ctx.has_examples = with_an_example(features), False
        self._prepare_dists(features)
        if any(self._divided_by):
            with torch.no_grad():
                ctx.divisor = mean_divisor(features, self._divided_by)
        ctx.inverse_indices = features.inverse_indices_or_none()
        return self._send(ctx, features)

    def _noted(self, ctx: PooledContext, parts: list[KeyedJaggedTensor]) -> list[KeyedJaggedTensor]:
        ctx.variable_batch_per_feature = varies = parts[0].variable_stride_per_key()
        ctx.sharding_contexts = [
            EmbeddingShardingContext(
                batch_size_per_feature_pre_a2a=part.stride_per_key() if varies else [],
                variable_batch_per_feature=varies,
            )
            for part in parts
        ]
        return parts

    def create_context(self) -> PooledContext:
        """Creates the state of one forward."""
        return PooledContext()

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The type of the unsharded collection."""
        return DynamicEmbeddingBagCollection

    _has_uninitialized_input_dist: bool

    def _prepare_dists(self, features: KeyedJaggedTensor) -> None:
        """Creates input dists at the first batch, as TorchRec does, without its warning about raw ids."""
        if self._has_uninitialized_input_dist:
            # An interrupted first batch may have created some dists.
            self._input_dists, self._feature_splits, self._features_order = [], [], []
            self._create_input_dist(features.keys())
            self._order_inverse_indices(features.device())
            self._has_uninitialized_input_dist = False

    def _order_inverse_indices(self, device: torch.device) -> None:
        """Sets the order of `inverse_indices` by output, for batches with a size per feature.

        They come in the order of the collection's features. TorchRec's method takes what is before an "@" in
        the name of a feature for the name.
        """
        place = {feature: i for i, feature in enumerate(self._check_batch.features)}
        features = self._features_by_output([config.name for config in self._embedding_bag_configs])
        order = [place[features[name]] for name in self._uncombined_embedding_names]
        if order != list(range(len(place))):
            indices = host_numbers(order).to(device, non_blocking=True)
            self._inverse_indices_permute_indices = indices

    def _features_by_output(self, tables: Container[str]) -> dict[str, str]:
        """Returns the feature of each output of some tables, by the name of the output."""
        configs = self._embedding_bag_configs
        return {
            name: feature
            for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
            if config.name in tables
            for name, feature in zip(names, config.feature_names, strict=True)
        }

    def _features_of_means(self, setup: ShardingSetup) -> list[str | None]:
        """Returns for each output the feature whose bags divide it after the output dist, if any."""
        divided = [
            config.name
            for config in self._embedding_bag_configs
            if config.pooling == PoolingType.MEAN and setup.layouts[config.name].rows_are_spread
        ]
        features = self._features_by_output(divided)
        return [features.get(name) for name in self._embedding_names]

    def _finished(
        self, awaitable: LazyAwaitable[KeyedTensor], ctx: PooledContext
    ) -> LazyAwaitable[KeyedTensor]:
        """Divides means, and keeps the order of the outputs after tables have moved."""
        if ctx.divisor is not None:
            awaitable.callbacks.append(partial(divide, divisor=ctx.divisor))
        if self._output_names != self._embedding_names:
            awaitable.callbacks.append(partial(_in_order, names=self._output_names))
        if not ctx.has_examples:
            awaitable.callbacks.append(without_examples)
        return awaitable


def _in_order(pooled: KeyedTensor, names: Sequence[str]) -> KeyedTensor:
    """Returns pooled outputs [B, D] in the order of `names`; `pooled` itself if it has that order."""
    if pooled.keys() == names:
        return pooled
    widths = dict(zip(pooled.keys(), pooled.length_per_key(), strict=True))
    values = torch.cat([pooled[name] for name in names], dim=1)
    return KeyedTensor(list(names), [widths[name] for name in names], values)
