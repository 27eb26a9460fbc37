"""The sharded collections: TorchRec's, with our shardings and stitching, and for pooled outputs our means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
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
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.distributed.local_shards import LocalShards
from torchrec_dyn.distributed.sharding_setup import ShardingSetup
from torchrec_dyn.distributed.stages import BatchContext, ShardedTables
from torchrec_dyn.lookup import uses_by_feature
from torchrec_dyn.modules import DynamicEmbeddingBagCollection, DynamicEmbeddingCollection
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import SHARDING_TRAITS, TableLayout, run_together
from torchrec_dyn.sharding import (
    POOLED_SHARDINGS,
    SEQUENCE_SHARDINGS,
    BatchCheck,
    Expansion,
    Restoration,
    RowsContext,
    SendOnce,
    SendsRows,
    divide,
    kernels_of,
    mean_divisor,
    outputs_by_column,
    pad_batch,
    pooled_sharding_of,
    sends_rows,
    with_an_example,
    without_examples,
)
from torchrec_dyn.storage import host_numbers


def _outputs_of(configs: Sequence[Any]) -> dict[str, tuple[Any, str]]:
    """Returns the table and the feature of each output, by name; a feature's own name may have an "@"."""
    names_by_table = get_embedding_names_by_table(configs)
    return {
        name: (config, feature)
        for config, names in zip(configs, names_by_table, strict=True)
        for name, feature in zip(names, config.feature_names, strict=True)
    }


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

    unsharded_module_type = DynamicEmbeddingBagCollection
    holder = "embedding_bags"
    sharding_classes = POOLED_SHARDINGS

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
        plan = table_name_to_parameter_sharding
        setup = ShardingSetup(type(self), module, plan, env, fused_params, device, module_fqn)
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
        outputs = _outputs_of(self._embedding_bag_configs)
        # The feature of each output whose bags divide it after the output dist.
        self._divided_by = [
            feature
            if config.pooling == PoolingType.MEAN and setup.layouts[config.name].rows_are_spread
            else None
            for config, feature in (outputs[name] for name in self._embedding_names)
        ]
        self._check_batch = BatchCheck(
            setup.features, module.is_weighted(), True, setup.where, setup.is_scored
        )
        self._shards = LocalShards(setup, self, env)
        self._output_names = list(self._embedding_names)

    @classmethod
    def create_grouped_sharding_infos(
        cls, *arguments: Any, **options: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """Returns the tables of each sharding, by name: of a type, and of a type whose rows travel."""
        by_type = super().create_grouped_sharding_infos(*arguments, **options)
        grouped: dict[str, list[EmbeddingShardingInfo]] = {}
        for name, infos in by_type.items():
            for info in infos:
                key = f"{name}, max" if sends_rows(info) else name
                grouped.setdefault(key, []).append(info)
        return grouped

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        *arguments: Any,
        permute_embeddings: bool = False,
        **options: Any,
    ) -> EmbeddingSharding[Any, KeyedJaggedTensor, Tensor, Tensor]:
        """Creates the sharding of all tables of one type."""
        kind = pooled_sharding_of(sharding_infos[0])
        if issubclass(kind, CwPooledEmbeddingSharding):
            options["permute_embeddings"] = permute_embeddings
        return kind(sharding_infos, *arguments, **options)

    @not_compiled
    def input_dist(
        self, ctx: PooledContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Checks a batch and sends its ids, any int64, to their owners."""
        return self.send(ctx, self._check_batch(features, self.training))

    def send(
        self, ctx: PooledContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Sends the ids of a checked batch to their owners."""
        self._open(ctx, features)
        if features.variable_stride_per_key() and not features.inverse_indices()[1].numel():
            features, ctx.has_examples = with_an_example(features), False
        if any(self._divided_by):
            with torch.no_grad():
                ctx.divisor = mean_divisor(features, self._divided_by)
        ctx.inverse_indices = features.inverse_indices_or_none()
        return self._send(ctx, features)

    def _noted(self, ctx: PooledContext, parts: list[KeyedJaggedTensor]) -> list[KeyedJaggedTensor]:
        ctx.variable_batch_per_feature = varies = parts[0].variable_stride_per_key()
        ctx.sharding_contexts = [
            self._context(sharding, part, varies)
            for sharding, part in zip(self._embedding_shardings, parts, strict=True)
        ]
        return parts

    @staticmethod
    def _context(sharding: Any, part: KeyedJaggedTensor, varies: bool) -> EmbeddingShardingContext:
        sizes = part.stride_per_key()
        numbers: Any = {
            "batch_size_per_feature_pre_a2a": sizes if varies else [],
            "variable_batch_per_feature": varies or isinstance(sharding, SendsRows),
        }
        if not isinstance(sharding, SendsRows):
            return EmbeddingShardingContext(**numbers)
        # A copy: the caller may overwrite the batch before the output is read.
        lengths = part.lengths().clone()
        return RowsContext(**numbers, lengths=lengths, sizes=sizes, sizes_vary=varies)

    def create_context(self) -> PooledContext:
        """Creates the state of one forward."""
        return PooledContext()

    def _create_input_dist(self, input_feature_names: list[str]) -> None:
        super()._create_input_dist(input_feature_names)
        # The order of `inverse_indices` by output, for batches with a size per feature. They come in the
        # order of the collection's features. TorchRec takes what is before an "@" in a feature's name for it.
        place = {feature: i for i, feature in enumerate(self._check_batch.features)}
        outputs = _outputs_of(self._embedding_bag_configs)
        order = [place[outputs[name][1]] for name in self._uncombined_embedding_names]
        if order != list(range(len(place))):
            indices = host_numbers(order).to(self._shards.device, non_blocking=True)
            self._inverse_indices_permute_indices = indices

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


@dataclass
class SequenceContext(BatchContext, EmbeddingCollectionContext):
    """State of one forward, from input dist to output dist.

    `restoration` removes the padding of the batch, if it has any, from the outputs. `expansions` repeat the
    rows of ids that were sent once, for each sharding type.
    """

    restoration: Restoration | None = None
    expansions: list[Expansion] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        """Records for the allocator that a stream uses the tensors of this context."""
        super().record_stream(stream)
        if self.restoration is not None and self.restoration.inverse is not None:
            self.restoration.inverse.record_stream(stream)
        for expansion in self.expansions:
            expansion.places.record_stream(stream)


class ShardedDynamicEmbeddingCollection(ShardedTables, ShardedEmbeddingCollection):
    """A `DynamicEmbeddingCollection` whose tables are on several ranks.

    Created by `DynamicEmbeddingCollectionSharder`. Rows trained before sharding are copied; `module`
    is not changed. The arguments are those of TorchRec's class.

    Raises:
        ValueError: if the plan is not valid; raised before anything is built.
    """

    unsharded_module_type = DynamicEmbeddingCollection
    holder = "embeddings"
    sharding_classes = SEQUENCE_SHARDINGS

    def __init__(
        self,
        module: DynamicEmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        module_fqn: str | None = None,
    ) -> None:
        plan = table_name_to_parameter_sharding
        setup = ShardingSetup(type(self), module, plan, env, fused_params, device, module_fqn)
        _check_widths(setup.layouts, setup.plan, setup.where)
        super().__init__(
            setup,
            setup.plan,
            env,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
            use_index_dedup=use_index_dedup,
            module_fqn=module_fqn,
        )
        self._send_once: list[SendOnce] = []
        if self._use_index_dedup:
            self._prepare_to_send_once(setup)
        self._check_batch = BatchCheck(setup.features, False, False, setup.where, setup.is_scored)
        self._shards = LocalShards(setup, self, env)
        tables = _outputs_of(module.embedding_configs())
        self._feature_of_output = {name: feature for name, (_, feature) in tables.items()}
        self._writable = {  # the table of each output
            name: config.name
            for name, (config, _) in tables.items()
            if getattr(config, "enable_embedding_update", False)
        }
        self.enable_embedding_update = bool(self._writable)  # DistributedModelParallel reads it
        outputs = chain.from_iterable(self._embedding_names_per_sharding)
        self._output_names = self._planned_names = list(dict.fromkeys(outputs))

    @classmethod
    def create_embedding_sharding(
        cls, sharding_type: str, *arguments: Any, **options: Any
    ) -> EmbeddingSharding[Any, KeyedJaggedTensor, Tensor, Tensor]:
        """Creates the sharding of all tables of one type."""
        return SEQUENCE_SHARDINGS[sharding_type](*arguments, **options)

    @not_compiled
    def input_dist(
        self, ctx: SequenceContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Checks a batch and sends its ids, any int64, to their owners."""
        features = self._check_batch(features, self.training)
        self._open(ctx, features)
        features, ctx.restoration = pad_batch(features, self._feature_of_output)
        return self._send(ctx, features)

    @not_compiled
    def write(self, embeddings: KeyedJaggedTensor) -> None:
        """Writes rows by id, like `torchrec_dyn.assign_rows`, for DistributedModelParallel.write. Collective.

        Args:
            embeddings: for each output name of the tables with `enable_embedding_update` the ids [N] int64,
                any number on each rank, and as weights their rows, [all ids, embedding_dim].

        Raises:
            ValueError: on every rank, if the batch of a rank has other names or invalid rows.
        """
        where = f"{self._shards.where}.write"
        given = run_together(
            self._env.process_group, where, lambda: _rows_by_table(embeddings, self._writable)
        )
        for name, (ids, rows) in given.items():
            self.table(name).assign(ids, rows)

    def create_context(self) -> SequenceContext:
        """Creates the state of one forward."""
        return SequenceContext()

    def register_post_lookup_tracker_fn(self, record_fn: Callable[..., None]) -> None:
        """Registers a function that TorchRec's tracker of changed rows calls after each lookup."""
        super().register_post_lookup_tracker_fn(partial(_record, record_fn))

    def _noted(
        self, ctx: SequenceContext, parts: list[KeyedJaggedTensor]
    ) -> list[KeyedJaggedTensor]:
        if self._use_index_dedup:
            once = [send(part) for send, part in zip(self._send_once, parts, strict=True)]
            ctx.input_features, ctx.expansions = parts, [expansion for _, expansion in once]
            parts = [sent for sent, _ in once]
        ctx.sharding_contexts = [
            SequenceShardingContext(features_before_input_dist=part) for part in parts
        ]
        return parts

    def _prepare_to_send_once(self, setup: ShardingSetup) -> None:
        scored = [name for name, options in setup.dynamic.items() if options.scores_weights]
        if scored:
            raise ValueError(
                f"{setup.where}: expected use_index_dedup=False with LowestScore, as in tables "
                f"{listed(scored)}, got use_index_dedup=True. "
                "An id that is sent once has no weight for each occurrence."
            )
        for sharding in self._sharding_type_to_sharding.values():
            tables = sharding.embedding_tables()
            counted = any(setup.dynamic[table.name].has_life for table in tables)
            runs = [
                ((table.name, number), features)
                for table in tables
                for number, features in enumerate(
                    _runs_of_equal_use(setup.dynamic[table.name], table.feature_names)
                )
            ]
            self._send_once.append(SendOnce(runs, counted, setup.where))
        for kernel in kernels_of(self._lookups):
            kernel.ids_are_sent_once = True

    def _create_hash_size_info(
        self, feature_names: list[str], ctx: EmbeddingCollectionContext | None = None
    ) -> None:
        """Does nothing: TorchRec's method serves an op that treats ids as rows below num_embeddings."""

    def _generate_permute_indices_per_feature(
        self,
        embedding_configs: Sequence[EmbeddingConfig],
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
    ) -> None:
        """Computes the order in which the column shards of each output are joined."""
        sharding = self._sharding_type_to_sharding[ShardingType.COLUMN_WISE.value]
        by_column = outputs_by_column(
            sharding.embedding_names(), sharding.embedding_shard_metadata()
        )
        for name, positions in by_column.items():
            arriving = sorted(positions)
            self._features_to_permute_indices[name] = [arriving.index(p) for p in positions]

    def _finished(
        self, awaitable: LazyAwaitable[dict[str, JaggedTensor]], ctx: SequenceContext
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Restores the outputs of the user's batch, and keeps their order after tables have moved."""
        if ctx.expansions:
            rows: list[Awaitable[Tensor]] = awaitable._awaitables_per_sharding
            for type_rows, expansion in zip(rows, ctx.expansions, strict=True):
                type_rows.callbacks.append(expansion)
        if ctx.restoration is not None:
            awaitable.callbacks.append(ctx.restoration)
        if self._output_names != self._planned_names:
            names = self._output_names
            awaitable.callbacks.append(lambda outputs: {name: outputs[name] for name in names})
        return awaitable


def _rows_by_table(
    embeddings: KeyedJaggedTensor, tables: Mapping[str, str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the ids and the rows to write into each table; `tables` has that of each output name."""
    if sorted(embeddings.keys()) != sorted(tables):
        raise ValueError(
            f"expected the features of its tables with enable_embedding_update, {[*tables]}, got "
            f"{embeddings.keys()}."
        )
    weights = embeddings.weights_or_none()
    if weights is None or weights.dim() != 2 or len(weights) != embeddings.values().numel():
        got = "none" if weights is None else str(list(weights.shape))
        raise ValueError(
            f"expected weights [{embeddings.values().numel()}, embedding_dim], the row of each id, "
            f"got {got}."
        )
    parts: dict[str, list[JaggedTensor]] = {}
    for name, table in tables.items():
        parts.setdefault(table, []).append(embeddings[name])
    return {
        table: (
            torch.cat([p.values() for p in of_table]),
            torch.cat([p.weights() for p in of_table]),
        )
        for table, of_table in parts.items()
    }


def _runs_of_equal_use(config: DynamicTableConfig, features: Sequence[str]) -> list[int]:
    """Returns how many features of a table, one after the other, have the same use, for each such run."""
    uses = [replace(use, feature="any") for use in uses_by_feature(config, features)]
    return [len(list(run)) for _, run in groupby(uses)]


def _record(record_fn: Callable[..., None], features: KeyedJaggedTensor, *looked_up: Any) -> None:
    """Calls a function of TorchRec's tracker of changed rows with the ids that arrived and their lookup."""
    try:
        record_fn(features, *looked_up)
    except ZeroDivisionError:  # TrackingMode.EMBEDDING divides by the number of ids
        if features.values().numel():
            raise


def _check_widths(
    layouts: Mapping[str, TableLayout], plan: Mapping[str, ParameterSharding], where: str
) -> None:
    """Raises ValueError if column shards differ in width: TorchRec sends all sequences with one width."""
    widths = {
        name: [piece.columns for piece in layout.pieces]
        for name, layout in layouts.items()
        if SHARDING_TRAITS[plan[name].sharding_type].cuts_columns
    }
    if len(set(chain.from_iterable(widths.values()))) > 1:
        raise ValueError(
            f"{where}: expected column shards of one width in all its column-wise tables, "
            f"got {widths}. Use one width, or another sharding type for some tables."
        )
