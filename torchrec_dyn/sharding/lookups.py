"""The lookups of one sharding type on one rank: TorchRec's, with our compute kernel.

The kernel serves one TorchRec table group by one `TableGroup`, hence by one op call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingContext
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_dyn import knobs
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.lookup import (
    Batch,
    PrefetchedStep,
    Senders,
    TableGroup,
    asks_for_senders,
    uses_of,
)
from torchrec_dyn.modules import FeatureIds, initializer_of, row_dtype
from torchrec_dyn.name_lists import listed
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.sharding.sent_batch import counts_of
from torchrec_dyn.table import TableShard

# Of `fused_params`. The value is a function: TorchRec groups tables by equal fused_params and copies these
# deeply, and a copy of a function is the function.
OPTIONS_KEY = "torchrec_dyn"
# Of `fused_params` of tables with max pooling, their width: TorchRec groups them apart from others.
MAX_WIDTH_KEY = "torchrec_dyn_max_width"


@dataclass(frozen=True)
class TableOptions:
    """Options of a table for which TorchRec's config has no field; `row_limit` is that of one rank.

    `sends_rows` is True if a maximum is taken after the output dist.
    """

    config: DynamicTableConfig
    optimizer: RowOptimizer
    output_dtype: torch.dtype
    row_limit: int
    rows_are_spread: bool
    sends_rows: bool
    is_frozen: bool = False


def _options_of(config: GroupedEmbeddingConfig, table: str) -> TableOptions:
    options: Callable[[str], TableOptions] = config.fused_params[OPTIONS_KEY]
    return options(table)


def _make_table(
    shard: ShardedEmbeddingTable, options: TableOptions, device: torch.device | None
) -> TableShard:
    assert shard.local_metadata is not None
    table = TableShard(
        name=shard.name,
        num_embeddings=shard.num_embeddings,
        embedding_dim=shard.embedding_dim,
        optimizer=options.optimizer,
        config=options.config,
        first_column=shard.local_metadata.shard_offsets[1],
        columns=shard.local_cols,
        row_limit=options.row_limit,
        dtype=row_dtype(shard),
        initializer=initializer_of(shard, options.config),
        device=device if device is not None else "cpu",
    )
    table.is_frozen = options.is_frozen
    return table


class DynamicKernel(BaseEmbedding):
    """Looks up one table group. It has no `nn.Parameter`: DDP must not see the rows."""

    def __init__(self, config: GroupedEmbeddingConfig, device: torch.device | None) -> None:
        super().__init__()
        self._config = config
        shards = config.embedding_tables
        options = [_options_of(config, shard.name) for shard in shards]
        tables = [_make_table(s, o, device) for s, o in zip(shards, options, strict=True)]
        self.ids_are_sent_once = False
        self._asks_for_senders = asks_for_senders([table.config for table in tables])
        self._counts_weights = any(table.config.scores_weights for table in tables)
        pooling: Any = options[0].config.pooling or config.pooling.name.lower()
        if options[0].sends_rows or (pooling == "mean" and options[0].rows_are_spread):
            pooling = "sum"  # of this rank's rows; the rest follows the output dist
        uses = uses_of([(o.config, s.feature_names) for s, o in zip(shards, options, strict=True)])
        features = [shard.num_features() for shard in shards]
        self.group = TableGroup(tables, features, pooling, options[0].output_dtype, uses)

    @property
    def config(self) -> GroupedEmbeddingConfig:
        """TorchRec's table group."""
        return self._config

    def replace_shards(self, shards: Sequence[TableShard]) -> None:
        """Puts `shards` in place of this kernel's empty shards of the same tables and columns."""
        by_column = {(shard.name, shard.first_column): shard for shard in shards}
        tables = self.group.tables
        self.group.replace_tables(
            [by_column.get((table.name, table.first_column), table) for table in tables]
        )

    @property
    def emb_module(self) -> nn.Module:
        """The kernel itself: there is no TBE inside."""
        return self

    def forward(
        self,
        features: KeyedJaggedTensor,
        bags_of_ranks: Sequence[int] = (),
        ahead: PrefetchedStep | None = None,
    ) -> Tensor:
        """Looks up N ids in the group's F features, in the order of its tables.

        bags_of_ranks [ranks]: the bags of each feature from each sender, if all features have as many, and
        empty if one rank sends all;
        `ahead`: the step of the batch, if it was taken ahead.

        Pooled: [B, sum of columns], or with a batch size per feature one dimension, rank by rank and feature
        by feature. Sequences: [N, columns].
        """
        batch = self._batch(features, self.training)
        if self._config.is_weighted:
            batch.weights = features.weights_or_none()
        if self.training:
            batch.senders = self._senders(features, bags_of_ranks)
        output = self.group(batch, ahead)
        if (read := getattr(features, "read", None)) is not None:
            read.note_begins(batch.begins)  # TorchRec cuts the outputs of sequences there
        if torch.is_grad_enabled() and not output.requires_grad:
            # In evaluation, or all tables of this kernel are frozen. But another rank may train tables, or
            # have none, for which TorchRec's output requires a gradient; and backward is collective. With one
            # rank this tensor is the user's output; the clone is not a leaf, so users may write into it in
            # place.
            output = output.requires_grad_().clone()
        return output

    def _batch(self, features: KeyedJaggedTensor, training: bool) -> Batch:
        varies = features.variable_stride_per_key()
        # A SentBatch has stayed on this rank: its lengths may be unchecked.
        read: FeatureIds | None = getattr(features, "read", None)
        batch = Batch(
            features.values().contiguous(),
            features.lengths().contiguous(),
            None if read is None else read.stated,
            training=training,
            batch_sizes=features.stride_per_key_per_rank() if varies else None,
            where=None if read is None else read.where,
        )
        if training and self.ids_are_sent_once and self.group.has_life:
            batch.times = counts_of(features.weights())
        if training and self._counts_weights:
            weights = features.weights_or_none()
            batch.scores = None if weights is None else weights.detach().float()
        return batch

    def _senders(self, features: KeyedJaggedTensor, bags_of_ranks: Sequence[int]) -> Senders | None:
        if not self._asks_for_senders:
            return None
        if features.variable_stride_per_key():
            bags = features.stride_per_key_per_rank()
        else:
            bags = [list(bags_of_ranks) or [features.stride()]] * len(features.keys())
        return Senders(bags, len(bags[0]) if get_gradient_division() else 1)

    def prefetch(self, features: KeyedJaggedTensor, keeps_step: bool) -> PrefetchedStep | None:
        """Prepares the forward of a batch: takes its training step, or inserts rows for unseen ids.

        The step is taken where this gains time, and if the caller keeps it for the forward (`keeps_step`).
        """
        if not self.training:
            return None
        batch, step = self._batch(features, True), None
        if keeps_step and self.group.device.type in knobs.PREFETCHED_STEPS_ON:
            step = self.group.prefetch_step(batch)
        if step is None:
            self.group.prefetch(batch)
        return step

    def ask_ahead(self, features: KeyedJaggedTensor) -> None:
        """Asks for the rows in mapped files of the ids in `features` that have a row here."""
        if not self.group.in_files:
            return
        ids: dict[int, Tensor] = {}
        for t in self.group.in_files:
            names = self._config.embedding_tables[t].feature_names
            ids[t] = torch.cat([features[name].values() for name in names])
        self.group.ask_ahead(ids, self.training)

    # Methods that TorchRec's lookups and collections call on any kernel. State dicts of the kernel contain no
    # rows, and there is no cache of rows.

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Adds nothing: the collection saves the rows."""
        return destination if destination is not None else {}

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields nothing: rows are not parameters."""
        yield from ()

    def flush(self) -> None:
        """Does nothing: rows are written immediately."""

    def purge(self) -> None:
        """Does nothing: there is no cache of rows."""


# The steps of one batch that were taken ahead of its forward.
PrefetchedSteps: TypeAlias = dict[DynamicKernel, PrefetchedStep]


class _Lookup:
    """Mixin for TorchRec's lookups: looks up by our kernels; `node_size` ranks share rows within a node."""

    grouped_configs: list[GroupedEmbeddingConfig]
    node_size: int = 1
    _emb_modules: Any  # kernels
    _feature_splits: list[int]
    _dummy_embs_tensor: Tensor

    def _outputs(
        self,
        features: Sequence[KeyedJaggedTensor],
        bags_of_ranks: Sequence[int],
        steps: PrefetchedSteps,
    ) -> list[Tensor]:
        """Returns the outputs of the kernels, from the bags [ranks] of each rank; takes out their steps."""
        size = self.node_size
        if size > 1:
            # Within nodes a batch arrives sorted by the position of its sender within the sender's node.
            bags_of_ranks = [bags for place in range(size) for bags in bags_of_ranks[place::size]]
        return [
            kernel(kernel_features, bags_of_ranks, steps.pop(kernel, None))
            for kernel, kernel_features in zip(self._emb_modules, features, strict=True)
        ]

    def _by_kernel(self, features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        if len(self._feature_splits) == 1:
            return [features]
        return features.split(self._feature_splits)

    def register_optim_state_tracker_fn(self, record_fn: Callable[..., None]) -> None:
        """Refuses TorchRec's tracker of changed rows in its modes with optimizer state, of its own tables."""
        names = {name for group in self.grouped_configs for name in group.table_names()}
        raise ValueError(
            f"tables {listed(sorted(names))}: expected a ModelDeltaTracker of ids (TrackingMode.ID_ONLY, "
            "or EMBEDDING for a sequence collection), got a mode with optimizer state. "
            "Export changed rows and their optimizer state with torchrec_dyn.checkpoint.export_delta."
        )


class PooledLookup(_Lookup, GroupedPooledEmbeddingsLookup):
    """Looks up the pooled tables of one sharding type on this rank."""

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        *others: Any,
        **later: Any,
    ) -> BaseEmbedding:
        return DynamicKernel(config, device)

    def forward(
        self,
        sparse_features: KeyedJaggedTensor,
        context: EmbeddingShardingContext,
        steps: PrefetchedSteps,
    ) -> Tensor:
        """Returns the kernels' outputs side by side; with a size per feature those of a rank in a row."""
        by_kernel = self._by_kernel(sparse_features)
        features = [
            self._apply_feature_processor_and_gradient_scaling(part, config)
            for part, config in zip(by_kernel, self.grouped_configs, strict=True)
        ]
        outputs = self._outputs(features, context.batch_size_per_rank, steps)
        if len(outputs) == 1:
            return outputs[0]
        if not sparse_features.variable_stride_per_key():
            if not outputs:
                return self._dummy_embs_tensor.view(sparse_features.stride(), 0)
            return torch.cat(outputs, dim=1)
        # TorchRec preallocates the output, as float32 or float16 only, and every kernel writes its part.
        # Here outputs may be bfloat16.
        by_rank = [
            output.split(
                values_per_rank(
                    zip(*part.stride_per_key_per_rank(), strict=True), config.embedding_dims()
                )
            )
            for output, part, config in zip(outputs, features, self.grouped_configs, strict=True)
        ]
        parts = [part for parts in zip(*by_rank, strict=True) for part in parts]
        return torch.cat(parts) if parts else self._dummy_embs_tensor


def values_per_rank(bags: Iterable[Sequence[int]], widths: Sequence[int]) -> list[int]:
    """Returns how many values each rank receives; bags [ranks][F] by feature, widths [F] of outputs."""
    return [sum(n * width for n, width in zip(row, widths, strict=True)) for row in bags]


class SequenceLookup(_Lookup, GroupedEmbeddingsLookup):
    """Looks up the sequence tables of one sharding type on this rank."""

    def forward(
        self,
        sparse_features: KeyedJaggedTensor,
        context: SequenceShardingContext,
        steps: PrefetchedSteps,
    ) -> Tensor:
        """Returns the rows of the ids of all kernels, [N, columns]."""
        lengths = sparse_features.lengths().view(-1, sparse_features.stride())
        context.lengths_after_input_dist = lengths  # for the output dist
        features = self._by_kernel(sparse_features)
        outputs = self._outputs(features, context.batch_size_per_rank, steps)
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs) if outputs else self._dummy_embs_tensor

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: Any,
        device: torch.device | None,
        *others: Any,
        **later: Any,
    ) -> BaseEmbedding:
        return DynamicKernel(config, device)


def prefetch(
    lookups: Iterable[Any], features: Iterable[KeyedJaggedTensor], steps: PrefetchedSteps | None
) -> None:
    """Prepares the forward of a batch: inserts rows for unseen ids, or takes training steps.

    Each lookup gets the ids that arrived for its sharding type. Steps are added to `steps`, if given.
    """
    for lookup, lookup_features in zip(lookups, features, strict=True):
        by_kernel = lookup._by_kernel(lookup_features)
        for kernel, kernel_features in zip(lookup._emb_modules, by_kernel, strict=True):
            step = kernel.prefetch(kernel_features, steps is not None and kernel not in steps)
            if steps is not None and step is not None:
                steps[kernel] = step


def _of_one_width(config: GroupedEmbeddingConfig) -> list[GroupedEmbeddingConfig]:
    """Returns a group with max pooling as groups of one width, in order: column shards may differ in it."""
    if MAX_WIDTH_KEY not in (config.fused_params or {}):
        return [config]
    runs = groupby(config.embedding_tables, key=attrgetter("local_cols"))
    return [replace(config, embedding_tables=[*tables]) for _, tables in runs]


def kernels_of(lookups: Iterable[Any]) -> Iterator[DynamicKernel]:
    """Yields the kernels of lookups."""
    return chain.from_iterable(lookup._emb_modules for lookup in lookups)


class CreatesLookup(EmbeddingSharding[Any, KeyedJaggedTensor, Tensor, Tensor]):
    """Mixin for TorchRec's shardings: creates the lookup with our kernels. List it before the sharding."""

    lookup_class: ClassVar[type[PooledLookup] | type[SequenceLookup]] = PooledLookup

    def create_lookup(self, *unused: Any, **options: Any) -> PooledLookup | SequenceLookup:
        """Creates the lookup of the shards on this rank."""
        sharding: Any = self
        groups_per_rank = sharding._grouped_embedding_configs_per_rank
        own = groups_per_rank[sharding._rank]
        own = [part for config in own for part in _of_one_width(config)]
        lookup = self.lookup_class(own, pg=sharding._pg, device=sharding._device, env=sharding._env)
        if hasattr(sharding, "_intra_pg"):
            lookup.node_size = sharding._intra_pg.size()
        # TorchRec makes the empty output of a rank without tables as float32, but a rank expects to receive
        # the dtype that it sends.
        if groups := list(chain.from_iterable(groups_per_rank)):
            table = groups[0].embedding_tables[0]
            empty = lookup._dummy_embs_tensor.detach()
            empty = empty.to(_options_of(groups[0], table.name).output_dtype)
            if self.lookup_class is SequenceLookup:
                empty = empty.view(0, table.local_cols)
            lookup._dummy_embs_tensor = empty.requires_grad_()
        return lookup
