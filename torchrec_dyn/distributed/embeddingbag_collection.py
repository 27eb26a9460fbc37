"""The sharded pooled collection: TorchRec's collection with our shardings, stitching and MEAN."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
)
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
from torchrec_dyn.distributed.local_shards import LocalShards, ShardedTables
from torchrec_dyn.distributed.outside_graphs import ForwardOutsideGraphs
from torchrec_dyn.distributed.sharding_setup import ShardingSetup, set_up
from torchrec_dyn.modules import DynamicEmbeddingBagCollection
from torchrec_dyn.sharding import (
    POOLED_SHARDINGS,
    BatchCheck,
    MeanDivisor,
    StepsAhead,
    divide,
    pooled_in_order,
    pooled_sharding,
    remove_stale_forwards,
    set_senders,
    steps_ahead_in_use,
    take_steps_ahead,
)
from torchrec_dyn.storage import ForwardTicket, stream_on, wait_for_stream


@dataclass
class PooledContext(EmbeddingBagCollectionContext):
    """State of one forward, from input dist to output dist.

    Attributes:
        sent: ticket that is open from sending the ids to their lookup; None before.
        sending_stream: the stream that sends and receives the ids; None on the CPU.
        steps_ahead: the training steps of the batch that were taken when it was prefetched.
    """

    sent: ForwardTicket | None = None
    sending_stream: Any = None
    steps_ahead: StepsAhead = field(default_factory=dict)


class ShardedDynamicEmbeddingBagCollection(
    ForwardOutsideGraphs, ShardedTables, ShardedEmbeddingBagCollection
):
    """A `DynamicEmbeddingBagCollection` whose tables are on several ranks.

    Created by `DynamicEmbeddingBagCollectionSharder`. Rows trained before sharding are copied.

    Args:
        module: the collection to shard; it is not changed.
        table_name_to_parameter_sharding: the plan of its tables.
        env: the ranks.
        fused_params: the sharder's `fused_params`.
        device: device of the rows.
        qcomm_codecs_registry: TorchRec's codecs of quantized comms.
        module_fqn: path of the collection in the model.

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
        setup = set_up(
            module,
            "embedding_bags",
            module.embedding_bag_configs(),
            table_name_to_parameter_sharding,
            env,
            fused_params,
            list(POOLED_SHARDINGS),
            device,
            module_fqn,
        )
        super().__init__(
            setup.view,
            setup.plan,
            env,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
            module_fqn=module_fqn,
        )
        # TorchRec's divisor also divides outputs of other tables; `_mean` replaces it.
        self._has_mean_pooling_callback = False
        self._mean = self._mean_divisor(setup)
        configs = module.embedding_bag_configs()
        names = [name for config in configs for name in config.feature_names]
        self._check_batch = BatchCheck(names, module.is_weighted(), True, setup.where)
        self._shards = LocalShards(setup, self._lookups, env)
        self._shards.fill_from(module.local_tables())
        self._shards.save_and_load_with(self, "embedding_bags")
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
        return pooled_sharding(
            sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
        )

    @not_compiled
    def input_dist(
        self, ctx: PooledContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Checks a batch and sends its ids to their owners.

        Args:
            ctx: the state of this forward.
            features: bags of any int64 ids.

        Raises:
            ValueError: as `checked_batch`.
        """
        return self.send(ctx, self.checked_batch(features))

    def checked_batch(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Checks a batch, and returns it with the features of the first batch, in the same order.

        Raises:
            ValueError: if a feature is missing, the tensors do not match each other, or weights require a
                gradient: TorchRec's all-to-all of ids and weights has no backward.
        """
        return self._check_batch(features)

    def send(
        self, ctx: PooledContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Sends the ids of a checked batch to their owners.

        Args:
            ctx: the state of this forward.
            features: a batch that `checked_batch` returned.
        """
        ctx.sent = self._shards.open_batch()
        ctx.sending_stream = stream_on(features.device())
        self._prepare_dists(features)
        remove_stale_forwards(self._input_dists)
        if self._mean.is_needed:
            with torch.no_grad():
                ctx.divisor = self._mean(features)
        return super().input_dist(ctx, features)

    @not_compiled
    def prefetch(
        self,
        dist_input: KJTList,
        forward_stream: torch.Stream | None = None,
        ctx: PooledContext | None = None,
    ) -> None:
        """Inserts rows for the ids that arrived, or takes the step of tables with a life, before the forward.

        Args:
            dist_input: the ids that arrived.
            forward_stream: not used; the forward keeps what it uses.
            ctx: the state of the forward, which keeps the steps; None: no steps are taken.
        """
        super().prefetch(dist_input, forward_stream, ctx)
        if ctx is not None:
            take_steps_ahead(self._lookups, dist_input, ctx.steps_ahead)

    @not_compiled
    def compute(self, ctx: PooledContext, dist_input: KJTList) -> list[Tensor]:
        """Looks up the ids that arrived."""
        set_senders(self._lookups, ctx.sharding_contexts)
        with steps_ahead_in_use(ctx.steps_ahead):
            return super().compute(ctx, dist_input)

    def accept_unweighted_batches(self) -> None:
        """Accepts batches without weights: feature processors compute the weights on the owners."""
        self._check_batch.needs_weights = False

    @not_compiled
    def output_dist(self, ctx: PooledContext, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        """Sends pooled outputs back to the ranks of their batches."""
        return self._finished(super().output_dist(ctx, output), ctx)

    @not_compiled
    def compute_and_output_dist(
        self, ctx: PooledContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Looks up the ids that arrived and sends pooled outputs back."""
        if ctx.sent is not None:
            ctx.sent.close()
        wait_for_stream(ctx.sending_stream)  # TrainPipelineSemiSync does not
        set_senders(self._lookups, ctx.sharding_contexts)
        with steps_ahead_in_use(ctx.steps_ahead):
            return self._finished(super().compute_and_output_dist(ctx, input), ctx)

    def create_context(self) -> PooledContext:
        """Creates the state of one forward."""
        return PooledContext()

    def reset_parameters(self) -> None:
        """Does nothing: a row is initialised when its id is first seen."""

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The type of the unsharded collection."""
        return DynamicEmbeddingBagCollection

    _has_uninitialized_input_dist: bool
    _input_dists: list[nn.Module]
    _feature_splits: list[int]
    _features_order: list[int]

    def _prepare_dists(self, features: KeyedJaggedTensor) -> None:
        """Creates input dists at the first batch, as TorchRec does, without its warning about raw ids."""
        if self._has_uninitialized_input_dist:
            # An interrupted first batch may have created some dists.
            self._input_dists, self._feature_splits, self._features_order = [], [], []
            self._create_input_dist(features.keys())
            self._has_uninitialized_input_dist = False
            if features.variable_stride_per_key():
                self._create_inverse_indices_permute_indices(features.inverse_indices_or_none())

    def _mean_divisor(self, setup: ShardingSetup) -> MeanDivisor:
        """Returns the divisor of the outputs that must be divided after the output dist."""
        feature_of_output: dict[str, str] = {}
        configs = self._embedding_bag_configs
        for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True):
            if config.pooling == PoolingType.MEAN and setup.layouts[config.name].rows_are_spread:
                feature_of_output.update(zip(names, config.feature_names, strict=True))
        return MeanDivisor(
            [feature_of_output.get(name) for name in self._embedding_names],
            self._embedding_dims,
        )

    def _finished(
        self, awaitable: LazyAwaitable[KeyedTensor], ctx: PooledContext
    ) -> LazyAwaitable[KeyedTensor]:
        """Divides means, and keeps the order of the outputs after tables have moved."""
        if ctx.divisor is not None:
            awaitable.callbacks.append(partial(divide, divisor=ctx.divisor))
        if self._output_names != self._embedding_names:
            awaitable.callbacks.append(partial(pooled_in_order, names=self._output_names))
        return awaitable
