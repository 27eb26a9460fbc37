"""Checks of what the planner's functions get: numbers, constraints, and the tables of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_dyn.modules import UnshardedCollection
from torchrec_dyn.name_lists import listed


def checked_count(value: object, where: str, least: int, remedy: str) -> int:
    """Returns a number of rows, ids, ranks or samples as an integer of Python."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}: expected an integer, {least} or more, got {value!r}. {remedy}")
    return int(value)


def check_number(value: object, where: str, least: float, remedy: str) -> None:
    """Checks a number that need not be whole."""
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not least <= number < math.inf:
        raise ValueError(
            f"{where}: expected a finite number, {least} or more, got {value!r}. {remedy}"
        )


def checked_constraints(
    given: Mapping[str, ParameterConstraints] | None, where: str
) -> dict[str, ParameterConstraints]:
    """Returns a copy of the constraints by table name; without constraints an empty dict."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{where}: expected a dict of ParameterConstraints by table name, got {given!r}. Write "
            "{name: ParameterConstraints(...)}."
        )
    for name, constraints in given.items():
        if constraints is None:  # no constraints, as in TorchRec
            continue
        if not isinstance(constraints, ParameterConstraints):
            raise ValueError(
                f"{where}['{name}']: expected ParameterConstraints, got {constraints!r}. Write "
                "ParameterConstraints(sharding_types=[...])."
            )
        for field in ("sharding_types", "compute_kernels"):
            choices = getattr(constraints, field)
            if isinstance(choices, str):
                raise ValueError(
                    f"{where}['{name}'].{field}: expected a list, got {choices!r}. Write [{choices!r}]."
                )
    return dict(given)


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


def without_processors(module: nn.Module) -> nn.Module:
    """Returns the collection in a feature-processed module; another module as it is."""
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        return module._embedding_bag_collection
    return module
