"""A sharded forward and its stages, as far as they are the same for pooled and for sequence collections.

A pipeline calls the stages of a batch at different times and on different streams; the context of the batch
carries what they have in common.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyNoWait, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn.compilers import forward_of_tables, not_compiled, refuse_script
from torchrec_dyn.distributed.local_shards import LocalShards
from torchrec_dyn.modules import (
    Description,
    check_not_for_inference,
    check_runs_once,
    refuses_quantization,
)
from torchrec_dyn.ranks import TableHandle
from torchrec_dyn.sharding import (
    ArrivedIds,
    PrefetchedSteps,
    RowsContext,
    StayingOutput,
    check_modes,
    kernels_of,
    prefetch,
    remove_stale_forwards,
    sent_batch,
)
from torchrec_dyn.state_dict import check_taken
from torchrec_dyn.storage import OpenForward, stream_on, wait_for_stream


class ForwardOutsideGraphs(ShardedModule[Any, Any, Any, Any]):
    """Mixin for TorchRec's sharded modules: their forward is a graph break."""

    __prepare_scriptable__ = refuse_script

    def forward(self, *input: Any, **kwargs: Any) -> LazyAwaitable[Any]:
        """Sends the ids of a batch, looks them up and sends outputs back."""
        output = self._forward(*input, **kwargs)
        # The compiler would trace the exchange that an awaitable waits for.
        return _waited(output) if torch.compiler.is_compiling() else output

    @forward_of_tables
    def _forward(self, *input: Any, **kwargs: Any) -> LazyAwaitable[Any]:
        ctx = self.create_context()
        ctx.is_ahead = False
        ids = self.input_dist(ctx, *input, **kwargs).wait().wait()
        return self.compute_and_output_dist(ctx, ids)


@not_compiled
def _waited(output: LazyAwaitable[Any]) -> LazyAwaitable[Any]:
    return LazyNoWait(LazyAwaitable._wait_async(output))


@dataclass
class BatchContext:
    """Mixin for TorchRec's contexts: our state of one forward, from input dist to output dist.

    `sent` is open from sending the ids to their lookup. `has_modes` is True until the modes that were sent
    with the batch are checked. `is_ahead` is True if a pipeline sends the batch while another one trains.
    """

    sent: OpenForward | None = None
    sending_stream: Any = None
    prefetched_steps: PrefetchedSteps = field(default_factory=dict)
    has_modes: bool = False
    is_ahead: bool = True


@refuses_quantization
class ShardedTables(ForwardOutsideGraphs):
    """Mixin for TorchRec's sharded collections, listed first: calls on tables, and a forward's stages."""

    holder: str  # the attribute of the unsharded collection that holds the tables
    sharding_classes: Mapping[str, Any]
    _shards: LocalShards
    _has_uninitialized_input_dist: bool
    _features_order: list[int]
    _feature_splits: list[int]
    _input_dists: list[Any]
    _output_dists: list[Any]

    @property
    def where(self) -> str:
        """The beginning of messages."""
        return self._shards.where

    @not_compiled
    def table(self, name: str) -> TableHandle:
        """Returns the handle of one table; it reads this rank's shard."""
        return self._shards.handle(name)

    @not_compiled
    def describe(self) -> Description:
        """Returns which tables share a call on this rank, with their rows, bytes and plan. Not collective."""
        plan = self.module_sharding_plan.items()
        return self._shards.describe({name: sharding.sharding_type for name, sharding in plan})

    @not_compiled
    def set_time(self, time: int) -> None:
        """Sets the clock of policies that count in time for the next training forwards. Collective.

        Args:
            time: an integer of 0 or more, in the unit of the policy. The latest time of all ranks is used; it
                must not be before the time set last.

        Raises:
            ValueError: on every rank, if some rank passed an invalid time, or the latest time is before the
                time set last.
        """
        self._shards.set_time(time)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `.half()`, `.double()` and `.to` of a model come here.
        for dtype in self._shards.output_dtypes:
            converted = fn(torch.empty(0, dtype=dtype, device="cpu")).dtype
            if converted != dtype:
                raise ValueError(
                    f"{self._shards.where}: expected a conversion to the dtype of its outputs, {dtype}, got "
                    f"{converted}: rows and outputs of a sharded collection keep their dtypes. Convert the "
                    "dense part only; or, before sharding, set data_type in the configs and 'output_dtype' "
                    "in fused_params."
                )
        return super()._apply(fn, recurse)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the collection and its modules, except to TorchRec's functions for inference."""
        check_not_for_inference(self)
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses copies and pickles, those of `torch.save` included."""
        check_not_for_inference(self)
        raise ValueError(
            f"{self._shards.where}: expected state dicts of a sharded collection, got a copy or a pickle of "
            "it, as by torch.save of the model: its rows are on several ranks. Save model.state_dict() with "
            "torch.distributed.checkpoint."
        )

    @not_compiled
    def prefetch(
        self,
        dist_input: KJTList,
        forward_stream: torch.Stream | None = None,
        ctx: BatchContext | None = None,
    ) -> None:
        """Takes the training step of the ids that arrived into the context, or inserts their rows."""
        if ctx is not None:
            self._check_modes(ctx)
        prefetch(self._lookups, dist_input, None if ctx is None else ctx.prefetched_steps)

    @not_compiled
    def compute(self, ctx: Any, dist_input: KJTList) -> list[Tensor]:
        """Looks up the ids that arrived."""
        return [*self._looked_up(ctx, dist_input)]

    @not_compiled
    def output_dist(self, ctx: Any, output: list[Tensor]) -> LazyAwaitable[Any]:
        """Sends outputs back to the ranks of their batches."""
        return self._finished(super().output_dist(ctx, output), ctx)

    @not_compiled
    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> LazyAwaitable[Any]:
        """Looks up the ids that arrived and sends outputs back: those of a type before the next lookup."""
        outputs: Any = self._looked_up(ctx, input)
        awaitable = self._finished(super().output_dist(ctx, outputs), ctx)
        if self.post_odist_tracker_fn is not None:
            self.post_odist_tracker_fn()
        return awaitable

    def _looked_up(self, ctx: Any, ids: KJTList) -> Iterator[Tensor]:
        """Yields the output of each sharding type."""
        if ctx.sent is not None:
            ctx.sent.close()
        if ctx.sending_stream is not None:
            wait_for_stream(ctx.sending_stream)  # TrainPipelineSemiSync does not
        self._check_modes(ctx)
        if self.training:
            check_runs_once(self._shards.where, lambda: self._shards.trained)
        steps, ctx.prefetched_steps = ctx.prefetched_steps, {}  # a second forward takes its own
        try:
            for lookup, features, context in zip(
                self._lookups, ids, ctx.sharding_contexts, strict=True
            ):
                output = lookup(features, context, steps)
                if self.post_lookup_tracker_fn is not None:
                    self.post_lookup_tracker_fn(features, output, self, None)
                yield output
        finally:
            steps.clear()  # a step that a failed forward has not used keeps its rows from being reused

    def reset_parameters(self) -> None:
        """Does nothing: a row is initialised when its id is first seen."""

    def _open(self, ctx: BatchContext, features: KeyedJaggedTensor) -> None:
        """Begins to send the ids of a checked batch."""
        if not isinstance(ctx, BatchContext):
            raise ValueError(
                f"{self._shards.where}: expected a batch with the context of its create_context(), got "
                f"{type(ctx).__name__}, as from TorchRec's PECEmbeddingCollection, which sends rows in an "
                "order of its own. Shard the collection itself, without that module."
            )
        check_taken(self._shards.lock, self._shards.where)
        device = features.device()
        if device.type != "cpu":
            ctx.sending_stream = stream_on(device)
        if self._has_uninitialized_input_dist:
            # As TorchRec does, without its warning about raw ids. An interrupted first batch may have created
            # some dists.
            self._input_dists, self._feature_splits, self._features_order = [], [], []
            self._create_input_dist(features.keys())
            self._has_uninitialized_input_dist = False

    def _send(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Sends a batch by the dist of each sharding type, with the mode of this rank; one rank keeps it."""
        is_torn = bool(self._shards.lock.torn)
        if ctx.is_ahead and not is_torn:
            for kernel in kernels_of(self._lookups):
                kernel.ask_ahead(features)
        if self._features_order:
            if getattr(self, "_free_features_storage_early", False):
                ctx.early_releasable_inputs.append(features)
            features = features.permute(self._features_order, self._features_order_tensor)
        parts = [features]
        if len(self._feature_splits) > 1:
            parts = features.split(self._feature_splits)
        parts = self._noted(ctx, parts)
        if self._env.world_size == 1:
            sent: Awaitable[Awaitable[KJTList]] = ArrivedIds(parts, ctx)
        else:
            sent = self._exchanged(ctx, parts, is_torn)
        ctx.sent = OpenForward(self._shards.batches)
        return sent

    def _exchanged(
        self, ctx: Any, parts: list[KeyedJaggedTensor], is_torn: bool
    ) -> Awaitable[Awaitable[KJTList]]:
        """Sends the ids of each sharding type to their owners."""
        remove_stale_forwards(self._input_dists)
        sending = []
        for input_dist, part, context in zip(
            self._input_dists, parts, ctx.sharding_contexts, strict=True
        ):
            sending.append(input_dist(sent_batch(part, trains=self.training, is_torn=is_torn)))
            if isinstance(context, SequenceShardingContext):
                where = getattr(input_dist, "unbucketize_permute_tensor", None)
                context.unbucketize_permute_tensor = where
            else:
                context.output_splits = []  # TorchRec writes the received modes there
                if isinstance(context, RowsContext):
                    context.sent = input_dist.sent
        ctx.has_modes = True
        return KJTListSplitsAwaitable(sending, ctx, self._module_fqn)

    def _check_modes(self, ctx: Any) -> None:
        if ctx.has_modes:
            ctx.has_modes = False
            check_modes(ctx.sharding_contexts, self._shards.where)

    @abstractmethod
    def _noted(self, ctx: Any, parts: list[KeyedJaggedTensor]) -> list[KeyedJaggedTensor]:
        """Returns the ids to send of those for each sharding type; makes TorchRec's context of each type."""

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        if self._env.world_size == 1:
            self._output_dists = [StayingOutput(output_dist) for output_dist in self._output_dists]

    @abstractmethod
    def _finished(self, awaitable: LazyAwaitable[Any], ctx: Any) -> LazyAwaitable[Any]:
        """Adds to TorchRec's output dist what the outputs still need."""
