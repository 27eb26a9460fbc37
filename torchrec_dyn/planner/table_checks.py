"""Checks of a planner's arguments against the tables of the model, before TorchRec plans it.

TorchRec ignores names that no table has, and its error about constraints that leave nothing to choose does
not say what dynamic tables have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingType

from torchrec_dyn.modules import UnshardedCollection
from torchrec_dyn.name_lists import listed
from torchrec_dyn.planner.storage import without_processors


def check_tables(
    model: nn.Module,
    sharders: Iterable[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints],
    expected_rows: Iterable[str],
    device_type: str,
) -> None:
    """Checks what a planner was given against the tables that it will plan.

    The model is unsharded; `sharders` are those of its tables, static and dynamic. `expected_rows` are the
    names of the tables with an expected number of rows, and `device_type` is "cpu" or "cuda".

    Raises:
        ValueError: if constraints allow nothing that a dynamic table has, or no table has the name of an
            expected number of rows.
    """
    by_type = {sharder.module_type: sharder for sharder in sharders}
    names: set[str] = set()
    for module in model.modules():
        sharder = by_type.get(type(module))
        if sharder is None:
            continue
        tables = list(sharder.shardable_parameters(module))
        names.update(tables)
        if isinstance(without_processors(module), UnshardedCollection):
            kinds = sharder.sharding_types(device_type)
            kernels = sharder.compute_kernels(kinds[0], device_type)
            for name in tables:
                _check_choice(constraints.get(name), name, kinds, kernels)
    unknown = sorted(set(expected_rows) - names)
    if unknown:
        raise ValueError(
            f"make_planner.expected_rows: expected names of tables that the sharders shard, "
            f"{listed(sorted(names))}, got {listed(unknown)}. Correct the names, or leave them out."
        )


def _check_choice(given: Any, name: str, kinds: Sequence[str], kernels: Sequence[str]) -> None:
    where = f"make_planner.constraints['{name}']"
    if given is None:
        return
    if given.sharding_types and not set(given.sharding_types) & set(kinds):
        copies = ShardingType.DATA_PARALLEL.value in given.sharding_types
        reason = " Under data_parallel every rank would have all rows." if copies else ""
        raise ValueError(
            f"{where}: expected sharding_types with one of {', '.join(kinds)}, got "
            f"{given.sharding_types}.{reason} Choose one of those, or a static table."
        )
    if given.compute_kernels and not set(given.compute_kernels) & set(kernels):
        raise ValueError(
            f"{where}: expected compute_kernels with {', '.join(map(repr, kernels))}, got "
            f"{given.compute_kernels}. Leave compute_kernels out, or choose a static table."
        )
