"""LocalShards: the tables of a sharded collection on this rank, where they lie now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_dyn.checkpoint_format import table_config
from torchrec_dyn.distributed.optimizer import ShardedOptimizer
from torchrec_dyn.distributed.sharding_setup import ShardingSetup
from torchrec_dyn.distributed.table_handle import ShardedTableHandle
from torchrec_dyn.distributed.trained_rows import carry_over
from torchrec_dyn.initializers import Initializer
from torchrec_dyn.life import time_fault
from torchrec_dyn.modules import initializer_of, row_dtype
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.policies import AdmitAfter
from torchrec_dyn.ranks import agree
from torchrec_dyn.sharding import DynamicKernel, PooledLookup, SequenceLookup
from torchrec_dyn.state_dict import ShardPieces, load_tables, save_tables
from torchrec_dyn.storage import ForwardTicket, OutstandingForwards
from torchrec_dyn.table import DynamicTable


class LocalShards:
    """The column shards on this rank of every table of a collection, in column order.

    Stays the same object when tables move (resharding.py): what holds it sees them where they are.

    Args:
        setup: of the collection.
        lookups: TorchRec's, one per sharding type.
        env: the ranks.

    Attributes:
        where: the collection, for messages.
        layouts: where the pieces of each table lie.
        unsharded: the collection without its rows.
        frozen: names of the frozen tables, the same on every rank; whoever writes it writes `is_frozen` of
            the shards too.
        batches: those whose ids were sent by the present plan and not looked up yet.
    """

    def __init__(
        self, setup: ShardingSetup, lookups: Iterable[nn.Module], env: ShardingEnv
    ) -> None:
        self.where = setup.where
        self.layouts = setup.layouts
        self.unsharded = setup.unsharded
        self.batches = OutstandingForwards()
        self._configs = {config.name: config for config in setup.configs}
        self._dynamic = setup.dynamic
        self._optimizers = setup.view.optimizers
        self._env = env
        self.frozen = set(setup.frozen)
        self._initializers: dict[str, Initializer] = {}  # those that came with a checkpoint
        self._kernels = list(_kernels_of(lookups))
        self._tables = self._by_name()
        self._handles: dict[str, ShardedTableHandle] = {}

    def _by_name(self) -> dict[str, list[DynamicTable]]:
        shards: dict[str, list[DynamicTable]] = {name: [] for name in self._configs}
        for kernel in self._kernels:
            for table in kernel.tables:
                shards[table.name].append(table)
        for of_table in shards.values():
            of_table.sort(key=lambda shard: shard.first_column)
        return shards

    def send(self) -> ForwardTicket:
        """Opens a ticket for a batch whose ids are being sent; its lookup closes it."""
        return ForwardTicket([self.batches])

    def shards_of(self, name: str) -> Sequence[DynamicTable]:
        """Returns the shards of one table on this rank."""
        return self._tables[name]

    def start_as(self, other: LocalShards) -> None:
        """Lets shards that are not yet filled start rows, and learn or not, as those of another plan."""
        self._initializers, self.frozen = dict(other._initializers), other.frozen
        for shards in self._tables.values():
            for shard in shards:
                shard.is_frozen = shard.name in self.frozen

    def keep(self, other: LocalShards, name: str) -> None:
        """Takes the very shards of a table of another plan, for its pieces lie where they lay."""
        for kernel in self._kernels:
            kernel.keep(other._tables[name])
        self._tables = self._by_name()

    def become(self, other: LocalShards) -> None:
        """Takes the place of another plan's shards for good; what was handed out follows."""
        held = (self.batches, self._handles)
        for shards in self._tables.values():
            for shard in shards:
                if shard not in other._tables[shard.name]:
                    shard.generation += 1  # state dicts and graphs of before are void
        self.__dict__.update(other.__dict__)
        self.batches, self._handles = held
        for name, handle in self._handles.items():
            handle.follow(self._new_handle(name))

    def fill_from(self, trained: Mapping[str, DynamicTable]) -> None:
        """Takes over this rank's part of rows that were trained before sharding."""
        for name, source in trained.items():
            self._initializers[name] = source.initializer
            carry_over(source, self._tables[name], self.layouts[name], self._env.rank)

    def set_time(self, time: int) -> None:
        """Sets the clocks of all tables to the latest time that a rank passes. Collective.

        Raises:
            ValueError: on every rank, if some rank passed no time or the latest is past.
        """
        where, fault = f"{self.where}.set_time", time_fault(time, None)
        shards = [shard for shards in self._tables.values() for shard in shards]
        group = self._env.process_group
        assert isinstance(group, dist.ProcessGroup)
        # A rank without a shard does not know what the clocks show, and one behind the others is no fault.
        shown = max((shard.time or 0 for shard in shards), default=0)
        told = agree(group, where, ValueError(fault) if fault else None, (time, shown))
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
        tables = list(self._optimizers.items())
        optimizer = ShardedOptimizer(dict(local.params), tables, holder, self.pieces_of)
        self.drive_by(optimizer)
        return optimizer

    def drive_by(self, optimizer: ShardedOptimizer) -> None:
        """Lets an optimizer set the learning rates of all shards here."""
        optimizer.drive([kernel.group for kernel in self._kernels])

    def optimizer_of(self, name: str) -> RowOptimizer:
        """Tells how the rows of a table learn, wherever they are."""
        return self._optimizers[name]

    def put_into(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Adds the tables to a state dict. Collective.

        Args:
            state_dict: of the model.
            prefix: of the tables' names.
        """
        save_tables(state_dict, prefix, self.pieces(), self.where)

    def take_from(self, state_dict: dict[str, Any], prefix: str, missing_keys: list[str]) -> None:
        """Loads the tables out of a state dict, all or none, and removes their keys. Collective.

        Args:
            state_dict: of the model.
            prefix: of the tables' names.
            missing_keys: gets those that are not there.
        """
        came = load_tables(state_dict, prefix, self.pieces(), self.where, missing_keys)
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
            f"{self.where}.table('{name}')",
            self.layouts[name],
            self._tables[name],
            self._env.rank,
            group,
            table_config(name, columns, dynamic.seed, dtype, initializer),
            self._optimizers[name],
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
                f"{self.where}.table: expected a name among {list(self._tables)}, got {name!r}."
            )
        if name not in self._handles:
            self._handles[name] = self._new_handle(name)
        return self._handles[name]

    def _new_handle(self, name: str) -> ShardedTableHandle:
        config, group = self._configs[name], self._env.process_group
        assert isinstance(group, dist.ProcessGroup)
        return ShardedTableHandle(
            name,
            f"{self.where}.table('{name}')",
            self.layouts[name],
            self._tables[name],
            config,
            group,
            self.frozen,
        )


def _kernels_of(lookups: Iterable[nn.Module]) -> Iterable[DynamicKernel]:
    for lookup in lookups:
        assert isinstance(lookup, (PooledLookup, SequenceLookup))
        for kernel in lookup._emb_modules:
            assert isinstance(kernel, DynamicKernel)
            yield kernel


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
