"""Configs: properties of a saved table, as JSON in a tensor, so that tools copy them with other tensors."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchrec_dyn.checkpoint_format.content_sums import DAMAGED, sum_of_small
from torchrec_dyn.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform
from torchrec_dyn.optimizers import RowOptimizer

FORMAT = 2
RENAMED = (
    "The table was renamed: give it its saved name, on which its initial rows depend, or load it with "
    "rename={saved: new}."
)
_OPTIONS = ("pooling", "policies")  # those of DynamicTableConfig.saved
INITIALIZERS = {kind.__name__: kind for kind in (Uniform, Normal, TruncatedNormal, Constant)}


def table_config(
    table: str,
    embedding_dim: int,
    seed: int,
    dtype: torch.dtype,
    initializer: Initializer,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the config of a table, which describes its rows; `options` are `DynamicTableConfig.saved`."""
    fields = dataclasses.asdict(initializer)
    config = {
        "format": FORMAT,
        "table": table,
        "embedding_dim": embedding_dim,
        "seed": seed,
        "rows": str(dtype).removeprefix("torch."),
        "initializer": {"name": type(initializer).__name__, **fields},
    }
    return {**config, **(options or {})}


def own_policies_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of a table's own policies by "admission" and "eviction", as its config has them."""
    return dict(config.get("policies", {}))


def with_options_of(config: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with what another one says of options, which two models may choose by themselves."""
    kept = {name: value for name, value in config.items() if name not in _OPTIONS}
    return {**kept, **{name: saved[name] for name in _OPTIONS if name in saved}}


def warn_of_options(where: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Warns if a table was trained with another pooling, or a policy of the user's that it lacks now."""
    if saved.get("pooling") != own.get("pooling"):
        warnings.warn(
            f"{where}: expected pooling={saved.get('pooling')!r} as in the checkpoint, got "
            f"{own.get('pooling')!r}. The rows are those of the checkpoint.",
            UserWarning,
            stacklevel=2,
        )
    present = own_policies_of(own)
    for kind, name in own_policies_of(saved).items():
        if present.get(kind) != name:
            warnings.warn(
                f"{where}: expected the {kind} policy of the checkpoint, {name}, got "
                f"{present.get(kind, 'none of your own')}. The table goes on by its present policies, from "
                "the saved counts.",
                UserWarning,
                stacklevel=2,
            )


def optimizer_config(optimizer: RowOptimizer, cuts: list[int]) -> dict[str, Any]:
    """Returns the config of the optimizer state of a table; the cuts are saved if some state is row-wise."""
    config = {"format": FORMAT, "optimizer": optimizer.saved_name}
    return {**config, "cuts": cuts} if any(optimizer.state_is_rowwise) else config


def to_bytes(config: dict[str, Any]) -> Tensor:
    """Returns a config as a tensor, [n] uint8."""
    text = json.dumps(config, sort_keys=True).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def from_bytes(where: str, saved: Tensor) -> dict[str, Any]:
    """Returns the config in a tensor, saved [n] uint8."""
    try:
        config = json.loads(bytes(saved.tolist()))
        number = config["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(
            f"{where}: expected a saved config in JSON, got {bytes(saved.tolist()[:60])!r}. "
            "The checkpoint is damaged; use another checkpoint."
        ) from None
    if number != FORMAT:
        raise ValueError(
            f"{where}: expected a checkpoint of format {FORMAT}, got {number!r}. "
            "Read it with the version of torchrec_dyn that wrote it."
        )
    return config


def check_config_is_whole(
    where: str, table: str, saved: Mapping[str, Tensor], sums: Mapping[str, int]
) -> None:
    """Raises ValueError if a config is damaged, or of a table with another name, on which all sums depend."""
    for name in {"config", "optimizer_config"} & saved.keys():
        if sums[name] == sum_of_small(table, name, saved[name]):
            continue
        its = table
        with suppress(ValueError):
            its = str(from_bytes(where, saved[name]).get("table", table))
        if sums[name] == sum_of_small(its, name, saved[name]):
            raise ValueError(
                f"{where}: expected a checkpoint with table {table!r} as the model has, got {its!r}. "
                f"{RENAMED}"
            )
        hint = "If the table was renamed, give it its saved name, or load it with rename. If it was not: "
        raise ValueError(
            f"{where}: expected {name} of table {table!r}, got one without its content sum. "
            f"{'' if name == 'config' else hint}{DAMAGED}"
        )


def saved_initializer(where: str, config: dict[str, Any]) -> Initializer:
    """Returns the initializer of a table's config."""
    initializer = named_initializer(config.get("initializer", {}))
    if initializer is None:
        raise ValueError(
            f"{where}: expected a saved initializer among {', '.join(INITIALIZERS)}, got "
            f"{config.get('initializer')}. Read it with the version of torchrec_dyn that wrote it."
        )
    return initializer


def named_initializer(saved: Mapping[str, Any]) -> Initializer | None:
    """Returns the initializer of a saved "name" and its numbers; None if this version lacks it."""
    try:
        fields = dict(saved)
        return INITIALIZERS[fields.pop("name")](**fields)
    except (KeyError, TypeError, ValueError):
        return None


def check_config(where: str, saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Raises ValueError for another name, width or seed; dtype and initializer may differ."""
    for field, remedy in (
        ("table", RENAMED),
        ("embedding_dim", "Use the embedding_dim of the checkpoint."),
        ("seed", "Set DynamicTableConfig(seed=...) to the seed of the checkpoint."),
    ):
        if saved.get(field) != own[field]:
            raise ValueError(
                f"{where}: expected a checkpoint with {field} {own[field]!r} as the model has, got "
                f"{saved.get(field)!r}. {remedy}"
            )


def check_optimizer(where: str, saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Raises ValueError if the optimizer state was saved for another optimizer."""
    if saved.get("optimizer") != own["optimizer"]:
        raise ValueError(
            f"{where}: expected optimizer state of {own['optimizer']} as the model has, got that of "
            f"{saved.get('optimizer')}. Choose that optimizer, or load the model's state dict only."
        )


def mean_over_cuts(state: Tensor, cuts: Sequence[int], columns: tuple[int, int]) -> Tensor:
    """Returns the mean of row-wise state [M, C] over columns [begin, end), weighted by widths, [M, 1].

    `cuts` are the first columns of the C shards and the end of the last. Exact for row-wise Adagrad, whose
    number is itself a mean, from column shards to whole rows.
    """
    begin, end = columns
    total = None
    for number, (first, last) in enumerate(pairwise(cuts)):
        width = min(last, end) - max(first, begin)
        if width == end - begin:
            return state[:, number : number + 1]  # the saved number, to the last bit
        if width > 0:
            part = state[:, number : number + 1].double() * (width / (end - begin))
            total = part if total is None else total + part
    assert total is not None
    return total.to(state.dtype)
