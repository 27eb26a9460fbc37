"""The first step of both sharded collections: checks the plan, and creates a module for TorchRec to shard."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import (
    CacheAlgorithm,
    CacheParams,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
)
from torchrec.distributed.utils import add_params_from_parameter_sharding
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_dyn import ops
from torchrec_dyn.modules import (
    UnshardedTable,
    chosen_fused_params,
    merged_fused_params,
    model_being_sharded,
    placement_options,
    placement_warning,
    with_fbgemm_dtype,
)
from torchrec_dyn.name_lists import listed
from torchrec_dyn.optimizers import RowOptimizer, output_dtype_of
from torchrec_dyn.ranks import (
    CACHED_ON_DEVICE,
    SHARDING_TRAITS,
    checked_plan,
    config_of_share,
    host_group,
    planned_storage,
    row_limit,
    table_layouts,
)
from torchrec_dyn.sharding import MAX_WIDTH_KEY, OPTIONS_KEY, TableOptions
from torchrec_dyn.table import present_gpu


def check_surroundings(env: ShardingEnv, device: torch.device | None, where: str) -> torch.device:
    """Returns the device of rows; ValueError unless collections can be sharded over these ranks with it.

    Collective: it makes the group in which the ranks agree. Later one rank alone may ask for a handle.
    """
    if env.process_group is None:
        raise ValueError(
            f"{where}: expected a process group, got none, as from TorchRec's shard_quant_model. Serve the "
            "tables with torchrec_dyn.serving."
        )
    if isinstance(env, ShardingEnv2D):
        # docs/dev/decisions/0029: TorchRec would not even find the rows, and its replicas would drift apart.
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
    return present_gpu(place)


# Fields of a plan, from ParameterConstraints, that place rows as PLACEMENT_KEYS of `fused_params` do.
_PLACED_BY_PLAN = ("cache_params", "enforce_hbm", "key_value_params")
_LOAD_FACTOR = "cache_load_factor"  # of `fused_params`, for plans that have none


def _without_effect(plan: ParameterSharding, is_cached: bool) -> set[str]:
    """Returns the options of a plan that place rows and have no effect."""
    names = {option for option in _PLACED_BY_PLAN if getattr(plan, option)}
    if not is_cached or plan.cache_params is None:
        return names
    return names - {"cache_params"} | _unused_cache_params(plan.cache_params)


def _unused_cache_params(given: CacheParams) -> set[str]:
    """Returns the fields of the parameters of a cache that mean nothing to ours."""
    # `stats` are the planner's.
    names = {field.name for field in fields(given)} - {"load_factor", "stats"}
    if given.algorithm is CacheAlgorithm.LRU:
        names.remove("algorithm")  # ours, too
    return {f"cache_params.{name}" for name in names if getattr(given, name) not in (None, False)}


_tables_of_model: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()


def _claim_names(names: Sequence[str], module_fqn: str | None, where: str) -> None:
    """Raises ValueError if another collection of the model has a table of the same name."""
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


# Methods of collections that TorchRec's sharded modules call, besides those of the class.
_READ_BY_TORCHREC = {
    *("is_weighted", "need_indices", "embedding_dim", "embedding_names_by_table"),
    *("use_gather_select", "use_gather_select_per_sharding", "use_sorted_select"),
}


class ShardingSetup(nn.Module):
    """A checked plan, and the module that TorchRec shards in place of a dynamic collection; read only.

    TorchRec reads the tables, their optimizers and the state dict of the module that it shards. It gets
    configs and placeholders here, so it copies no rows, and the collection is not changed.

    `sharded` is the class of the sharded collection, and `module_fqn` the path in the model. `plan` has our
    compute kernel, and `is_scored` is True if some table scores ids by weights of a batch.
    """

    # TorchRec then copies no weights; `copy_trained_rows` copies the rows.
    device = torch.device("meta")

    def __init__(
        self,
        sharded: Any,
        module: Any,
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None,
        device: torch.device | None,
        module_fqn: str | None,
    ) -> None:
        super().__init__()
        self.holder, name = sharded.holder, type(module).__name__
        self.where = where = f"{name}('{module_fqn}')" if module_fqn else name
        self.rows_device = check_surroundings(env, device, where)
        tables: dict[str, UnshardedTable] = dict(getattr(module, sharded.holder).items())
        self.configs = [copy.deepcopy(table.config) for table in tables.values()]
        for config in self.configs:
            config.enable_embedding_update = False  # TorchRec would write by position
        types = list(sharded.sharding_classes)
        self.layouts = table_layouts(self.configs, plan, env, types, where)
        self._whole_columns = [kind for kind in types if not SHARDING_TRAITS[kind].cuts_columns]
        self.plan = checked_plan(plan, where)
        self._kernels = {name: sharding.compute_kernel for name, sharding in plan.items()}
        self.dynamic = {name: table.dynamic for name, table in tables.items()}
        self.features = [name for config in self.configs for name in config.feature_names]
        self.is_scored = any(options.scores_weights for options in self.dynamic.values())
        self.options: dict[str, TableOptions] = {}
        merged = merged_fused_params(fused_params, module.fused_params)
        by_default, placed = self._add_placeholders(tables, merged)
        self._check_dtypes()
        _claim_names([*tables], module_fqn, where)
        if by_default:
            warnings.warn(
                f"{where}: no optimizer was chosen for tables {listed(by_default)}; their rows "
                "train with EXACT_SGD at learning rate 0.01. "
                "Set fused_params={'optimizer': ..., 'learning_rate': ...}.",
                UserWarning,
                stacklevel=4,
            )
        if placed:
            warnings.warn(placement_warning(sorted(placed), where), UserWarning, stacklevel=4)
        self.module: list[Any] = [module]
        for method in _READ_BY_TORCHREC & {*dir(module)}:
            setattr(self, method, getattr(module, method))

    def _add_placeholders(
        self, tables: Mapping[str, UnshardedTable], fused_params: Mapping[str, Any]
    ) -> tuple[list[str], set[str]]:
        """Adds placeholders; returns the tables without a chosen optimizer, and options that place rows."""
        placeholders = nn.ModuleDict()
        by_default: list[str] = []
        placed: set[str] = set()
        uses_load_factor = False
        for name, table in tables.items():
            where, plan, layout = (
                f"{self.where}(table='{name}')",
                self.plan[name],
                self.layouts[name],
            )
            if table.dynamic.reads_rows and len(layout.pieces) > 1:
                raise ValueError(
                    f"{where}: expected one column shard, since {table.dynamic.eviction!r} reads whole rows, "
                    f"got '{plan.sharding_type}' with {len(layout.pieces)} column shards. Choose one "
                    f"of {listed(self._whole_columns)}."
                )
            chosen = chosen_fused_params(table.weight, fused_params, where)
            if chosen is None:
                by_default.append(name)
                chosen = {}
            placed.update(placement_options(chosen))
            is_cached = (
                self._kernels[name] == CACHED_ON_DEVICE and self.dynamic[name].storage is None
            )
            placed.update(_without_effect(plan, is_cached))
            uses_load_factor |= is_cached
            # As TorchRec will. Else the kernels would be the first to check them, and only owners have these.
            chosen = add_params_from_parameter_sharding(chosen, plan)
            chosen = with_fbgemm_dtype(chosen, where)
            self._place(name, chosen.get(_LOAD_FACTOR), table.weight.shape[0], where)
            self.options[name] = TableOptions(
                config=config_of_share(self.dynamic[name], layout.row_ranks),
                optimizer=RowOptimizer.from_fused_params(chosen, where),
                output_dtype=output_dtype_of(chosen, where),
                row_limit=row_limit(table.weight.shape[0], layout.row_ranks),
                rows_are_spread=layout.rows_are_spread,
                sends_rows=table.dynamic.pooling == "max" and layout.row_ranks > 1,
                is_frozen=table.is_frozen,
            )
            chosen[OPTIONS_KEY] = self.options.__getitem__
            if table.dynamic.pooling == "max":
                chosen[MAX_WIDTH_KEY] = table.weight.shape[1]
            placeholders[name] = _placeholder(table.weight, chosen)
        self.add_module(self.holder, placeholders)
        return by_default, placed - {_LOAD_FACTOR} if uses_load_factor else placed

    def _place(self, name: str, load_factor: object, num_embeddings: int, where: str) -> None:
        """Gives a table without a storage of its own that of the plan."""
        config = self.dynamic[name]
        if config.storage is None:
            storage = planned_storage(self._kernels[name], load_factor, num_embeddings, where)
            self.dynamic[name] = replace(config, storage=storage)

    def _check_dtypes(self) -> None:
        """Raises ValueError if outputs that TorchRec joins to one tensor have different dtypes."""
        outputs: dict[str, dict[torch.dtype, list[str]]] = {}
        for config in self.configs:
            is_pooled = isinstance(config, EmbeddingBagConfig)
            which = "" if is_pooled else f" that are {self.plan[config.name].sharding_type}"
            by_dtype = outputs.setdefault(which, {})
            by_dtype.setdefault(self.options[config.name].output_dtype, []).append(config.name)
        for which, by_dtype in outputs.items():
            if len(by_dtype) > 1:
                got = "; ".join(
                    f"{dtype} of tables {listed(names)}" for dtype, names in by_dtype.items()
                )
                raise ValueError(
                    f"{self.where}: expected one output_dtype of all tables{which}, got "
                    f"{got}. Set it in fused_params, or in the ParameterConstraints of every table."
                )

    def embedding_bag_configs(self) -> list[Any]:
        """Returns the configs of a pooled collection."""
        return self.configs

    def embedding_configs(self) -> list[Any]:
        """Returns the configs of a sequence collection."""
        return self.configs


def _placeholder(weight: nn.Parameter, fused_params: dict[str, Any]) -> nn.Module:
    """Returns the meta parameter of one table, with its optimizer in the attributes that TorchRec reads."""
    holder: Any = nn.Module()
    holder.weight = nn.Parameter(torch.empty_like(weight, device="meta"))
    holder.weight._optimizer_classes = [None]
    holder.weight._optimizer_kwargs = [fused_params]
    return cast(nn.Module, holder)
