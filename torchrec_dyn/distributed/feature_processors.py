"""TorchRec's feature-processed collection around a dynamic one, on several ranks.

A feature processor computes the weights of a bag's ids, usually from their positions in the bag. On the way
to ranks that share the rows of a table a bag is split, so there the positions travel as weights: processors
compute the weights from them where the rows are, and gradients too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
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

from torchrec_dyn import ops
from torchrec_dyn.distributed.embeddingbag_collection import ShardedDynamicEmbeddingBagCollection
from torchrec_dyn.distributed.resharding import reshard
from torchrec_dyn.distributed.sharders import DynamicEmbeddingBagCollectionSharder
from torchrec_dyn.modules import DynamicEmbeddingBagCollection
from torchrec_dyn.ranks import SPREAD_SHARDINGS
from torchrec_dyn.sharding import with_ids

Processors: TypeAlias = nn.ModuleDict | FeatureProcessorsCollection
_Argument = TypeVar("_Argument")


class ShardedDynamicFeatureProcessedEmbeddingBagCollection(
    ShardedFeatureProcessedEmbeddingBagCollection
):
    """A `FeatureProcessedEmbeddingBagCollection` whose dynamic tables lie on several ranks.

    Made by `DynamicFeatureProcessedEmbeddingBagCollectionSharder`. The processors stay whole on every
    rank; DistributedDataParallel averages their gradients.

    Args:
        module: the module to shard; its collection is not changed, its processors become this module's.
        table_name_to_parameter_sharding: the plan of its tables.
        ebc_sharder: shards the collection.
        env: the ranks.
        device: where the rows live.
        module_fqn: where the model holds the module.

    Raises:
        ValueError: if the collection is not dynamic, a processor cannot work where rows are spread, or
            the plan cannot be honoured; before anything is built.
    """

    _embedding_bag_collection: ShardedDynamicEmbeddingBagCollection

    def __init__(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        ebc_sharder: DynamicEmbeddingBagCollectionSharder,
        env: ShardingEnv,
        device: torch.device,
        module_fqn: str | None = None,
    ) -> None:
        self._where = f"{type(module).__name__}('{module_fqn or ''}')"
        processors, collection = module._feature_processors, module._embedding_bag_collection
        if not isinstance(collection, DynamicEmbeddingBagCollection):
            raise ValueError(
                f"{self._where}: expected a DynamicEmbeddingBagCollection inside, got "
                f"{type(collection).__name__}. Convert it with make_dynamic or from_static first."
            )
        plan = table_name_to_parameter_sharding
        if spread := _spread_tables(plan):
            _check_positions_travel(processors, spread, self._where)
        super().__init__(module, plan, cast(Any, ebc_sharder), env, device, module_fqn)
        self._embedding_bag_collection.accept_unweighted_batches()
        self._longest = _longest_bags(processors)

    def split(self) -> tuple[Processors, ShardedDynamicEmbeddingBagCollection]:
        """Returns the processors and the sharded collection, as the unsharded module's `split` does."""
        return self._feature_processors, self._embedding_bag_collection

    @property
    def module_sharding_plan(self) -> EmbeddingModuleShardingPlan:
        """The plan of the tables, as it is now."""
        return self._embedding_bag_collection.module_sharding_plan

    def reshard(
        self,
        sharder: DynamicEmbeddingBagCollectionSharder,
        changed: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        """Moves tables to where another plan has them; all of them or none. Collective.

        Args:
            sharder: shards the collection.
            changed: the new plan of the tables that move.
            env: the ranks.
            device: where the rows live.

        Raises:
            ValueError, RuntimeError: as `DynamicEmbeddingBagCollectionSharder.reshard`, and if a processor
                cannot work where rows would be spread.
        """
        collection, processors = self._embedding_bag_collection, self._feature_processors

        def check() -> None:
            if spread := _spread_tables(changed):
                _check_positions_travel(processors, spread, self._where)

        reshard(sharder, collection, changed, env, device, wrapped=check)
        self._lookups = collection._lookups
        self._row_wise_sharded = bool(_spread_tables(collection.module_sharding_plan))

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Checks a batch and sends its ids to their owners, with their positions where rows are spread.

        Args:
            ctx: of this forward.
            features: bags of any int64 ids; it is not changed.

        Raises:
            ValueError: if a feature is missing, the tensors do not fit each other, or a bag is longer
                than the position weights of its feature.
        """
        features = self._embedding_bag_collection.checked_batch(features)
        self._check_lengths(features)
        if self._row_wise_sharded:
            features = _with_own_weights(features)
            modify_input_for_feature_processor(
                features, self._feature_processors, self._is_collection
            )
        return self._embedding_bag_collection.send(ctx, features)

    def preprocess_input(
        self, args: list[_Argument], kwargs: Mapping[str, _Argument]
    ) -> tuple[list[_Argument], Mapping[str, _Argument]]:
        """Does nothing: TorchRec's writes positions into the caller's batch, `input_dist` into a copy."""
        return args, kwargs

    def apply_feature_processors_to_kjt_list(self, dist_input: KJTList) -> KJTList:
        """Computes the weights of the ids that arrived; processors see ids as the user wrote them."""
        mixed = [lookup.ids_are_mixed for lookup in self._embedding_bag_collection._lookups]
        unmixed = [
            with_ids(features, ops.unmix64(features.values())) if is_mixed else features
            for features, is_mixed in zip(dist_input, mixed, strict=True)
        ]
        with _positions_marked(self._feature_processors, self._row_wise_sharded):
            processed = super().apply_feature_processors_to_kjt_list(KJTList(unmixed))
        return KJTList(
            [
                with_ids(features, ops.mix64(features.values())) if is_mixed else features
                for features, is_mixed in zip(processed, mixed, strict=True)
            ]
        )

    def add_fp_params_grad_sync_callback(
        self, lazy_awaitable_kt: LazyAwaitable[KeyedTensor]
    ) -> LazyAwaitable[KeyedTensor]:
        """Ties the processors' parameters to the output of every rank, if they have any."""
        if next(self._feature_processors.parameters(), None) is None:
            return lazy_awaitable_kt
        return super().add_fp_params_grad_sync_callback(lazy_awaitable_kt)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The module that was sharded."""
        return FeatureProcessedEmbeddingBagCollection

    def _check_lengths(self, features: KeyedJaggedTensor) -> None:
        """Refuses bags that are longer than the position weights of their feature."""
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
                    f"'{name}', one position weight each, got one of {int(part.max())}. Cut the bag, "
                    "or raise max_feature_length."
                )


class DynamicFeatureProcessedEmbeddingBagCollectionSharder(
    FeatureProcessedEmbeddingBagCollectionSharder
):
    """Shards TorchRec's feature-processed collections around a dynamic one, by all types but data-parallel.

    Pass it in place of TorchRec's sharder for the same type of module, which makes static tables.

    Args:
        fused_params: as of `DynamicEmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: TorchRec's codecs of quantized comms.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        self._collection_sharder = DynamicEmbeddingBagCollectionSharder(
            fused_params, qcomm_codecs_registry
        )
        super().__init__(cast(Any, self._collection_sharder), qcomm_codecs_registry)

    def shard(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicFeatureProcessedEmbeddingBagCollection:
        """Shards a collection and its processors.

        Args:
            module: the module; its collection is not changed, its processors become the sharded module's.
            params: the plan of its tables.
            env: the ranks.
            device: where the rows live; None: cpu.
            module_fqn: where the model holds the module.

        Raises:
            ValueError: if it cannot be sharded so; before anything is built.
        """
        place = device if device is not None else torch.device("cpu")
        return ShardedDynamicFeatureProcessedEmbeddingBagCollection(
            module, params, self._collection_sharder, env, place, module_fqn
        )

    def reshard(
        self,
        sharded_module: ShardedDynamicFeatureProcessedEmbeddingBagCollection,
        changed_shard_to_params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedDynamicFeatureProcessedEmbeddingBagCollection:
        """Moves tables, for `DistributedModelParallel.reshard`; the processors stay. Collective.

        Args:
            sharded_module: sharded by this sharder; changed in place.
            changed_shard_to_params: the new plan of the tables that move.
            env: the ranks.
            device: where the rows live.

        Returns:
            The same module.

        Raises:
            ValueError, RuntimeError: as `DynamicEmbeddingBagCollectionSharder.reshard`.
        """
        sharded_module.reshard(self._collection_sharder, changed_shard_to_params, env, device)
        return sharded_module

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns all types; the planner takes those that spread rows only where constraints name them."""
        return self._collection_sharder.sharding_types(compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns "fused", as of the dynamic collections."""
        return self._collection_sharder.compute_kernels(sharding_type, compute_device_type)

    @property
    def sharded_module_type(self) -> type[ShardedDynamicFeatureProcessedEmbeddingBagCollection]:
        """The sharded module."""
        return ShardedDynamicFeatureProcessedEmbeddingBagCollection


def _spread_tables(plan: Mapping[str, ParameterSharding]) -> list[str]:
    """Lists the tables whose rows are spread over ranks."""
    return [name for name, table in plan.items() if table.sharding_type in SPREAD_SHARDINGS]


def _with_own_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Copies a batch so far that positions can be written over its weights: the batch is the caller's."""
    made, weights = copy.copy(features), features.weights_or_none()
    made._jt_dict = None  # holds the caller's weights
    if weights is None:
        made._weights = torch.zeros_like(features.values(), dtype=torch.float32)
    else:
        made._weights = weights.detach().float().clone()  # float16 cannot count beyond 2048
    return made


def _check_positions_travel(processors: Processors, spread: Sequence[str], where: str) -> None:
    """Refuses processors that would take the position of an id on its rank for its position in the bag.

    Args:
        processors: of the features.
        spread: names of the tables whose rows are spread.
        where: the collection, for messages.

    Raises:
        ValueError: if a processor has no pre_process_input.
    """
    is_collection = isinstance(processors, FeatureProcessorsCollection)
    each: Sequence[Any] = [processors] if is_collection else list(processors.values())
    for processor in each:
        if not hasattr(processor, "pre_process_input"):
            raise ValueError(
                f"{where}: expected feature processors with pre_process_input where rows are spread, "
                f"as those of tables {spread}, got {type(processor).__name__}. Give it one (which does "
                "nothing if positions do not count), or shard these tables table-wise or column-wise."
            )


@contextmanager
def _positions_marked(processors: Processors, are_weights: bool) -> Iterator[None]:
    """Marks in TorchRec's processors whether the weights of the batches inside are positions.

    They would remember it of the batch before, perhaps under another plan; unsharded, weights never are.
    """
    marked: list[Any] = [one for one in processors.modules() if hasattr(one, "_pre_processed")]
    for processor in marked:
        processor._pre_processed = are_weights
    try:
        yield
    finally:
        for processor in marked:
            processor._pre_processed = False


def _longest_bags(processors: Processors) -> dict[str, int]:
    """Returns how many position weights a feature has; other types of processors are left out."""
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
    return {name: of_feature.numel() for name, of_feature in weights.items()}
