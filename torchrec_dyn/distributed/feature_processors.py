"""TorchRec's feature-processed collection around a dynamic collection, on several ranks.

A feature processor computes the weights of a bag's ids, usually from their positions in the bag. If rows are
spread over ranks, a bag is split on its way to the owners. So the positions are sent as the weights of the
batch, and the processors on the owners compute the weights from the positions, and the gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
)
from torchrec.distributed.utils import modify_input_for_feature_processor
from torchrec.modules.feature_processor_ import (
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.distributed.resharding import reshard
from torchrec_dyn.distributed.sharded_collections import ShardedDynamicEmbeddingBagCollection
from torchrec_dyn.distributed.sharding_setup import check_surroundings
from torchrec_dyn.distributed.stages import ForwardOutsideGraphs
from torchrec_dyn.modules import DynamicEmbeddingBagCollection, check_unprocessed
from torchrec_dyn.ranks import SPREAD_SHARDINGS
from torchrec_dyn.storage import wait_for_stream

Processors: TypeAlias = nn.ModuleDict | FeatureProcessorsCollection
_Argument = TypeVar("_Argument")


class ShardedDynamicFeatureProcessedEmbeddingBagCollection(
    ForwardOutsideGraphs, ShardedFeatureProcessedEmbeddingBagCollection
):
    """A `FeatureProcessedEmbeddingBagCollection` whose dynamic tables are on several ranks.

    Created by `DynamicFeatureProcessedEmbeddingBagCollectionSharder`. Every rank has all processors;
    DistributedDataParallel averages their gradients. The collection of the unsharded module is not changed;
    its processors become this module's.
    """

    unsharded_module_type = FeatureProcessedEmbeddingBagCollection
    _embedding_bag_collection: ShardedDynamicEmbeddingBagCollection

    def __init__(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        ebc_sharder: BaseEmbeddingSharder[Any],
        env: ShardingEnv,
        device: torch.device,
        module_fqn: str | None = None,
    ) -> None:
        self._where = f"{type(module).__name__}('{module_fqn or ''}')"
        processors, collection = module._feature_processors, module._embedding_bag_collection
        check_unprocessed(
            cast(DynamicEmbeddingBagCollection, collection).dynamic_configs(), self._where
        )
        plan = table_name_to_parameter_sharding
        _check_sends_positions(processors, plan, self._where)
        check_surroundings(env, device, self._where)  # before the processors move
        if not any(weight.is_meta for weight in processors.parameters()):
            processors.to(device)  # TorchRec resets weights that it moves, even trained ones
            device = next((weight.device for weight in processors.parameters()), device)
        super().__init__(module, plan, cast(Any, ebc_sharder), env, device, module_fqn)
        # They compute the weights, on the owners.
        self._embedding_bag_collection._check_batch.needs_weights = False
        self._longest = _longest_bags(processors)

    def split(self) -> tuple[Processors, ShardedDynamicEmbeddingBagCollection]:
        """Returns the processors and the sharded collection, as the unsharded module's `split` does."""
        return self._feature_processors, self._embedding_bag_collection

    @property
    def module_sharding_plan(self) -> EmbeddingModuleShardingPlan:
        """The present plan of the tables."""
        return self._embedding_bag_collection.module_sharding_plan

    def reshard(
        self,
        sharder: BaseEmbeddingSharder[Any],
        changed: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        """Moves tables to the ranks of another plan: all of these tables, or none. Collective."""
        collection, processors = self._embedding_bag_collection, self._feature_processors

        check = partial(_check_sends_positions, processors, changed, self._where)

        def follow() -> None:
            self._lookups = collection._lookups
            self._row_wise_sharded = bool(_spread_tables(collection.module_sharding_plan))

        reshard(sharder, collection, changed, env, device, wrapped=check, follow=follow)

    @not_compiled
    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Checks a batch and sends its ids to their owners, with positions if rows of a table are spread."""
        collection = self._embedding_bag_collection
        features = collection._check_batch(features, collection.training)
        features.length_per_key()  # lengths are checked before the processors read them
        self._check_lengths(features)
        if self._row_wise_sharded:
            features = _with_own_weights(features)
            modify_input_for_feature_processor(
                features, self._feature_processors, self._is_collection
            )
        return collection.send(ctx, features)

    def prefetch(
        self, dist_input: KJTList, forward_stream: torch.Stream | None = None, ctx: Any = None
    ) -> None:
        """Prefetches as the collection does."""
        self._embedding_bag_collection.prefetch(dist_input, forward_stream, ctx)

    @not_compiled
    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        """Computes weights, looks up the ids that arrived and sends pooled outputs back."""
        wait_for_stream(ctx.sending_stream)  # the processors read the ids
        return super().compute_and_output_dist(ctx, input)

    def preprocess_input(
        self, args: list[_Argument], kwargs: Mapping[str, _Argument]
    ) -> tuple[list[_Argument], Mapping[str, _Argument]]:
        """Does nothing: TorchRec writes positions into the user's batch, `input_dist` into a copy."""
        return args, kwargs

    @not_compiled
    def apply_feature_processors_to_kjt_list(self, dist_input: KJTList) -> KJTList:
        """Computes the weights of the ids that arrived."""
        # TorchRec's flag that the weights of a batch are positions: else that of an earlier batch would
        # apply, perhaps of another plan. In an unsharded module it is False.
        processors: Any = self._feature_processors.modules()
        marked = [processor for processor in processors if hasattr(processor, "_pre_processed")]
        for processor in marked:
            processor._pre_processed = self._row_wise_sharded
        try:
            return super().apply_feature_processors_to_kjt_list(dist_input)
        finally:
            for processor in marked:
                processor._pre_processed = False

    def add_fp_params_grad_sync_callback(
        self, lazy_awaitable_kt: LazyAwaitable[KeyedTensor]
    ) -> LazyAwaitable[KeyedTensor]:
        """Makes the output of every rank depend on the processors' parameters, if there are any."""
        if next(self._feature_processors.parameters(), None) is None:
            return lazy_awaitable_kt
        return super().add_fp_params_grad_sync_callback(lazy_awaitable_kt)

    def _check_lengths(self, features: KeyedJaggedTensor) -> None:
        """Raises ValueError if a bag has more ids than its feature has position weights."""
        lengths = features.lengths()
        if not self._longest or not lengths.numel():
            return
        if int(lengths.max()) <= min(self._longest.values()):
            return
        parts = torch.split(lengths, features.stride_per_key())
        for name, part in zip(features.keys(), parts, strict=True):
            if name in self._longest and part.numel() and int(part.max()) > self._longest[name]:
                raise ValueError(
                    f"{self._where}: expected bags of at most {self._longest[name]} ids of feature "
                    f"'{name}', one position weight each, got a bag of {int(part.max())}. Shorten the bag, "
                    "or increase max_feature_length."
                )


def _spread_tables(plan: Mapping[str, ParameterSharding]) -> list[str]:
    """Lists the tables whose rows are spread over ranks."""
    return [name for name, table in plan.items() if table.sharding_type in SPREAD_SHARDINGS]


def _with_own_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns a copy of a batch with its own weights; TorchRec overwrites them with positions."""
    copied, weights = copy.copy(features), features.weights_or_none()
    copied._jt_dict = None  # it has the weights of the user's batch
    if weights is None:
        copied._weights = torch.zeros_like(features.values(), dtype=torch.float32)
    else:
        copied._weights = weights.detach().float().clone()  # float16 is exact up to 2048 only
    return copied


def _check_sends_positions(
    processors: Processors, plan: Mapping[str, ParameterSharding], where: str
) -> None:
    """Checks that processors can send positions, where an owner gets only a part of each bag."""
    spread = _spread_tables(plan)
    is_collection = isinstance(processors, FeatureProcessorsCollection)
    each: Sequence[Any] = [processors] if is_collection else list(processors.values())
    for processor in each if spread else ():
        if not hasattr(processor, "pre_process_input"):
            raise ValueError(
                f"{where}: expected feature processors with pre_process_input where rows are spread, "
                f"as for tables {spread}, got {type(processor).__name__}. Add the method (it may do "
                "nothing if positions do not matter), or shard these tables table-wise or column-wise."
            )


def _longest_bags(processors: Processors) -> dict[str, int]:
    """Returns the number of position weights of each feature; other types of processors are left out."""
    weights: Mapping[str, Tensor]
    if type(processors) is PositionWeightedModuleCollection:
        weights = dict(cast(Any, processors).position_weights.items())
    elif isinstance(processors, nn.ModuleDict):
        weights = {
            name: cast(Tensor, processor.position_weight)
            for name, processor in processors.items()
            if type(processor) is PositionWeightedModule
        }
    else:
        weights = {}
    return {name: weight.numel() for name, weight in weights.items()}
