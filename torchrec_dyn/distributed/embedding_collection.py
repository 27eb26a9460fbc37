"""The sharded sequence collection: TorchRec's collection with our shardings and stitching."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.distributed.local_shards import LocalShards
from torchrec_dyn.distributed.sharding_setup import ShardingSetup
from torchrec_dyn.distributed.stages import BatchContext, ShardedTables
from torchrec_dyn.lookup import uses_by_feature
from torchrec_dyn.modules import DynamicEmbeddingCollection
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import SHARDING_TRAITS, TableLayout, run_together
from torchrec_dyn.sharding import (
    SEQUENCE_SHARDINGS,
    BatchCheck,
    Expansion,
    Restoration,
    SendOnce,
    kernels_of,
    outputs_by_column,
    pad_batch,
)


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
        setup = ShardingSetup(
            module,
            "embeddings",
            table_name_to_parameter_sharding,
            env,
            fused_params,
            list(SEQUENCE_SHARDINGS),
            device,
            module_fqn,
        )
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
        self._shards = LocalShards(setup, self, env, "embeddings")
        self._shards.fill_from(module)
        configs = module.embedding_configs()
        by_table = list(zip(configs, module.embedding_names_by_table(), strict=True))
        self._feature_of_output = {  # a feature's own name may have an "@"
            name: feature
            for config, names in by_table
            for name, feature in zip(names, config.feature_names, strict=True)
        }
        self._writable = {
            config.name: names
            for config, names in by_table
            if getattr(config, "enable_embedding_update", False)
        }
        self.enable_embedding_update = bool(self._writable)  # DistributedModelParallel reads it
        outputs = chain.from_iterable(self._embedding_names_per_sharding)
        self._output_names = self._planned_names = list(dict.fromkeys(outputs))

    _has_uninitialized_input_dist: bool

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[Any, KeyedJaggedTensor, Tensor, Tensor]:
        """Creates the sharding of all tables of one type."""
        return SEQUENCE_SHARDINGS[sharding_type](
            sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
        )

    @not_compiled
    def input_dist(
        self, ctx: SequenceContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Checks a batch and sends its ids, any int64, to their owners."""
        features = self._check_batch(features, self.training)
        self._open(ctx, features.device())
        features, ctx.restoration = pad_batch(features, self._feature_of_output)
        if self._has_uninitialized_input_dist:
            # An interrupted first batch may have created some dists.
            self._input_dists = []
            self._create_input_dist(features.keys())
            self._has_uninitialized_input_dist = False
        return self._send(ctx, features)

    @not_compiled
    def write(self, embeddings: KeyedJaggedTensor) -> None:
        """Writes rows by id, as `torchrec_dyn.assign_rows`, for DistributedModelParallel.write. Collective.

        Args:
            embeddings: for each output name of the tables with `enable_embedding_update` the ids [N] int64,
                any number on each rank, and as weights their rows, [all ids, embedding_dim].

        Raises:
            ValueError: on every rank, if the batch of a rank has other names, or no such rows.
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

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The type of the unsharded collection."""
        return DynamicEmbeddingCollection

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
    embeddings: KeyedJaggedTensor, names: Mapping[str, Sequence[str]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the ids and the rows to write into each table; `names` are the output names of each."""
    expected = list(chain.from_iterable(names.values()))
    if sorted(embeddings.keys()) != sorted(expected):
        raise ValueError(
            f"expected the features of its tables with enable_embedding_update, {expected}, got "
            f"{embeddings.keys()}."
        )
    weights = embeddings.weights_or_none()
    if weights is None or weights.dim() != 2 or len(weights) != embeddings.values().numel():
        got = "none" if weights is None else str(list(weights.shape))
        raise ValueError(
            f"expected weights [{embeddings.values().numel()}, embedding_dim], the row of each id, "
            f"got {got}."
        )
    sizes = embeddings.length_per_key()
    ids = dict(zip(embeddings.keys(), embeddings.values().split(sizes), strict=True))
    rows = dict(zip(embeddings.keys(), weights.split(sizes), strict=True))
    return {
        table: (
            torch.cat([ids[name] for name in outputs]),
            torch.cat([rows[name] for name in outputs]),
        )
        for table, outputs in names.items()
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
