"""The compute kernel: it serves one TorchRec table group by one `TableGroup`, hence by one op call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.optim.fused import FusedOptimizerModule
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
from torchrec_dyn.modules import DynamicOptimizer, initializer_of, row_dtype
from torchrec_dyn.optimizers import RowOptimizer, output_dtype_of
from torchrec_dyn.sharding.batches import counts_of
from torchrec_dyn.table import TableShard

# Of `fused_params`. The value is a function: TorchRec groups tables by equal fused_params and copies these
# deeply, and a copy of a function is the function.
OPTIONS_KEY = "torchrec_dyn"


@dataclass(frozen=True)
class TableOptions:
    """Options of a table for which TorchRec's config has no field; `row_limit` is that of one rank."""

    config: DynamicTableConfig
    row_limit: int
    rows_are_spread: bool
    is_frozen: bool = False


def _make_table(
    shard: ShardedEmbeddingTable,
    options: TableOptions,
    optimizer: RowOptimizer,
    device: torch.device | None,
) -> TableShard:
    assert shard.local_metadata is not None
    table = TableShard(
        name=shard.name,
        num_embeddings=shard.num_embeddings,
        embedding_dim=shard.embedding_dim,
        optimizer=optimizer,
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


class DynamicKernel(BaseEmbedding, FusedOptimizerModule):
    """Looks up one table group, pooled or as sequences, and owns its optimizer.

    It has no `nn.Parameter`: DDP must not see the rows.
    """

    def __init__(self, config: GroupedEmbeddingConfig, device: torch.device | None) -> None:
        super().__init__()
        self._config = config
        fused_params = dict(config.fused_params or {})
        options: Callable[[str], TableOptions] = fused_params.pop(OPTIONS_KEY)
        where = f"tables {', '.join(sorted(set(config.table_names())))}"
        optimizer = RowOptimizer.from_fused_params(fused_params, where)
        shards = config.embedding_tables
        self.tables = [_make_table(s, options(s.name), optimizer, device) for s in shards]
        self.ids_are_sent_once = False
        self._asks_for_senders = asks_for_senders([table.config for table in self.tables])
        self._counts_weights = any(table.config.scores_weights for table in self.tables)
        pooling: Any = config.pooling.name.lower()
        if pooling == "mean" and options(shards[0].name).rows_are_spread:
            pooling = "sum"  # of this rank's rows; divided after the output dist (dists.py)
        self.group = TableGroup(
            self.tables,
            [shard.num_features() for shard in shards],
            pooling,
            output_dtype_of(fused_params, where),
            uses_of([(options(s.name).config, s.feature_names) for s in shards]),
        )
        self._optimizer = DynamicOptimizer(
            {
                f"{table.name}.weight": (
                    torch.empty(shard.num_embeddings, table.columns, device="meta"),
                    optimizer,
                    {},
                )
                for table, shard in zip(self.tables, shards, strict=True)
            }
        )
        self._optimizer.drive([self.group])

    @property
    def config(self) -> GroupedEmbeddingConfig:
        """TorchRec's table group."""
        return self._config

    def replace_shards(self, shards: Sequence[TableShard]) -> None:
        """Puts `shards` in place of this kernel's empty shards of the same tables and columns."""
        by_column = {(shard.name, shard.first_column): shard for shard in shards}
        self.tables = [
            by_column.get((table.name, table.first_column), table) for table in self.tables
        ]
        self.group.replace_tables(self.tables)

    @property
    def emb_module(self) -> nn.Module:
        """The kernel itself: there is no TBE inside."""
        return self

    @property
    def fused_optimizer(self) -> DynamicOptimizer:
        """The optimizer of the rows of this group."""
        return self._optimizer

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
        if torch.is_grad_enabled() and not output.requires_grad:
            # In evaluation, or all tables of this kernel are frozen. But another rank may train tables, or
            # have none, for which TorchRec's output requires a gradient; and backward is collective. With one
            # rank this tensor is the user's output; the clone is not a leaf, so users may write into it in
            # place.
            output = output.requires_grad_().clone()
        return output

    def _batch(self, features: KeyedJaggedTensor, training: bool) -> Batch:
        varies = features.variable_stride_per_key()
        return Batch(
            features.values().contiguous(),
            features.lengths().contiguous(),
            training=training,
            batch_sizes=features.stride_per_key_per_rank() if varies else None,
            times=self._times(features) if training else None,
            scores=self._scores(features) if training else None,
        )

    def _times(self, features: KeyedJaggedTensor) -> Tensor | None:
        """Returns each id's occurrences in its sender's batch, [N] int64; None if all are 1 or not used."""
        has_counts = self.ids_are_sent_once and self.group.has_life
        return counts_of(features.weights()) if has_counts else None

    def _scores(self, features: KeyedJaggedTensor) -> Tensor | None:
        """Returns what each id adds to its score, [N] float32; None without weights or if not used."""
        weights = features.weights_or_none() if self._counts_weights else None
        return None if weights is None else weights.detach().float()

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
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
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
