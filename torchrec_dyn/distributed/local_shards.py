"""The tables of a sharded collection on this rank, under its present plan, and their optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv

from torchrec_dyn.checkpoint_format import MODEL_NAMES, table_config
from torchrec_dyn.compilers import not_compiled
from torchrec_dyn.distributed.sharding_setup import ShardingSetup
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.life import time_fault
from torchrec_dyn.lookup import TableGroup
from torchrec_dyn.modules import (
    Description,
    TablesOptimizer,
    UnshardedCollection,
    check_not_gathered,
    describe_tables,
    initializer_of,
    row_dtype,
    saved_states,
)
from torchrec_dyn.optimizers import STATE_NAMES, RowOptimizer
from torchrec_dyn.ranks import Table, TableHandle, gather_results, host_group
from torchrec_dyn.sharding import kernels_of
from torchrec_dyn.state_dict import (
    LiveRows,
    append_rows,
    load_optimizer_state,
    load_tables,
    save_optimizer_states,
    save_tables,
)
from torchrec_dyn.storage import OpenForwards, TableLock, commit, locked
from torchrec_dyn.table import TableShard, complete, set_clocks

ShardedTableHandle = TableHandle  # the name in the documentation of a sharded collection's handle


class LocalShards:
    """The column shards on this rank of every table of a collection, in column order.

    The object stays the same when tables move (resharding.py), so its users always see the present shards.
    Code that changes `frozen`, the names of the frozen tables on every rank, must also set `is_frozen` of
    the shards. `batches` are those whose ids were sent and not looked up yet.
    """

    def __init__(self, setup: ShardingSetup, collection: Any, env: ShardingEnv) -> None:
        self.where = setup.where
        self.layouts = setup.layouts
        self.unsharded: nn.Module = setup.module[0].without_rows()
        self.batches = OpenForwards()
        self.output_dtypes = {options.output_dtype for options in setup.options.values()}
        self._configs = {config.name: config for config in setup.configs}
        self._dynamic = setup.dynamic
        self.optimizers = {name: options.optimizer for name, options in setup.options.items()}
        self._env = env
        self.device = setup.rows_device
        self.frozen = {name for name, options in setup.options.items() if options.is_frozen}
        self._initializers: dict[str, Initializer] = {}  # from trained rows or checkpoints
        self._kernels = list(kernels_of(collection._lookups))
        self._tables = self._by_name()
        self._share(TableLock())
        self._handles: dict[str, Table] = {}
        self._save_and_load_with(collection, setup.holder)
        self._fill_from(setup.module[0])

    # Called by the collection.

    @property
    def trained(self) -> list[str]:
        """The names of the tables that are not frozen, the same on every rank."""
        return [name for name in self._tables if name not in self.frozen]

    def handle(self, name: str) -> Table:
        """Returns one table; the object stays valid when the table moves."""
        if name not in self._tables:
            raise ValueError(
                f"{self.where}.table: expected a name among {list(self._tables)}, got {name!r}."
            )
        if name not in self._handles:
            self._handles[name] = self.table(name)
        return self._handles[name]

    @locked  # all shards at one moment
    def describe(self, sharding_types: Mapping[str, str]) -> Description:
        """Returns the table groups of this rank, and the plan of all tables."""
        return describe_tables(
            self.where, self._env.world_size, self.tables(), self.table_groups(), sharding_types
        )

    def set_time(self, time: int) -> None:
        """Sets the clocks of all tables to the latest time that any rank passed. Collective."""
        where = f"{self.where}.set_time"
        shards = self._here()

        def checked() -> tuple[int, int]:
            if fault := time_fault(time, None):
                raise ValueError(fault)
            return time, max((shard.time or 0 for shard in shards), default=0)

        times = gather_results(self._group, where, checked)
        # Only the latest time is checked against the clocks: a rank without a shard has no clock.
        latest = max(given for given, _ in times)
        if fault := time_fault(latest, max(present for _, present in times)):
            raise ValueError(f"{where}: {fault}")
        set_clocks(shards, latest)

    def _save_and_load_with(self, module: Any, holder: str) -> None:
        """Installs the hooks and the optimizer that save and load these tables."""

        @not_compiled
        def put(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
            if self._env.world_size > 1:
                check_not_gathered(self.where)
            save_tables(state_dict, self._by_key(f"{prefix}{holder}."), self.where)

        @not_compiled
        def take(
            module: nn.Module,
            state_dict: dict[str, Any],
            prefix: str,
            metadata: Any,
            strict: bool,
            missing_keys: list[str],
            *others: Any,
        ) -> None:
            tables = self._by_key(f"{prefix}{holder}.")
            load_tables(state_dict, tables, self.where, missing_keys)

        module._optim = ShardedOptimizer(self, self.optimizers, holder)
        module._optim.drive(self.table_groups())
        # TorchRec's hook saves tables of its own kernels only. It refers to the module that holds it, and
        # this cycle would keep the rows of a deleted model until Python collects garbage.
        module._state_dict_hooks.clear()
        module._register_state_dict_hook(put)
        for table in getattr(module, holder).values():
            # torch.distributed.checkpoint.state_dict needs an attribute for each key; it reads no value.
            vars(table).update(dict.fromkeys(MODEL_NAMES))
        module._register_load_state_dict_pre_hook(take, with_module=True)

    # The shards of a table.

    def tables(self) -> list[Table]:
        """Returns the tables, in the order of the collection."""
        return [self.table(name) for name in self._configs]

    def _by_key(self, prefix: str) -> dict[str, Table]:
        """Returns the tables by the prefix of their keys in a state dict."""
        return {f"{prefix}{table.name}.": table for table in self.tables()}

    def table(self, name: str) -> Table:
        """Returns one table under the present plan."""
        config, dynamic = self._configs[name], self._dynamic[name]
        initializer = self._initializers.get(name) or initializer_of(config, dynamic)
        columns, dtype = config.embedding_dim, row_dtype(config)
        return Table(
            name=name,
            where=f"{self.where}.table('{name}')",
            layout=self.layouts[name],
            shards=self._tables[name],
            rank=self._env.rank,
            group=self._group,
            lock=self.lock,
            device=self.device,
            config=table_config(name, columns, dynamic.seed, dtype, initializer, dynamic.saved),
            options=dynamic,
            optimizer=self.optimizers[name],
            initializers=self._initializers,
            features=tuple(config.feature_names),
            frozen=self.frozen,
        )

    # Trained rows, and another plan.

    def has_place_of(self, other: LocalShards, name: str) -> bool:
        """Returns whether both plans have the rows of a table on the same ranks, and in the same storage."""
        storage, others = self._dynamic[name].storage, other._dynamic[name].storage
        return self.layouts[name] == other.layouts[name] and storage == others

    def _fill_from(self, collection: UnshardedCollection) -> None:
        """Copies this rank's part of the rows that were trained before sharding."""
        for name, shard in collection.local_tables().items():
            self._initializers[name] = shard.initializer
        for trained in collection.unsharded_lookup.tables:
            if trained.shard is not None:
                copy_trained_rows(trained.as_table(), self.table(trained.config.name))

    def copy_settings(self, other: LocalShards) -> None:
        """Copies initializers, frozen tables and the lock of the shards of another plan, before rows move."""
        self._initializers, self.frozen = dict(other._initializers), other.frozen
        self._share(other.lock)
        for shard in self._here():
            shard.is_frozen = shard.name in self.frozen

    def reuse(self, other: LocalShards, name: str) -> None:
        """Uses the shards of another plan for a table whose pieces are on the same ranks in both plans."""
        for kernel in self._kernels:
            kernel.replace_shards(other._tables[name])
        self._tables = self._by_name()
        self._dynamic[name] = other._dynamic[name]

    @locked
    def replace_with(self, other: LocalShards, follow: Callable[[], None]) -> None:
        """Replaces the shards, also in the tables that users hold; `follow` does the same elsewhere."""
        with commit(*self.tables()):
            for shard in self._here():
                if shard not in other._tables[shard.name]:
                    shard.generation += 1  # earlier state dicts and graphs are not valid any more
            kept = {"batches": self.batches, "_handles": self._handles}
            self.__dict__.update({**other.__dict__, **kept})
            for name, handle in self._handles.items():
                handle.follow(self.table(name))
            follow()

    def table_groups(self) -> list[TableGroup]:
        """Returns the table groups on this rank."""
        return [kernel.group for kernel in self._kernels]

    def _share(self, lock: TableLock) -> None:
        self.lock = lock
        for shard in self._here():
            shard.lock = lock

    def _here(self) -> list[TableShard]:
        return [*chain.from_iterable(self._tables.values())]

    @property
    def _group(self) -> dist.ProcessGroup:
        """The group for tensors of the CPU."""
        group = self._env.process_group
        assert isinstance(group, dist.ProcessGroup)
        return host_group(group)

    def _by_name(self) -> dict[str, list[TableShard]]:
        shards: dict[str, list[TableShard]] = {name: [] for name in self._configs}
        for kernel in self._kernels:
            for table in kernel.group.tables:
                shards[table.name].append(table)
        for table_shards in shards.values():
            table_shards.sort(key=lambda shard: shard.first_column)
        return shards


def copy_trained_rows(trained: Table, table: Table) -> None:
    """Fills empty shards with this rank's part of the rows trained before sharding, which every rank has."""
    if not table.shards:
        return
    (source,), rows = trained.shards, LiveRows(trained, table.where)
    has_state = trained.optimizer.saved_name == table.optimizer.saved_name
    names = [name for name in rows.names if has_state or name not in STATE_NAMES]
    # A new optimizer counts steps from 0, but scores refer to steps.
    step = source.step if has_state or source.life is not None else 0
    for shard in table.shards:
        shard.start_as(source.initializer)  # a loaded checkpoint may have set it
        complete(shard, step, rows.clock)
        if shard.life is not None:
            shard.life.is_unscored = source.life is None or source.life.is_unscored
    append_rows(rows, table, table.shards, names)


class ShardedOptimizer(TablesOptimizer):
    """Optimizer state and learning rates of all tables of a sharded collection, on every rank.

    Saving and loading are collective, so every rank needs the entries of all tables; TorchRec's optimizer
    has the tables of one rank only. Every rank has one parameter group for each distinct row optimizer, so
    schedulers find the same groups everywhere, even after tables have moved. It cannot be copied or pickled.
    """

    def __init__(
        self, shards: LocalShards, optimizers: Mapping[str, RowOptimizer], holder: str
    ) -> None:
        tables = {}
        exported: dict[tuple[int, str], Tensor] = {}

        def save() -> Mapping[str, Tensor]:
            where = f"{shards.where}.fused_optimizer.state_dict"
            return save_optimizer_states(shards.tables(), where)

        def load(name: str, saved: Mapping[str, Any]) -> None:
            load_optimizer_state(shards.table(name), saved)

        for name, optimizer in optimizers.items():
            key = f"{holder}.{name}.weight"
            placeholder = torch.empty(0, device="meta")
            states = saved_states(name, optimizer, save, partial(load, name), exported)
            tables[key] = placeholder, optimizer, states
        super().__init__(tables)

    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError(
            "ShardedOptimizer: expected an optimizer of an unsharded collection in a copy or a pickle, got "
            "one of a sharded collection: its rows are on several ranks. Save state dicts with "
            "torch.distributed.checkpoint."
        )
