"""The first step of both sharded collections: checks the plan, and creates a view for TorchRec to shard.

TorchRec reads the tables, their optimizers and the state dict of the module that it shards. It gets a view
with the tables' configs, the optimizer of each table and placeholders. So TorchRec copies no rows, and the
module is not changed.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingEnv2D
from torchrec.distributed.utils import add_params_from_parameter_sharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig

from torchrec_dyn import ops
from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.modules import (
    DEFAULT_FUSED_PARAMS,
    DefaultSelection,
    UnshardedTable,
    chosen_fused_params,
    chosen_output_dtype,
    merged_fused_params,
    model_being_sharded,
    placement_options,
    placement_warning,
    with_fbgemm_dtype,
)
from torchrec_dyn.name_lists import listed
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks import (
    TableLayout,
    checked_plan,
    config_of_share,
    host_group,
    row_limit,
    table_layouts,
)
from torchrec_dyn.sharding import OPTIONS_KEY, KernelOptions, TableOptions


@dataclass(frozen=True)
class ShardingSetup:
    """A checked plan, and the data that a sharded collection is built from.

    Attributes:
        where: the collection, for messages.
        configs: the configs of the collection's tables.
        plan: the collection's part of the plan, with our compute kernel.
        layouts: the pieces of each table and their ranks.
        dynamic: the user's options of each table.
        view: the module that TorchRec shards in place of the collection.
        unsharded: the collection without its rows, to be sharded again.
        frozen: names of the frozen tables.
        device: the device of the rows.
    """

    where: str
    configs: Sequence[BaseEmbeddingConfig]
    plan: dict[str, ParameterSharding]
    layouts: dict[str, TableLayout]
    dynamic: dict[str, DynamicTableConfig]
    view: ShardableView
    unsharded: nn.Module
    frozen: set[str]
    device: torch.device


def set_up(
    module: Any,
    holder: str,
    configs: Sequence[BaseEmbeddingConfig],
    plan: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    fused_params: Mapping[str, Any] | None,
    sharding_types: Sequence[str],
    device: torch.device | None,
    module_fqn: str | None,
) -> ShardingSetup:
    """Checks the plan, the optimizers and the names of the tables, before anything is built.

    `holder` is the attribute of the unsharded collection that holds the tables, `sharding_types` are those
    that it supports, and `module_fqn` is its path in the model. A device of None is the CPU.
    """
    where = f"{type(module).__name__}('{module_fqn}')" if module_fqn else type(module).__name__
    check_surroundings(env, device, where)
    layouts = table_layouts(configs, plan, env, sharding_types, where)
    for_our_kernel = checked_plan(plan, where)
    held: Any = getattr(module, holder)
    tables: dict[str, UnshardedTable] = {config.name: held[config.name] for config in configs}
    merged = merged_fused_params(fused_params, module.fused_params)
    view = ShardableView(module, configs, tables, holder, layouts, merged, for_our_kernel, where)
    _claim_names([config.name for config in configs], module_fqn, where)
    if view.tables_by_default:
        warnings.warn(
            f"{where}: no optimizer was chosen for tables {listed(view.tables_by_default)}; their rows "
            "train with EXACT_SGD at learning rate 0.01. "
            "Set fused_params={'optimizer': ..., 'learning_rate': ...}.",
            UserWarning,
            stacklevel=4,
        )
    if view.placement_options:
        warnings.warn(
            placement_warning(sorted(view.placement_options), where), UserWarning, stacklevel=4
        )
    dynamic = {name: table.dynamic for name, table in tables.items()}
    frozen = {name for name, table in tables.items() if table.is_frozen}
    unsharded = module.without_rows()
    place = device if device is not None else torch.device("cpu")
    return ShardingSetup(
        where, configs, for_our_kernel, layouts, dynamic, view, unsharded, frozen, place
    )


def check_surroundings(env: ShardingEnv, device: torch.device | None, where: str) -> None:
    """Raises ValueError unless collections can be sharded over these ranks with rows on this device.

    Collective: it makes the group in which the ranks agree. Later one rank alone may ask for a handle.
    """
    if env.process_group is None:
        raise ValueError(
            f"{where}: expected a process group, got none, as from TorchRec's shard_quant_model. Serve the "
            "tables with torchrec_dyn.serving."
        )
    if isinstance(env, ShardingEnv2D):
        # docs/decisions/0029: TorchRec would not even find the rows, and its replicas would drift apart.
        raise ValueError(
            f"{where}: expected DistributedModelParallel, got TorchRec's DMPCollection (2D parallelism). Its "
            "sync averages rows by their position, and replicas of a dynamic table have an id at different "
            "positions. Use torchrec_dyn.Replicas, or DistributedModelParallel over all ranks."
        )
    place = device if device is not None else torch.device("cpu")
    if place.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{where}: expected rows of a sharded collection on cpu or cuda, got {place}. Pass one of these "
            "as the device of DistributedModelParallel; rows are made when training first sees their ids."
        )
    if place.type == "cuda" and not ops.has_cuda_kernels():
        raise ValueError(
            f"{where}: expected rows on the CPU, since torchrec_dyn was built without CUDA kernels, got "
            f"{place}. Build it where nvcc is installed, or shard with device=torch.device('cpu')."
        )
    if isinstance(env.process_group, dist.ProcessGroup):
        host_group(env.process_group)


# Fields of a plan, from ParameterConstraints, that place rows as PLACEMENT_KEYS of `fused_params` do.
_PLACED_BY_PLAN = ("cache_params", "enforce_hbm", "key_value_params")


_tables_of_model: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()


def _claim_names(names: Sequence[str], module_fqn: str | None, where: str) -> None:
    """Raises ValueError if another collection of the model has a table of the same name.

    Both tables would have the same initial rows. Tables of two models may have the same name: a student and
    its teacher begin alike. Collections that are sharded one by one, by calls of a sharder, are not compared.
    """
    model = model_being_sharded()
    if module_fqn is None or model is None:
        return
    claimed = _tables_of_model.setdefault(model, {})
    for name in names:
        if claimed.get(name, module_fqn) != module_fqn:
            raise ValueError(
                f"{where}(table='{name}'): expected a name that is unique in the model, got the name of a "
                f"table of '{claimed[name]}': both would have the same initial rows, which depend on the "
                "name. Rename one of the tables in its config, before it is trained."
            )
    claimed.update(dict.fromkeys(names, module_fqn))


class ShardableView(DefaultSelection, nn.Module):
    """The module that TorchRec shards in place of a dynamic collection; read only.

    `fused_params` are the merged options of sharder and module; options on a table's parameter have priority
    over them, and those in the `plan` over both.

    Attributes:
        tables_by_default: names of the tables without a chosen optimizer.
        placement_options: options for a cache or another place of rows, which have no effect.
        optimizers: the row optimizer of each table, by name.
        output_dtypes: the dtypes of the tables' outputs.
    """

    def __init__(
        self,
        module: Any,
        configs: Sequence[BaseEmbeddingConfig],
        tables: Mapping[str, UnshardedTable],
        holder: str,
        layouts: Mapping[str, TableLayout],
        fused_params: Mapping[str, Any],
        plan: Mapping[str, ParameterSharding],
        where: str,
    ) -> None:
        super().__init__()
        # In a list, because a child module would add the rows to this view's state dict.
        self._module: list[Any] = [module]
        self._configs = copy.deepcopy(list(configs))
        for config in self._configs:
            config.enable_embedding_update = False  # TorchRec would write by position
        options = {
            config.name: TableOptions(
                config=config_of_share(tables[config.name].dynamic, layouts[config.name].row_ranks),
                row_limit=row_limit(config.num_embeddings, layouts[config.name].row_ranks),
                rows_are_spread=layouts[config.name].rows_are_spread,
                is_frozen=tables[config.name].is_frozen,
            )
            for config in configs
        }
        kernel_options = KernelOptions(options)
        placeholders = nn.ModuleDict()
        self.tables_by_default: list[str] = []
        self.placement_options: set[str] = set()
        self.optimizers: dict[str, RowOptimizer] = {}
        outputs: dict[str, dict[torch.dtype, list[str]]] = {}
        pooled = any(isinstance(config, EmbeddingBagConfig) for config in configs)
        for config in configs:
            weight = tables[config.name].weight
            table = f"{where}(table='{config.name}')"
            chosen = chosen_fused_params(weight, fused_params, table)
            if chosen is None:
                self.tables_by_default.append(config.name)
                chosen = dict(DEFAULT_FUSED_PARAMS)
            self.placement_options.update(placement_options(chosen))
            self.placement_options.update(
                name for name in _PLACED_BY_PLAN if getattr(plan[config.name], name)
            )
            # As TorchRec will. Else the kernels would be the first to check them, and only owners have these.
            chosen = add_params_from_parameter_sharding(chosen, plan[config.name])
            chosen = with_fbgemm_dtype(chosen, table)
            self.optimizers[config.name] = RowOptimizer.from_fused_params(chosen, table)
            # A rank receives the outputs of all tables of a sharding type as one tensor, and a pooled
            # collection joins those of all types to one KeyedTensor.
            which = "" if pooled else f" that are {plan[config.name].sharding_type}"
            by_dtype = outputs.setdefault(which, {})
            by_dtype.setdefault(chosen_output_dtype(chosen, table), []).append(config.name)
            chosen[OPTIONS_KEY] = kernel_options
            placeholders[config.name] = _Placeholder(weight, chosen)
        self.output_dtypes = {dtype for by_dtype in outputs.values() for dtype in by_dtype}
        for which, by_dtype in outputs.items():
            if len(by_dtype) > 1:
                got = "; ".join(
                    f"{dtype} of tables {listed(names)}" for dtype, names in by_dtype.items()
                )
                raise ValueError(
                    f"{where}: expected one output_dtype of all tables{which}, got "
                    f"{got}. Set it in fused_params, or in the ParameterConstraints of every table."
                )
        self.add_module(holder, placeholders)

    @property
    def device(self) -> torch.device:
        """The meta device: TorchRec then copies no weights; `copy_trained_rows` copies the rows."""
        return torch.device("meta")

    def embedding_bag_configs(self) -> list[Any]:
        """Returns the configs of a pooled collection."""
        return self._configs

    def embedding_configs(self) -> list[Any]:
        """Returns the configs of a sequence collection."""
        return self._configs

    def is_weighted(self) -> bool:
        """Returns True if bags have weights."""
        return self._module[0].is_weighted()

    def need_indices(self) -> bool:
        """Returns True if outputs contain the ids."""
        return self._module[0].need_indices()

    def embedding_dim(self) -> int:
        """Returns the number of columns of every table of a sequence collection."""
        return self._module[0].embedding_dim()

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the output names of each table of a sequence collection."""
        return self._module[0].embedding_names_by_table()


class _Placeholder(nn.Module):
    """Holds the meta parameter of one table, with its optimizer in the attributes that TorchRec reads."""

    def __init__(self, weight: nn.Parameter, fused_params: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(weight, device="meta"))
        marked: Any = self.weight
        marked._optimizer_classes = [None]
        marked._optimizer_kwargs = [fused_params]
