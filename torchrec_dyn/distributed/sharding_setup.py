"""What both sharded collections do before TorchRec builds them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.distributed.shardable_view import ShardableView, merged_fused_params
from torchrec_dyn.modules import LocalTable
from torchrec_dyn.ranks import TableLayout, checked_plan, table_layouts

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
        unsharded: the collection without its rows, to be sharded again.
        frozen: names of the tables that are frozen.
    """

    where: str
    configs: Sequence[BaseEmbeddingConfig]
    plan: dict[str, ParameterSharding]
    layouts: dict[str, TableLayout]
    dynamic: dict[str, DynamicTableConfig]
    view: ShardableView
    unsharded: nn.Module
    frozen: set[str]


def set_up(
    module: Any,
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
    merged = merged_fused_params(fused_params, module.fused_params)
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
    unsharded = module.without_rows()
    return ShardingSetup(where, configs, for_our_kernel, layouts, dynamic, view, unsharded, frozen)


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
