"""TorchRec's feature-processed collection around a dynamic one, on several ranks.

A feature processor computes the weights of a bag's ids, as a rule from their positions. On the way
to the ranks that share the rows of a table a bag is taken apart, so there the positions travel as
weights; what the processors make of them is computed where the rows are, and its gradients too.

What feature processors ask of a batch and of a plan: positions that travel, bags that are not too long.
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


def with_weights_of_its_own(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Copies a batch, which is the caller's, so far that positions can be written over its weights.

    Args:
        features: not changed.
    """
    made, weights = copy.copy(features), features.weights_or_none()
    made._jt_dict = None  # of the caller's weights
    if weights is None:
        made._weights = torch.zeros_like(features.values(), dtype=torch.float32)
    else:
        made._weights = weights.detach().float().clone()  # float16 cannot count beyond 2048
    return made


def check_positions_travel(processors: Processors, spread: Sequence[str], where: str) -> None:
    """Refuses processors that would take the place of an id on its rank for its position.

    Args:
        processors: of the features.
        spread: names of the tables whose rows are spread.
        where: the collection, for messages.

    Raises:
        ValueError: if a processor has no pre_process_input.
    """
    is_collection = isinstance(processors, FeatureProcessorsCollection)
    each: Sequence[Any] = [processors] if is_collection else list(processors.values())
    for one in each:
        if not hasattr(one, "pre_process_input"):
            raise ValueError(
                f"{where}: expected feature processors with pre_process_input where rows are spread, "
                f"as those of tables {spread}, got {type(one).__name__}. Give it one (which does nothing "
                "if positions do not count), or shard these tables table-wise or column-wise."
            )


@contextmanager
def told_of_positions(processors: Processors, have_travelled: bool) -> Iterator[None]:
    """Lets TorchRec's processors know whether the weights of the batches inside are positions.

    They remember it of whatever batch went before, perhaps under another plan; and unsharded none has any.

    Args:
        processors: of the features.
        have_travelled: whether they are.
    """
    told: list[Any] = [one for one in processors.modules() if hasattr(one, "_pre_processed")]
    for one in told:
        one._pre_processed = have_travelled
    try:
        yield
    finally:
        for one in told:
            one._pre_processed = False


def longest_bags(processors: Processors) -> dict[str, int]:
    """Gives how many position weights a feature has; a processor of another type may do without."""
    weights: Mapping[str, Tensor]
    if type(processors) is PositionWeightedModuleCollection:
        weights = dict(cast(Any, processors).position_weights.items())
    elif isinstance(processors, nn.ModuleDict):
        weights = {
            name: cast(Tensor, one.position_weight)
            for name, one in processors.items()
            if type(one) is PositionWeightedModule
        }
    else:
        weights = {}
    return {name: one.numel() for name, one in weights.items()}


_Argument = TypeVar("_Argument")


class ShardedDynamicFeatureProcessedEmbeddingBagCollection(
    ShardedFeatureProcessedEmbeddingBagCollection
):
    """A `FeatureProcessedEmbeddingBagCollection` whose dynamic tables lie on several ranks.

    Made by `DynamicFeatureProcessedEmbeddingBagCollectionSharder`. The processors stay whole on every
    rank; DistributedDataParallel averages their gradients.

    Args:
        module: what to shard; its collection is not changed, its processors are taken over.
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
            check_positions_travel(processors, spread, self._where)
        super().__init__(module, plan, cast(Any, ebc_sharder), env, device, module_fqn)
        self._embedding_bag_collection.take_weights_after_input_dist()
        self._longest = longest_bags(processors)

    def split(
        self,
    ) -> tuple[Processors, ShardedDynamicEmbeddingBagCollection]:
        """Gives the processors and the sharded collection, as the unsharded module's `split` does."""
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
                check_positions_travel(processors, spread, self._where)

        reshard(sharder, collection, changed, env, device, wrapped=check)
        self._lookups = collection._lookups
        self._row_wise_sharded = bool(_spread_tables(collection.module_sharding_plan))

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Checks a batch and sends its ids to their owners, where rows are spread with their positions.

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
            features = with_weights_of_its_own(features)
            modify_input_for_feature_processor(
                features, self._feature_processors, self._is_collection
            )
        return self._embedding_bag_collection.send(ctx, features)

    def preprocess_input(
        self, args: list[_Argument], kwargs: Mapping[str, _Argument]
    ) -> tuple[list[_Argument], Mapping[str, _Argument]]:
        """Does nothing, where TorchRec's would write into the batch: `input_dist` sees to positions."""
        return args, kwargs

    def apply_feature_processors_to_kjt_list(self, dist_input: KJTList) -> KJTList:
        """Computes the weights of the ids that arrived; processors see ids as the user wrote them."""
        mixed = [lookup.ids_are_mixed for lookup in self._embedding_bag_collection._lookups]
        shown = [
            with_ids(one, ops.unmix64(one.values())) if is_mixed else one
            for one, is_mixed in zip(dist_input, mixed, strict=True)
        ]
        with told_of_positions(self._feature_processors, self._row_wise_sharded):
            processed = super().apply_feature_processors_to_kjt_list(KJTList(shown))
        return KJTList(
            [
                with_ids(one, ops.mix64(one.values())) if is_mixed else one
                for one, is_mixed in zip(processed, mixed, strict=True)
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
        """Refuses a bag without a weight for each position before anything is sent."""
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
    """Shards TorchRec's feature-processed collections around a dynamic one, but for data-parallel.

    It takes the place of TorchRec's sharder, which serves the same type of module: it makes a static
    table of a dynamic one.

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
            module: the module; its collection is not changed, its processors are taken over.
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
            sharded_module: what this sharder made; changed in place.
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
        """What it makes."""
        return ShardedDynamicFeatureProcessedEmbeddingBagCollection


def _spread_tables(plan: Mapping[str, ParameterSharding]) -> list[str]:
    """Lists the tables whose rows ranks share."""
    return [name for name, one in plan.items() if one.sharding_type in SPREAD_SHARDINGS]
