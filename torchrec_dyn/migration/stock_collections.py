"""Turns the stock collections of an existing model into dynamic ones, in place."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    UnshardedTable,
)

_logger = logging.getLogger(__name__)

_Stock = EmbeddingBagCollection | EmbeddingCollection
_Dynamic = DynamicEmbeddingBagCollection | DynamicEmbeddingCollection


def make_dynamic(
    model: nn.Module,
    tables: Sequence[str] | None = None,
    dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None = None,
) -> nn.Module:
    """Replaces each EmbeddingBagCollection and EmbeddingCollection of a model by a dynamic one.

    Call it before sharding. Tables keep their configs, and the optimizers that
    `apply_optimizer_in_backward` set. Rows are not carried over: a static table numbers its rows 0
    to num_embeddings - 1, which says nothing of raw ids. Where they do mean the same, copy them
    with `collection.table(name).assign(ids, rows)`.

    Args:
        model: changed in place.
        tables: the tables to make dynamic; None: all. A collection is converted as a whole.
        dynamic: how rows start and live; one for all tables or a dict by table name.

    Returns:
        the model; a new collection where the model itself is a stock collection.

    Raises:
        ValueError: if a table cannot become dynamic, is unknown, or shares its collection with one
            that was not named. The model is as it was then.
    """
    stock = {
        path: one
        for path, one in model.named_modules()
        if type(one) in (EmbeddingBagCollection, EmbeddingCollection)
    }
    names = {path: [config.name for config in _configs(one)] for path, one in stock.items()}
    known = {name for group in names.values() for name in group}
    _check_names(known, tables, dynamic)
    made: dict[int, _Dynamic] = {}
    for path, one in stock.items():
        chosen = [name for name in names[path] if tables is None or name in tables]
        if chosen and len(chosen) < len(names[path]):
            raise ValueError(
                f"make_dynamic: expected all tables {names[path]} of collection '{path}' or none "
                "of them, "
                f"got {chosen}. Move the others to a collection of their own."
            )
        if chosen:
            mine = (
                {name: dynamic[name] for name in chosen if name in dynamic}
                if isinstance(dynamic, Mapping)
                else dynamic
            )
            made[id(one)] = _counterpart(one, mine)
    if not made:
        raise ValueError(
            "make_dynamic: expected a model with an EmbeddingBagCollection or EmbeddingCollection, "
            "got none."
        )
    for path, one in stock.items():
        if id(one) in made and one.device.type != "meta":
            _logger.info("make_dynamic: rows of collection '%s' are not carried over", path)
    if id(model) in made:
        return made[id(model)]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in made:
                setattr(parent, name, made[id(child)])
    return model


def _configs(collection: Any) -> Sequence[Any]:
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def _check_names(known: set[str], tables: Sequence[str] | None, dynamic: object) -> None:
    unknown = sorted(set(tables or ()) - known)
    if isinstance(tables, str) or unknown:
        raise ValueError(
            f"make_dynamic.tables: expected names among {sorted(known)}, got {tables!r}."
        )
    unknown = sorted(set(dynamic) - known) if isinstance(dynamic, Mapping) else []
    if unknown:
        raise ValueError(
            f"make_dynamic.dynamic: expected names among {sorted(known)}, got {unknown}."
        )


def _counterpart(
    stock: Any, dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None
) -> _Dynamic:
    made: _Dynamic
    if isinstance(stock, EmbeddingBagCollection):
        made = DynamicEmbeddingBagCollection(
            stock.embedding_bag_configs(), stock.is_weighted(), stock.device, dynamic
        )
        pairs = [(made.embedding_bags[name], old) for name, old in stock.embedding_bags.items()]
    else:
        made = DynamicEmbeddingCollection(
            stock.embedding_configs(), stock.device, stock.need_indices(), dynamic
        )
        pairs = [(made.embeddings[name], old) for name, old in stock.embeddings.items()]
    for table, old in pairs:
        assert isinstance(table, UnshardedTable)
        weight: Any = old.weight
        table.weight.requires_grad_(weight.requires_grad)
        if hasattr(weight, "_optimizer_classes"):
            table.mark_optimizer(weight._optimizer_classes, weight._optimizer_kwargs)
    return made.train(stock.training)
