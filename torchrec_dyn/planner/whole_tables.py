"""Plans of static tables for dynamic ones: tables under data_parallel become table-wise."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import ShardingOption, Storage
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from torchrec_dyn.modules import UnshardedCollection
from torchrec_dyn.name_lists import listed
from torchrec_dyn.planner.measured import (
    checked_constraints,
    shares_of_ranks,
    without_processors,
)
from torchrec_dyn.planner.priced_planner import PricedPlanner, make_planner

_CALL = "without_data_parallel"


def without_data_parallel(
    plan: ShardingPlan,
    model: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    topology: Topology,
    batch_size: int = BATCH_SIZE,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    expected_rows: Mapping[str, int] | None = None,
    **options: Any,
) -> ShardingPlan:
    """Returns a plan whose dynamic tables are table-wise where they were `data_parallel`, which is an error.

    Use it for a plan that was made for static tables. TorchRec's partitioner chooses the rank of each such
    table: the table with the largest storage first, on the rank with the least work that has room for it. All
    other tables stay where they are; their work and storage count. Static tables stay `data_parallel`.

    The call is not collective: equal arguments give the same plan on every rank.

    Args:
        plan: a plan of the model. It is not changed.
        model: the unsharded model with the dynamic tables.
        sharders: the sharders of the model, as for DistributedModelParallel.
        topology: the devices.
        batch_size: samples per rank.
        constraints: constraints by table name. Their sharding types and compute kernels are not used: the
            plan has them.
        expected_rows: expected rows by table name, see DynamicStorageEstimator.
        **options: other arguments of `make_planner`.

    Raises:
        ValueError: if an argument is not valid, the plan has a table that the sharders do not shard, or the
            topology lacks a rank of the plan.
        PlannerError: TorchRec's, if no rank has room for a table.
    """
    if not isinstance(plan, ShardingPlan):
        raise ValueError(
            f"{_CALL}.plan: expected a ShardingPlan, got {plan!r}. Pass what a planner's plan or "
            "collective_plan returns, or ShardingPlan({path: {table: ...}})."
        )
    if not isinstance(topology, Topology):
        raise ValueError(
            f"{_CALL}.topology: expected a Topology, got {topology!r}. Pass the planner's topology."
        )
    given = checked_constraints(constraints, f"{_CALL}.constraints")
    pinned = _pinned(plan, model, sharders, topology.compute_device, given)
    planner = make_planner(topology, batch_size, pinned, expected_rows, **options)
    assert isinstance(planner, PricedPlanner)
    room = planner.reserved(model, list(sharders))
    to_place: list[ShardingOption] = []
    priced = _priced(plan, planner.enumerated(model, list(sharders)))
    for sharding, option in priced:
        if _is_copied(sharding) and _is_dynamic(option.module[1]):
            to_place.append(option)
        else:
            _add_load(room, sharding, option)
    placed = planner.placed(to_place, room).plan
    merged = {path: copy.copy(module_plan) for path, module_plan in plan.plan.items()}
    for path, module_plan in placed.items():
        _tables_of(merged[path]).update(_tables_of(module_plan))
    return ShardingPlan(merged)


def _pinned(
    plan: ShardingPlan,
    model: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    device_type: str,
    given: Mapping[str, ParameterConstraints],
) -> dict[str, ParameterConstraints]:
    """Returns constraints that leave each table the sharding type that it will have."""
    pinned: dict[str, ParameterConstraints] = {}
    for module, sharder, tables in _sharded_by(plan, model, sharders):
        for name, sharding in tables.items():
            kind = sharding.sharding_type
            if _is_copied(sharding) and _is_dynamic(module):
                kind = ShardingType.TABLE_WISE.value
            # Constraints go by the name of a table. Static tables of two modules may have one name.
            before = pinned[name].sharding_types if name in pinned else []
            is_known = kind in sharder.sharding_types(device_type) and before is not None
            pinned[name] = replace(
                given.get(name) or ParameterConstraints(),
                sharding_types=[*before, kind] if is_known else None,
                **_place_of(sharding, module, sharder.compute_kernels(kind, device_type)),
            )
    return pinned


def _place_of(
    sharding: ParameterSharding, module: nn.Module, kernels: Sequence[str]
) -> dict[str, Any]:
    """Returns the constraints by which a dynamic table is priced in the memory that its plan says."""
    if not _is_dynamic(module) or sharding.compute_kernel not in kernels:
        return {"compute_kernels": None}
    return {
        "compute_kernels": [sharding.compute_kernel],
        "cache_params": sharding.cache_params,
    }


def _sharded_by(
    plan: ShardingPlan, model: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
) -> Iterator[tuple[nn.Module, ModuleSharder[nn.Module], Mapping[str, ParameterSharding]]]:
    """Yields each module of a plan with its sharder and its tables; ValueError if it has none of these."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    modules = dict(model.named_modules())
    remedy = "Pass the unsharded model of the plan, and the sharders of all its tables."
    for path, module_plan in plan.plan.items():
        if not (tables := _tables_of(module_plan)):
            continue
        if (module := modules.get(path)) is None:
            raise ValueError(
                f"{_CALL}.plan: expected paths of modules of {type(model).__name__}, got {path!r}. {remedy}"
            )
        sharder = by_type.get(type(module))
        names = [] if sharder is None else list(sharder.shardable_parameters(module))
        if wrong := sorted(tables.keys() - set(names)):
            raise ValueError(
                f"{_CALL}.plan: expected tables of module '{path}' that the sharders shard, {listed(names)}, "
                f"got {listed(wrong)}. {remedy}"
            )
        assert sharder is not None
        yield module, sharder, tables


def _priced(
    plan: ShardingPlan, options: Sequence[ShardingOption]
) -> Iterator[tuple[ParameterSharding, ShardingOption]]:
    """Yields each table of a plan with the option that prices it: of its type and kernel, if there is one."""
    by_table: dict[tuple[str, str], list[ShardingOption]] = {}
    for option in options:
        by_table.setdefault((option.path, option.name), []).append(option)
    for path, module_plan in plan.plan.items():
        for name, sharding in _tables_of(module_plan).items():
            kind, kernel = sharding.sharding_type, sharding.compute_kernel
            fits = [
                (o.sharding_type == kind, o.compute_kernel == kernel) for o in by_table[path, name]
            ]
            yield sharding, by_table[path, name][fits.index(max(fits))]


def _add_load(room: Topology, sharding: ParameterSharding, option: ShardingOption) -> None:
    """Adds the work of a table to the devices that have its shards, and takes its storage from them."""
    ranks = len(room.devices)
    shares = [(rank, 1 / ranks) for rank in range(ranks)]  # the option has a shard for each copy
    if not _is_copied(sharding):
        shares = shares_of_ranks(sharding)
    for rank, share in shares:
        if not 0 <= rank < ranks:
            raise ValueError(
                f"{_CALL}.topology: expected more than {rank} ranks, since rank {rank} has a shard of "
                f"'{option.name}', got {ranks}. Pass the topology that the plan was made for."
            )
        for shard in option.shards:
            room.devices[rank].perf += _part(shard.perf, share)
            room.devices[rank].storage -= _part(shard.storage, share)


def _part(whole: Any, share: float) -> Any:
    """Returns a share of TorchRec's Perf (milliseconds) or Storage (bytes)."""
    round_up = math.ceil if isinstance(whole, Storage) else float
    parts = {field.name: round_up(getattr(whole, field.name) * share) for field in fields(whole)}
    return replace(whole, **parts)


def _tables_of(module_plan: Any) -> dict[str, ParameterSharding]:
    """Returns the tables in the plan of a module; plans of other modules have none."""
    return module_plan if isinstance(module_plan, dict) else {}


def _is_copied(sharding: ParameterSharding) -> bool:
    return sharding.sharding_type == ShardingType.DATA_PARALLEL.value


def _is_dynamic(module: nn.Module) -> bool:
    return isinstance(without_processors(module), UnshardedCollection)
