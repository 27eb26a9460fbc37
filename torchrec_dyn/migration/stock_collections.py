"""Replaces the stock collections of an existing model with dynamic collections, in place."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    UnshardedCollection,
    check_unprocessed,
)
from torchrec_dyn.name_lists import listed

_logger = logging.getLogger(__name__)

STOCK = (EmbeddingBagCollection, EmbeddingCollection)

_Names: TypeAlias = Sequence[str] | None
_Options: TypeAlias = DynamicTableConfig | Mapping[str, DynamicTableConfig] | None


def make_dynamic(model: nn.Module, tables: _Names = None, dynamic: _Options = None) -> Any:
    """Replaces each EmbeddingBagCollection and EmbeddingCollection of a model with a dynamic collection.

    Call it before sharding. Tables keep their configs, and the optimizers that
    `apply_optimizer_in_backward` set. Rows are not copied: a static table numbers its rows from 0 to
    num_embeddings - 1, and these numbers are not raw ids. If the row numbers are the ids, copy the rows
    with `collection.table(name).assign(ids, rows)`.

    Args:
        model: the model; changed in place.
        tables: names of the tables to convert; None: all tables. A collection is converted as a whole.
        dynamic: options of the tables, one DynamicTableConfig for all tables or a dict by table name.

    Returns:
        The model; a new collection if the model itself is a stock collection.

    Raises:
        ValueError: if a table cannot become dynamic, is unknown, is in a managed collision module, is in
            a collection with a table that `tables` does not contain, or gets LowestScore in a
            feature-processed module. The model has not changed then.
    """
    stock = {path: module for path, module in model.named_modules() if type(module) in STOCK}
    if not stock:
        _raise_without_stock(model)
    chosen = _chosen_names(stock, tables, dynamic)
    _check_not_managed(model, {id(stock[path]): names for path, names in chosen.items()})
    converted: dict[str, UnshardedCollection] = {}
    for path, names in chosen.items():
        options = dynamic
        if isinstance(dynamic, Mapping):
            options = {name: dynamic[name] for name in names if name in dynamic}
        converted[path] = _converted(stock[path], options)
    for path in _processed(model, stock) & converted.keys():
        check_unprocessed(converted[path].dynamic_configs(), f"make_dynamic('{path}')")
    for path in converted:
        if _device_of(stock[path]).type != "meta":
            _logger.info("make_dynamic: rows of collection '%s' are not carried over", path)
    by_id = {id(stock[path]): collection for path, collection in converted.items()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in by_id:
                setattr(parent, name, by_id[id(child)])
    return by_id.get(id(model), model)


def _chosen_names(
    stock: Mapping[str, Any], tables: _Names, dynamic: _Options
) -> dict[str, list[str]]:
    """Returns by path the names of the tables of the chosen collections."""
    by_path = {path: [config.name for config in configs_of(stock[path])] for path in stock}
    _check_names({name for names in by_path.values() for name in names}, tables, dynamic)
    if tables is None:
        return by_path
    for path, names in by_path.items():
        chosen = [name for name in names if name in tables]
        if 0 < len(chosen) < len(names):
            raise ValueError(
                f"make_dynamic: expected all tables {listed(names)} of collection '{path}' or none of them, "
                f"got {listed(chosen)}. Move the other tables to a separate collection."
            )
    return {path: names for path, names in by_path.items() if names[0] in tables}


def _check_not_managed(model: nn.Module, names: Mapping[int, Sequence[str]]) -> None:
    """Raises ValueError if a managed collision module has a collection of these, by id."""
    for path, module in model.named_modules():
        is_managed = isinstance(module, BaseManagedCollisionEmbeddingCollection)
        if is_managed and id(module._embedding_module) in names:
            raise ValueError(
                "make_dynamic: expected collections that receive raw ids, got tables "
                f"{listed(names[id(module._embedding_module)])} in the {type(module).__name__} '{path}', "
                "which remaps ids to row numbers first. Replace that whole module by a dynamic collection, "
                "or name only the other tables in `tables`."
            )


def _processed(model: nn.Module, collections: Mapping[str, Any]) -> set[str]:
    """Returns the paths of the collections that are in a feature-processed module."""
    inner = {
        id(module._embedding_bag_collection)
        for module in model.modules()
        if isinstance(module, FeatureProcessedEmbeddingBagCollection)
    }
    return {path for path, collection in collections.items() if id(collection) in inner}


def _raise_without_stock(model: nn.Module) -> NoReturn:
    names = [
        name
        for module in model.modules()
        if isinstance(module, UnshardedCollection)
        for name in module.dynamic_configs()
    ]
    got = f"one whose tables {listed(names)} are dynamic already. Call it once" if names else "none"
    raise ValueError(
        "make_dynamic: expected a model with an EmbeddingBagCollection or EmbeddingCollection, "
        f"got {got}."
    )


def configs_of(collection: Any) -> Sequence[Any]:
    """Returns the table configs of a stock collection, in order."""
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def tables_by_name(collection: Any) -> dict[str, Any]:
    """Returns the table modules of an unsharded collection by name. Each module has a `weight`."""
    is_pooled = hasattr(collection, "embedding_bags")
    return dict((collection.embedding_bags if is_pooled else collection.embeddings).items())


def _device_of(collection: Any) -> torch.device:
    """Returns the device of the rows; `collection.device` stays that of the construction when they move."""
    device: torch.device = next(iter(tables_by_name(collection).values())).weight.device
    return device


def empty_counterpart(
    stock: Any,
    configs: Sequence[Any],
    device: torch.device | str | None,
    dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None,
    fused_params: Mapping[str, Any] | None = None,
) -> DynamicEmbeddingBagCollection | DynamicEmbeddingCollection:
    """Returns a dynamic collection of the same kind as `stock`, with these table configs and without rows."""
    if isinstance(stock, EmbeddingBagCollection):
        return DynamicEmbeddingBagCollection(
            list(configs), stock.is_weighted(), device, dynamic, fused_params
        )
    return DynamicEmbeddingCollection(
        list(configs), device, stock.need_indices(), dynamic, fused_params
    )


def _check_names(known: set[str], tables: _Names, dynamic: object) -> None:
    """Raises ValueError if `tables` or `dynamic` names other tables; `tables` may be all, but not none."""
    given = {"tables": tables, "dynamic": list(dynamic) if isinstance(dynamic, Mapping) else None}
    for argument, names in given.items():
        is_list = not isinstance(names, str) and (bool(names) or argument == "dynamic")
        if names is not None and not (is_list and known.issuperset(names)):
            raise ValueError(
                f"make_dynamic.{argument}: expected names among {listed(sorted(known))}, or None for all, "
                f"got {names!r}."
            )


def _converted(
    stock: Any, dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None
) -> UnshardedCollection:
    stock_tables = tables_by_name(stock)
    collection = empty_counterpart(stock, configs_of(stock), _device_of(stock), dynamic)
    for table in collection.unsharded_lookup.tables:
        table.copy_marks(stock_tables[table.config.name].weight)
    return collection.train(stock.training)
