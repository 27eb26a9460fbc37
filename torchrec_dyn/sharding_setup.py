"""What both sharded collections do before and after TorchRec builds them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_dyn.agreement import agree
from torchrec_dyn.carry_over import carry_over
from torchrec_dyn.clock import time_fault
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.grouped_lookups import PooledLookup, SequenceLookup
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.kernel import DynamicKernel
from torchrec_dyn.local_table import LocalTable
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.policies import AdmitAfter
from torchrec_dyn.saved_config import table_config
from torchrec_dyn.shard_pieces import ShardPieces
from torchrec_dyn.shard_state_dict import put_tables, take_tables
from torchrec_dyn.shardable_view import ShardableView, merged_fused_params
from torchrec_dyn.sharded_optimizer import ShardedOptimizer
from torchrec_dyn.sharded_table import ShardedTableHandle
from torchrec_dyn.table import DynamicTable
from torchrec_dyn.table_configs import initializer_of, row_dtype
from torchrec_dyn.table_layout import TableLayout, checked_plan, table_layouts

_tables_of_model: weakref.WeakKeyDictionary[ShardingEnv, dict[str, str]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class ShardingSetup:
    """A checked plan and all that TorchRec needs to build a sharded collection.

    Attributes:
        where: the collection, for messages.
        configs: its tables' configs.
        plan: its part of the plan, for our kernel.
        layouts: where the pieces of each table go.
        dynamic: the users' options of each table.
        view: what TorchRec is shown instead of the collection.
        frozen: names of the tables that are frozen.
    """

    where: str
    configs: Sequence[BaseEmbeddingConfig]
    plan: dict[str, ParameterSharding]
    layouts: dict[str, TableLayout]
    dynamic: dict[str, DynamicTableConfig]
    view: ShardableView
    frozen: set[str]


def set_up(
    module: nn.Module,
    holder: str,
    configs: Sequence[BaseEmbeddingConfig],
    plan: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    fused_params: Mapping[str, Any] | None,
    sharding_types: Sequence[str],
    module_fqn: str | None,
) -> ShardingSetup:
    """Checks a plan and everything else that can be wrong, before anything is built.

    Args:
        module: the unsharded collection.
        holder: the name under which it holds its tables.
        configs: its tables' configs.
        plan: its part of the sharding plan.
        env: the ranks.
        fused_params: the sharder's.
        sharding_types: the types that the collection supports.
        module_fqn: where the model holds the collection.

    Raises:
        ValueError: if the plan, an optimizer or a table's name cannot be honoured.
    """
    where = f"{type(module).__name__}('{module_fqn}')" if module_fqn else type(module).__name__
    layouts = table_layouts(configs, plan, env, sharding_types, where)
    for_our_kernel = checked_plan(plan, where)
    held: Any = getattr(module, holder)
    tables: dict[str, LocalTable] = {config.name: held[config.name] for config in configs}
    merged = merged_fused_params(fused_params, module.fused_params)  # type: ignore[arg-type]
    view = ShardableView(module, configs, tables, holder, layouts, merged, where)
    _claim_names([config.name for config in configs], env, module_fqn, where)
    if view.tables_by_default:
        warnings.warn(
            f"{where}: no optimizer was chosen for tables {view.tables_by_default}; their rows "
            "train with EXACT_SGD at learning rate 0.01. "
            "Set fused_params={'optimizer': ..., 'learning_rate': ...}.",
            UserWarning,
            stacklevel=4,
        )
    dynamic = {name: table.dynamic for name, table in tables.items()}
    frozen = {name for name, table in tables.items() if table.is_frozen}
    return ShardingSetup(where, configs, for_our_kernel, layouts, dynamic, view, frozen)


def _claim_names(
    names: Sequence[str], env: ShardingEnv, module_fqn: str | None, where: str
) -> None:
    """Refuses a table's name that another collection of the model has: they would start alike.

    One DistributedModelParallel shards all its collections with one env.
    """
    if module_fqn is None:
        return
    claimed = _tables_of_model.setdefault(env, {})
    for name in names:
        if claimed.get(name, module_fqn) != module_fqn:
            raise ValueError(
                f"{where}(table='{name}'): expected a name of its own, got the name of a table "
                f"of '{claimed[name]}'. Rename one of them."
            )
    claimed.update(dict.fromkeys(names, module_fqn))


class LocalShards:
    """The column shards on this rank of every table of a collection, in column order.

    Args:
        setup: of the collection.
        lookups: TorchRec's, one per sharding type.
        env: the ranks.

    Attributes:
        frozen: names of the frozen tables, the same on every rank; whoever writes it writes `is_frozen` of
            the shards too.
    """

    def __init__(
        self, setup: ShardingSetup, lookups: Iterable[nn.Module], env: ShardingEnv
    ) -> None:
        self._where = setup.where
        self._configs = {config.name: config for config in setup.configs}
        self._layouts = setup.layouts
        self._dynamic = setup.dynamic
        self._optimizers = setup.view.optimizers
        self._env = env
        self.frozen = set(setup.frozen)
        self._initializers: dict[str, Initializer] = {}  # those that came with a checkpoint
        self._tables: dict[str, list[DynamicTable]] = {name: [] for name in self._configs}
        for table in _tables_of(lookups):
            self._tables[table.name].append(table)
        for shards in self._tables.values():
            shards.sort(key=lambda shard: shard.first_column)

    def fill_from(self, trained: Mapping[str, DynamicTable]) -> None:
        """Takes over this rank's part of rows that were trained before sharding."""
        for name, source in trained.items():
            self._initializers[name] = source.initializer
            carry_over(source, self._tables[name], self._layouts[name], self._env.rank)

    def set_time(self, time: int) -> None:
        """Sets the clocks of all tables to the latest time that a rank passes. Collective.

        Raises:
            ValueError: on every rank, if some rank passed no time or the latest is past.
        """
        where, fault = f"{self._where}.set_time", time_fault(time, None)
        shards = [shard for shards in self._tables.values() for shard in shards]
        group = self._env.process_group
        assert isinstance(group, dist.ProcessGroup)
        # A rank without a shard does not know what the clocks show, and one behind the others is no fault.
        shown = max((shard.time or 0 for shard in shards), default=0)
        told = agree(group, where, ValueError(fault) if fault else None, told=(time, shown))
        latest = max(time for time, _ in told)
        fault = time_fault(latest, max(shown for _, shown in told))
        if fault:
            raise ValueError(f"{where}: {fault}")
        for shard in shards:
            shard.set_time(latest)

    def pieces(self) -> list[ShardPieces]:
        """Tells what this rank holds of each table, in the order of the tables."""
        return [self.pieces_of(name) for name in self._configs]

    def optimizer(self, local: KeyedOptimizer, holder: str) -> ShardedOptimizer:
        """Makes the optimizer of all tables out of that of this rank's kernels."""
        return ShardedOptimizer(local, list(self._optimizers.items()), holder, self.pieces_of)

    def optimizer_of(self, name: str) -> RowOptimizer:
        """Tells how the rows of a table learn, wherever they are."""
        return self._optimizers[name]

    def put_into(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Adds the tables to a state dict. Collective.

        Args:
            state_dict: of the model.
            prefix: of the tables' names.
        """
        put_tables(state_dict, prefix, self.pieces(), self._where)

    def take_from(self, state_dict: dict[str, Any], prefix: str, missing_keys: list[str]) -> None:
        """Loads the tables out of a state dict, all or none, and removes their keys. Collective.

        Args:
            state_dict: of the model.
            prefix: of the tables' names.
            missing_keys: gets those that are not there.
        """
        came = take_tables(state_dict, prefix, self.pieces(), self._where, missing_keys)
        self._initializers.update(came)

    def pieces_of(self, name: str) -> ShardPieces:
        """Tells what this rank holds of one table."""
        config, dynamic = self._configs[name], self._dynamic[name]
        group = self._env.process_group
        assert isinstance(group, dist.ProcessGroup)
        initializer = self._initializers.get(name) or initializer_of(config, dynamic)
        columns, dtype = config.embedding_dim, row_dtype(config)
        return ShardPieces(
            name,
            f"{self._where}.table('{name}')",
            self._layouts[name],
            self._tables[name],
            self._env.rank,
            group,
            table_config(name, columns, dynamic.seed, dtype, initializer),
            dynamic.has_life,
            isinstance(dynamic.admission, AdmitAfter),
        )

    def handle(self, name: str) -> ShardedTableHandle:
        """Gives a handle on one table.

        Raises:
            ValueError: if the collection has no such table.
        """
        if name not in self._tables:
            raise ValueError(
                f"{self._where}.table: expected a name among {list(self._tables)}, got {name!r}."
            )
        config, group = self._configs[name], self._env.process_group
        assert isinstance(group, dist.ProcessGroup)
        return ShardedTableHandle(
            name,
            f"{self._where}.table('{name}')",
            self._layouts[name],
            self._tables[name],
            config,
            group,
            self.frozen,
        )


def _tables_of(lookups: Iterable[nn.Module]) -> Iterable[DynamicTable]:
    for lookup in lookups:
        assert isinstance(lookup, (PooledLookup, SequenceLookup))
        for kernel in lookup._emb_modules:
            assert isinstance(kernel, DynamicKernel)
            yield from kernel.tables


def save_and_load_tables(module: Any, shards: LocalShards, holder: str) -> None:
    """Makes the state dicts of a sharded collection and of its optimizer hold its tables.

    Args:
        module: the sharded collection.
        shards: its tables on this rank.
        holder: the name under which the unsharded collection holds them.
    """

    def put(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        shards.put_into(state_dict, f"{prefix}{holder}.")

    def take(
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *others: Any,
    ) -> None:
        shards.take_from(state_dict, f"{prefix}{holder}.", missing_keys)

    module._optim = shards.optimizer(module._optim, holder)
    module._register_state_dict_hook(put)
    module._register_load_state_dict_pre_hook(take, with_module=True)
