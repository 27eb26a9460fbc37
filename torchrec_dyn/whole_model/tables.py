"""The dynamic collections of a model and their tables, sharded or not, in a common form."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_dyn.distributed import (
    ShardedDynamicEmbeddingBagCollection,
    ShardedDynamicEmbeddingCollection,
)
from torchrec_dyn.lookup import TableGroup
from torchrec_dyn.modules import DynamicEmbeddingBagCollection, UnshardedCollection, check_is_no_dmp
from torchrec_dyn.name_lists import listed
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks import Table, run_together
from torchrec_dyn.state_dict import drop_awaited

ShardedCollection = ShardedDynamicEmbeddingBagCollection | ShardedDynamicEmbeddingCollection
Collection = UnshardedCollection | ShardedCollection
_POOLED = (DynamicEmbeddingBagCollection, ShardedDynamicEmbeddingBagCollection)


def collections_of(model: nn.Module, where: str) -> list[tuple[str, Collection]]:
    """Returns the dynamic collections of a model with their paths, in the same order on all ranks.

    The model is DistributedModelParallel, any module, or a collection.
    """
    collections = _collections(model, where)
    if not collections:
        raise ValueError(
            f"{where}: expected a model with a dynamic collection, got {type(model).__name__} "
            "without one. Make its collections dynamic first, e.g. with make_dynamic."
        )
    return collections


def tables_of(model: nn.Module, call: str) -> list[Table]:
    """Returns the dynamic tables of a model, in the same order on all ranks; not collective.

    The model is as in `collections_of`.
    """
    collections = _collections(model, call)
    tables = [*chain(*(tables_in(module, path).values() for path, module in collections))]
    names = [table.name for table in tables]
    if not tables or len(set(names)) < len(names):
        raise ValueError(
            f"{call}: expected a model with dynamic tables of different names, got tables {listed(names)}."
        )
    unsharded = [table.name for table in tables if table.group is None]
    if unsharded:
        check_is_no_dmp(f"{call}(tables={listed(unsharded)})", model)
    if 0 < len(unsharded) < len(tables):
        raise ValueError(
            f"{call}: expected dynamic tables that are all sharded or all unsharded, got {unsharded} "
            "unsharded and the others sharded. Pass each collection separately."
        )
    return tables


def sharding_types(model: nn.Module, call: str) -> dict[str, str]:
    """Returns by name the sharding type of each dynamic table of a model, or "unsharded"."""
    types: dict[str, str] = {}
    for _, collection in collections_of(model, call):
        types |= dict.fromkeys(table_names(collection), "unsharded")
        plan = getattr(collection, "module_sharding_plan", {})
        types |= {name: sharding.sharding_type for name, sharding in plan.items()}
    return types


def checked_collection(module: nn.Module, call: str) -> Collection:
    """Returns `module`, which public functions take as any: so torch types an attribute of a model."""
    if isinstance(module, Collection):
        return module
    raise ValueError(
        f"{call}: expected a collection of dynamic tables, got {type(module).__name__}. "
        "Pass the collection itself, not the model."
    )


def tables_in(module: nn.Module, path: str = "", call: str = "tables_in") -> dict[str, Table]:
    """Returns the tables of one collection by name, in the collection's order; not collective.

    The keys of the tables begin with `path`, the place of the collection in its model.
    """
    collection = checked_collection(module, call)
    holder = "embedding_bags" if isinstance(collection, _POOLED) else "embeddings"
    prefix = f"{path}.{holder}." if path else f"{holder}."
    if isinstance(collection, UnshardedCollection):
        tables = [table.as_table() for table in collection.unsharded_lookup.tables]
    else:
        tables = collection._shards.tables()
    return {table.name: replace(table, key=prefix + table.name) for table in tables}


def table_in(module: nn.Module, name: str | None, call: str) -> Table:
    """Returns a table of a collection; None: the only one. An unknown name is an error of all ranks."""
    collection = checked_collection(module, call)
    names = table_names(collection)
    wanted: Any = names[0] if name is None and len(names) == 1 else name
    try:
        return collection.table(wanted)
    except ValueError:
        if isinstance(collection, ShardedCollection):
            run_together(collection._env.process_group, call, lambda: collection.table(wanted))
        raise


def table_names(collection: Collection) -> list[str]:
    """Returns the names of a collection's tables; does not use their rows."""
    if isinstance(collection, UnshardedCollection):
        return list(collection.dynamic_configs())
    return list(collection.module_sharding_plan)


def drop_load(model: nn.Module) -> list[str]:
    """Drops the rows that `torch.distributed.checkpoint.load` has read with `LoadPlanner` for a model.

    Such rows wait for `load_state_dict`, and a forward before it is an error. After this call the model
    continues training with the rows that it has. Not collective, but every rank of a sharded model must call
    it.

    Args:
        model: DistributedModelParallel, any module, or a collection.

    Returns:
        The names of the tables whose rows were dropped, in order; empty if no rows waited.

    Raises:
        ValueError: if the model has no dynamic collection.
    """
    collections = collections_of(model, "drop_load")
    locks = [_here(collection).lock for _, collection in collections]
    return sorted(chain(*map(drop_awaited, locks)))


def _here(collection: Collection) -> Any:
    """Returns what holds the tables of a collection in this process, with their lock and table groups."""
    if isinstance(collection, UnshardedCollection):
        return collection.unsharded_lookup
    return collection._shards


def groups_of(collection: Collection) -> tuple[dist.ProcessGroup | None, list[TableGroup]]:
    """Returns the ranks of a collection, None for one process, and the table groups of this rank."""
    env = getattr(collection, "_env", None)
    return env and env.process_group, _here(collection).table_groups()


def optimizers_of(collection: Collection) -> list[RowOptimizer]:
    """Returns the row optimizers of a collection's tables, on any rank."""
    if isinstance(collection, UnshardedCollection):
        groups = collection.unsharded_lookup.table_groups()
        return [group.tables[0].optimizer for group in groups]
    return list(collection._shards.optimizers.values())


def _collections(model: nn.Module, call: str) -> list[tuple[str, Collection]]:
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{call}: expected a model, got {type(model).__name__}. Pass the module with the tables first."
        )
    modules = get_unwrapped_module(model).named_modules()
    return [(path, module) for path, module in modules if isinstance(module, Collection)]
