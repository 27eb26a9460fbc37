"""Checks the options of a collection's tables, once, when the collection is created.

The collections use their own copies of the configs, so a later change of the caller's object has no effect.
An option of a collection is one value for all tables, or a value for each table by name.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import torch
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
    dtype_to_data_type,
    pooling_type_to_str,
)
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.initializers import Initializer, Uniform, default_initializer, for_dimension
from torchrec_dyn.name_lists import listed

Config = TypeVar("Config", EmbeddingBagConfig, EmbeddingConfig)

# TorchRec's planner cuts rows in float64, and a placeholder parameter has fewer than 2^63 bytes.
_MOST_ROWS, _MOST_NUMBERS = 2**53, 2**61 - 1

_ROW_TYPES = (DataType.FP32, DataType.FP16, DataType.BF16)

# Tables are children of a ModuleDict, as in TorchRec, so its own attributes cannot be table names.
_TAKEN_NAMES = torch.nn.ModuleDict()

# Options of a fixed or virtual table that have no meaning for a dynamic table: the value of one that is not
# used, and what to do.
_UNUSED_OPTIONS = {
    "use_virtual_table": (False, "Leave it False: a row is made when its id is first seen."),
    "virtual_table_eviction_policy": (None, "Use DynamicTableConfig(eviction=...)."),
    "total_num_buckets": (None, "Leave it None: ids are routed without buckets."),
    "num_embeddings_post_pruning": (None, "Leave it None: rows have no numbers to prune by."),
    "enable_embedding_update": (False, "Use collection.table(name).assign(ids, rows)."),
    "stash_weights": (False, "Leave it False: dynamic tables cannot be stashed."),
}


def checked_configs(
    tables: Sequence[Config],
    config_type: type[Config],
    where: str,
    dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None,
) -> list[Config]:
    """Checks the configs of one collection and returns copies; a table without features has its name's."""
    if isinstance(tables, BaseEmbeddingConfig):
        raise ValueError(
            f"{where}: expected a list of tables, got the config of table {tables.name!r}. Write [config]."
        )
    if len(tables) == 0:
        raise ValueError(f"{where}: expected at least one table, got none.")
    for config in tables:
        if not isinstance(config, config_type):
            raise ValueError(
                f"{where}: expected tables of type {config_type.__name__}, got "
                f"{type(config).__name__}."
            )
        _check_name(config, where)
        table = f"{where}(table='{config.name}')"
        _check_config(config, table)
        _check_features(config, table)
        _check_options(config, dynamic, table)
    _check_once((config.name for config in tables), "a table name once", where)
    widths = {config.name: config.embedding_dim for config in tables}
    if config_type is EmbeddingConfig and len(set(widths.values())) > 1:
        raise ValueError(f"{where}: expected one embedding_dim for all tables, got {widths}.")
    copies = [
        replace(
            config,
            feature_names=list(config.feature_names) or [config.name],
            init_fn=None if _has_own_init_fn(config) else config.init_fn,
        )
        for config in tables
    ]
    _check_once(
        chain.from_iterable(get_embedding_names_by_table(copies)),
        "an output name once",
        where,
        " The output of a feature of several tables is named feature@table: rename the feature of that name.",
    )
    return copies


def _check_once(names: Iterable[str], what: str, where: str, remedy: str = "") -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"{where}: expected {what}, got '{name}' {times} times.{remedy}")


def _check_name(config: BaseEmbeddingConfig, where: str) -> None:
    if not isinstance(config.name, str) or not config.name or "." in config.name:
        raise ValueError(
            f"{where}: expected a table name that is not empty and has no dot, got {config.name!r}."
        )
    if hasattr(_TAKEN_NAMES, config.name):
        raise ValueError(
            f"{where}: expected a table name that torch.nn.ModuleDict does not use itself, got "
            f"'{config.name}'."
        )


def _check_config(config: BaseEmbeddingConfig, where: str) -> None:
    for field in ("num_embeddings", "embedding_dim"):
        check_size(getattr(config, field), field, where)
    most = min(_MOST_ROWS, _MOST_NUMBERS // config.embedding_dim)
    if config.num_embeddings > most:
        raise ValueError(
            f"{where}: expected num_embeddings of at most {most} for embedding_dim="
            f"{config.embedding_dim}, got {config.num_embeddings}. Lower it: a rank holds at most 2^32 rows."
        )
    if config.data_type not in _ROW_TYPES:
        raise ValueError(f"{where}: expected data_type FP32, FP16 or BF16, got {config.data_type}.")
    for option, (unused, remedy) in _UNUSED_OPTIONS.items():
        if option == "enable_embedding_update" and isinstance(config, EmbeddingConfig):
            continue  # DistributedModelParallel.write assigns rows
        if getattr(config, option, unused) != unused:
            raise ValueError(
                f"{where}: expected {option}={unused}, got {getattr(config, option)!r}. {remedy}"
            )


def _check_features(config: BaseEmbeddingConfig, where: str) -> None:
    if isinstance(config.feature_names, str):
        raise ValueError(
            f"{where}: expected feature_names as a list, got {config.feature_names!r}. Write "
            f"[{config.feature_names!r}]."
        )
    _check_once(config.feature_names, "a feature once in a table", where)
    if isinstance(config, EmbeddingBagConfig) and config.pooling not in (
        PoolingType.SUM,
        PoolingType.MEAN,
    ):
        raise ValueError(f"{where}: expected pooling SUM or MEAN, got {config.pooling}.")


def check_unprocessed(options: Mapping[str, DynamicTableConfig], where: str) -> None:
    """Raises ValueError if a table in a feature-processed module scores ids by weights of a batch."""
    scored = [name for name, config in options.items() if config.scores_weights]
    if scored:
        raise ValueError(
            f"{where}: expected evictions that need no weights, since feature processors replace the weights "
            f"of a batch, got LowestScore of tables {listed(scored)}. Use LeastFrequentlyUsed, or the "
            "collection without processors."
        )


def check_size(value: int | None, name: str, where: str) -> None:
    """Checks a number of rows or columns."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{where}: expected {name} to be an integer above 0, got {value!r}.")


def check_id(value: int | None, name: str, where: str) -> None:
    """Checks an id in an argument of the user."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_integer and -(2**63) <= value < 2**63):
        raise ValueError(f"{where}: expected {name} to be an int64 or None, got {value!r}.")


def _check_options(config: BaseEmbeddingConfig, dynamic: object, where: str) -> None:
    options = dynamic.get(config.name) if isinstance(dynamic, Mapping) else dynamic
    if not isinstance(options, DynamicTableConfig):  # an error later
        options = DynamicTableConfig()
    if options.initializer is None:
        _check_initial_rows(config, where)
    if options.pooling is not None and getattr(config, "pooling", None) != PoolingType.SUM:
        got = getattr(config, "pooling", "none")
        raise ValueError(
            f"{where}: expected pooling={options.pooling!r} for a table of a pooled collection whose config "
            f"has pooling SUM, got {type(config).__name__} with pooling {got}. Leave one of the two out."
        )
    features = list(config.feature_names) or [config.name]
    for use in options.features:
        if use.feature not in features:
            raise ValueError(
                f"{where}: expected a FeatureUse of a feature of the table, {features}, got '{use.feature}'."
            )


def _has_own_init_fn(config: BaseEmbeddingConfig) -> bool:
    """Returns False if init_fn is the partial that the dataclass sets where the user sets no init_fn."""
    init_fn = config.init_fn
    bounds = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    return not (
        isinstance(init_fn, functools.partial)
        and init_fn.func is torch.nn.init.uniform_
        and not init_fn.args
        and init_fn.keywords == bounds
    )


def _check_initial_rows(config: BaseEmbeddingConfig, where: str) -> None:
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    if not low < high:
        raise ValueError(
            f"{where}: expected weight_init_min < weight_init_max, got {low} and {high}. "
            "For equal initial rows, set DynamicTableConfig(initializer=Constant(value))."
        )
    # A function that fills a whole weight tensor cannot create the row of one id.
    if _has_own_init_fn(config):
        raise ValueError(
            f"{where}: expected init_fn to be left unset, got {config.init_fn!r}. "
            "Set DynamicTableConfig(initializer=...), which replaces it, or weight_init_min and "
            "weight_init_max instead. dataclasses.replace keeps the init_fn that TorchRec made for the "
            "config before: add init_fn=None."
        )


def initializer_of(config: BaseEmbeddingConfig, dynamic: DynamicTableConfig) -> Initializer:
    """Returns the initializer: from the options, else from weight_init_min and _max, else the default."""
    if dynamic.initializer is not None:
        return for_dimension(dynamic.initializer, config.embedding_dim)
    if config.weight_init_min is None and config.weight_init_max is None:
        return default_initializer(config.num_embeddings)
    return Uniform(config.get_weight_init_min(), config.get_weight_init_max())


def pooled_outputs(
    configs: Sequence[BaseEmbeddingConfig],
) -> tuple[list[str], list[int], list[str]]:
    """Returns the names, the columns and the features of the outputs of pooled tables, in order."""
    features = [name for config in configs for name in config.feature_names]
    columns = [config.embedding_dim for config in configs for _ in config.feature_names]
    return [*chain(*get_embedding_names_by_table(list(configs)))], columns, features


def pooling_of(config: BaseEmbeddingConfig, dynamic: DynamicTableConfig) -> str:
    """Returns the pooling of a table: "sum", "mean" or "max", or "none" of a sequence collection."""
    pooling = getattr(config, "pooling", None)
    return dynamic.pooling or ("none" if pooling is None else pooling_type_to_str(pooling))


def check_unweighted(poolings: Sequence[str], is_weighted: bool, where: str) -> None:
    """Raises ValueError if bags have weights and a maximum."""
    if is_weighted and "max" in poolings:
        raise ValueError(
            f"{where}: expected is_weighted=False with pooling='max', as in torch.nn.EmbeddingBag, got True. "
            "Put these tables into a collection of their own."
        )


def row_dtype(config: BaseEmbeddingConfig) -> torch.dtype:
    """Returns the dtype of the table's rows."""
    return data_type_to_dtype(config.data_type)


def with_row_dtype(config: Config, dtype: torch.dtype) -> Config:
    """Returns a copy of the config with another row dtype."""
    return replace(config, data_type=dtype_to_data_type(dtype))


def dynamic_config_by_table(
    dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None,
    names: Sequence[str],
    where: str,
) -> dict[str, DynamicTableConfig]:
    """Returns the DynamicTableConfig of each table, from one for all or a mapping by name."""
    if dynamic is None or isinstance(dynamic, DynamicTableConfig):
        chosen = dict.fromkeys(names, dynamic or DynamicTableConfig())
    elif isinstance(dynamic, Mapping):
        unknown = sorted(set(dynamic) - set(names))
        if unknown:
            raise ValueError(f"{where}.dynamic: expected names among {list(names)}, got {unknown}.")
        chosen = {name: dynamic.get(name, DynamicTableConfig()) for name in names}
    else:
        chosen = dict.fromkeys(names, dynamic)
    for name, config in chosen.items():
        if not isinstance(config, DynamicTableConfig):
            raise ValueError(
                f"{where}.dynamic: expected a DynamicTableConfig or a dict of them by table name, "
                f"got {type(config).__name__} for table '{name}'."
            )
    return chosen


def number_by_table(
    given: int | Mapping[str, int], names: Sequence[str], most: Mapping[str, int], where: str
) -> dict[str, int]:
    """Returns an option for each table, from one integer for all or a mapping; `where` names the option."""
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise ValueError(
                f"{where}: expected a number for each of the tables {listed(names)}, got "
                f"{listed(sorted(given))}."
            )
        chosen = {name: given[name] for name in names}
    else:
        chosen = dict.fromkeys(names, given)
    for name, number in chosen.items():
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most[name]:
            raise ValueError(
                f"{where}: expected an integer in [1, {most[name]}] for table '{name}', got "
                f"{number!r}."
            )
    return chosen
