"""The lookup of an unsharded collection: its tables are in groups, with one op call per group.

Legend: B bags per feature, D columns of a table, N ids of all features.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.lookup import Batch, TableGroup, uses_of
from torchrec_dyn.modules.description import UNSHARDED, Description, describe_tables
from torchrec_dyn.modules.feature_ids import FeatureIds
from torchrec_dyn.modules.fused_optimizer import DynamicOptimizer, saved_states
from torchrec_dyn.modules.optimizer_choice import (
    chosen_fused_params,
    placement_options,
    placement_warning,
)
from torchrec_dyn.modules.unsharded_table import UnshardedTable, marks_of
from torchrec_dyn.modules.wrapper_checks import check_not_wrapped, check_runs_once
from torchrec_dyn.name_lists import listed
from torchrec_dyn.optimizers import RowOptimizer, output_dtype_of
from torchrec_dyn.state_dict import check_taken
from torchrec_dyn.storage import TABLES, TableLock, locked
from torchrec_dyn.table import TableShard

_WEIGHT = itemgetter("weight")
_CALLER = 8  # frames from `_begin_training` up to the code that calls the collection


_State = tuple[TableShard, torch.dtype, RowOptimizer]  # of one table: what groups are made of


@dataclass(frozen=True)
class _Group:
    """One table group and its features.

    `positions` are those of its features among the collection's; None: all, in order. `columns` are their
    widths.
    """

    tables: TableGroup
    is_pooled: bool
    positions: list[int] | None
    columns: list[int]

    def look_up(self, features: FeatureIds, training: bool) -> list[Tensor]:
        """Returns the output of each feature, or of all together, as `UnshardedLookup.look_up` does."""
        sizes = [[size] for size in features.batch_sizes] if features.varies else None
        batch = Batch(
            features.ids, features.lengths, features.stated, features.weights, training, sizes,
            scores=features.scores, where=features.where,
        )  # fmt: skip
        output = self.tables(batch)
        if not self.is_pooled:
            features.note_begins(batch.begins)
            return list(torch.split(output, features.counts))
        if sizes is not None:
            parts = [size * width for (size,), width in zip(sizes, self.columns, strict=True)]
            flat = zip(torch.split(output, parts), self.columns, strict=True)
            return [part.view(-1, width) for part, width in flat]
        if self.positions is None:
            return [output]
        return list(torch.split(output, self.columns, dim=1))


class UnshardedLookup:
    """Groups tables of equal pooling (max: and width), dtype and optimizer, and looks up their features.

    The groups are built at first use, and again after a conversion or a change of optimizer. As long as the
    tables keep their optimizers, the optimizer object stays the same, so schedulers and wrappers may hold it.
    """

    def __init__(
        self, tables: Sequence[UnshardedTable], poolings: Sequence[str], prefix: str
    ) -> None:
        self.tables = list(tables)
        self.poolings = list(poolings)
        self.prefix = prefix
        self.where = self.tables[0].where.partition("(")[0]
        for table in self.tables:
            table.lock = self.lock
        # Learning rates that schedulers have set, for optimizer objects that are rebuilt.
        self._kept_rates: dict[RowOptimizer, float] = {}
        self._has_warned = False
        self._drop_groups()

    def _drop_groups(self) -> None:
        self._grouped_for: list[_State] = []
        self._grouped_at: object = None  # the token of all tables when they were compared last
        self._grouped_weights: list[Any] = []  # their placeholders then
        # Where nn.Module keeps the placeholders, and `functional_call` writes others.
        self._holders = [table._parameters for table in self.tables]
        self._marked: list[Any] = []  # those with marks
        self._marks: list[Any] = []  # copies of these marks: TorchRec writes to them in place
        self._groups: list[_Group] = []
        self._optimized_for: list[RowOptimizer] = []
        self._optimizer: DynamicOptimizer | None = None

    @property
    def lock(self) -> TableLock:
        """The lock of the tables."""
        return self.tables[0].lock

    def look_up(self, features: FeatureIds, training: bool) -> list[Tensor]:
        """Returns the rows of features in table order; in training unseen ids get rows.

        Pooled: [B, D] for each feature. If all features are in one group and have the same number of bags,
        they are a single tensor [B, sum of D]: then no copy is needed to join the outputs. Not pooled:
        [ids of the feature, D] for each feature.
        """
        if training:
            check_runs_once(self.where, self._trained)
            if not self._has_warned:
                self._begin_training()
        check_taken(self.tables[0].lock, self.where)
        groups = self._current_groups()
        if groups[0].positions is None:
            return groups[0].look_up(features, training)
        outputs: list[Tensor] = [torch.empty(0)] * len(features.batch_sizes)
        for group in groups:
            assert group.positions is not None
            parts = group.look_up(features.select(group.positions), training)
            for position, part in zip(group.positions, parts, strict=True):
                outputs[position] = part
        return outputs

    @locked
    def table_groups(self) -> list[TableGroup]:
        """Returns the table groups, as the next forward uses them."""
        return [group.tables for group in self._current_groups()]

    @locked  # all tables at one moment
    def describe(self) -> Description:
        """Returns the groups of the tables; creates rows at first use."""
        groups = self.table_groups()
        tables = [
            replace(table.as_table(), features=tuple(table.config.feature_names))
            for table in self.tables
        ]
        types = dict.fromkeys((table.name for table in tables), UNSHARDED)
        return describe_tables(self.where, 1, tables, groups, types)

    @property
    def fused_optimizer(self) -> DynamicOptimizer:
        """The optimizer of the rows; its state dict has the optimizer state in canonical order."""
        with self.lock:  # not `locked`: torn tables are loaded with their optimizer
            self._current_groups()
            assert self._optimizer is not None
            return self._optimizer

    def _begin_training(self) -> None:
        """Checks the callers of the first training forward, and warns of options without effect."""
        names = [table.config.name for table in self.tables]
        check_not_wrapped(f"{self.where}(tables={listed(names)})")
        self._has_warned = True
        names = [
            table.config.name
            for table in self.tables
            if chosen_fused_params(table.weight, table.fused_params, table.where) is None
        ]
        if names:
            warnings.warn(
                f"{self.where}: expected an optimizer for tables "
                f"{listed(names)}, got none; their rows train with EXACT_SGD at learning rate 0.01, and "
                "an optimizer over model.parameters() does not touch them. "
                "Set fused_params={'optimizer': ..., 'learning_rate': ...}.",
                UserWarning,
                stacklevel=_CALLER,
            )
        if options := placement_options(self.tables[0].fused_params):
            warnings.warn(placement_warning(options, self.where), UserWarning, stacklevel=_CALLER)

    def _trained(self) -> list[str]:
        return [table.config.name for table in self.tables if not table.is_frozen]

    def _current_groups(self) -> list[_Group]:
        # Every forward asks: so no function is called for each table as long as none has changed. A table
        # that is frozen renews the token; `functional_call` replaces placeholders.
        now = TABLES.now
        weights: list[Any] = [*map(_WEIGHT, self._holders)]
        is_known = now is self._grouped_at and all(map(is_, weights, self._grouped_weights))
        if is_known and [*map(marks_of, self._marked)] == self._marks:
            return self._groups
        marked = [weight for weight in weights if vars(weight)]
        marks = deepcopy([*map(marks_of, marked)])
        shards = [table.rows() for table in self.tables]
        self._grouped_weights, self._marked, self._marks = weights, marked, marks
        state = [(shard, shard.dtype, shard.optimizer) for shard in shards]
        if state != self._grouped_for:
            with self.lock:
                if state != self._grouped_for:
                    former, self._groups = self._groups, self._group_tables(state)
                    self._grouped_for = state
                    for group in former:
                        group.tables.check_written()
        self._grouped_at = now
        return self._groups

    def _group_tables(self, state: list[_State]) -> list[_Group]:
        members: dict[Any, list[int]] = {}
        for number, ((shard, *kind), pooling) in enumerate(zip(state, self.poolings, strict=True)):
            width = shard.columns if pooling == "max" else None
            members.setdefault((*kind, width, pooling), []).append(number)
        groups: list[_Group] = []
        for (*_, pooling), numbers in members.items():
            shards = [state[number][0] for number in numbers]
            groups.append(self._new_group(shards, numbers, pooling, len(members) == 1))
        optimizers = [optimizer for _, _, optimizer in state]
        if self._optimizer is None or optimizers != self._optimized_for:
            self._kept_rates.update(self._current_rates())
            by_key = {}
            for table, optimizer in zip(self.tables, optimizers, strict=True):
                name, save, load = table.config.name, table.save_state, table.load_state
                states = saved_states(name, optimizer, save, load, {})
                by_key[f"{self.prefix}.{name}.weight"] = table.weight, optimizer, states
            self._optimizer = DynamicOptimizer(by_key, self._kept_rates, self)
            self._optimized_for = optimizers
        self._optimizer.drive([group.tables for group in groups])
        return groups

    def _new_group(
        self, shards: Sequence[TableShard], numbers: Sequence[int], pooling: Any, has_all: bool
    ) -> _Group:
        configs = [self.tables[number].config for number in numbers]
        counts = [len(table.config.feature_names) for table in self.tables]
        begins = list(accumulate(counts, initial=0))
        dtype = output_dtype_of(self.tables[0].fused_params, self.where)
        pairs = zip(shards, configs, strict=True)
        uses = uses_of([(shard.config, config.feature_names) for shard, config in pairs])
        tables = TableGroup(shards, [counts[number] for number in numbers], pooling, dtype, uses)
        positions = [i for number in numbers for i in range(begins[number], begins[number + 1])]
        columns = [config.embedding_dim for config in configs for _ in config.feature_names]
        return _Group(tables, pooling != "none", None if has_all else positions, columns)

    def _current_rates(self) -> dict[RowOptimizer, float]:
        rates = {} if self._optimizer is None else self._optimizer.rates
        return {optimizer: float(group["lr"]) for optimizer, group in rates.items()}

    def __getstate__(self) -> dict[str, Any]:
        # Groups and optimizer belong to these rows: a copy builds its own, with the same learning rates.
        names = ("tables", "poolings", "prefix", "where", "_has_warned")
        rates = {**self._kept_rates, **self._current_rates()}
        return {name: getattr(self, name) for name in names} | {"_kept_rates": rates}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._drop_groups()
