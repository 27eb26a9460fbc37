"""Replaces the stock collections of a model with dynamic collections, and converts trained ones.

In a conversion id i gets row i, with its optimizer state.

Legend: N rows, D columns of a table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.migration.static_rows import (
    ReadRows,
    StaticRows,
    check_kind,
    row_rule,
    saved_moments,
    trainer_of,
)
from torchrec_dyn.modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    UnshardedCollection,
    UnshardedTable,
    check_unprocessed,
    checked_configs,
    with_row_dtype,
)
from torchrec_dyn.name_lists import listed
from torchrec_dyn.table import ROW_DTYPES

_logger = logging.getLogger(__name__)

_STOCK = (EmbeddingBagCollection, EmbeddingCollection)

_Names: TypeAlias = Sequence[str] | None
_Options: TypeAlias = DynamicTableConfig | Mapping[str, DynamicTableConfig] | None


def make_dynamic(model: nn.Module, tables: _Names = None, dynamic: _Options = None) -> Any:
    """Replaces each EmbeddingBagCollection and EmbeddingCollection of a model with a dynamic collection.

    Call it before sharding. Tables keep their configs and the optimizers that `apply_optimizer_in_backward`
    set. Rows are not copied: a static table numbers its rows from 0 to num_embeddings - 1, and these numbers
    are not raw ids. If the row numbers are the ids, copy the rows with
    `collection.table(name).assign(ids, rows)`.

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
    stock = {path: module for path, module in model.named_modules() if type(module) in _STOCK}
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
    return _replaced(model, {id(stock[path]): converted[path] for path in converted})


def _replaced(model: nn.Module, converted: Mapping[int, UnshardedCollection]) -> nn.Module:
    """Puts the converted collections, by id of the stock collection, in place; returns the model."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in converted:
                setattr(parent, name, converted[id(child)])
    return converted.get(id(model), model)


def _chosen_names(
    stock: Mapping[str, Any], tables: _Names, dynamic: _Options
) -> dict[str, list[str]]:
    """Returns by path the names of the tables of the chosen collections."""
    by_path = {path: [config.name for config in _configs_of(stock[path])] for path in stock}
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


def _converted(stock: Any, dynamic: _Options) -> UnshardedCollection:
    stock_tables = _tables_by_name(stock)
    collection = _empty_counterpart(stock, _configs_of(stock), _device_of(stock), dynamic)
    for table in collection.unsharded_lookup.tables:
        table.copy_marks(stock_tables[table.config.name].weight)
    return collection.train(stock.training)


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


def _configs_of(collection: Any) -> Sequence[Any]:
    """Returns the table configs of a stock collection, in order."""
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def _tables_by_name(collection: Any) -> dict[str, Any]:
    """Returns the table modules of an unsharded collection by name. Each module has a `weight`."""
    is_pooled = hasattr(collection, "embedding_bags")
    return dict((collection.embedding_bags if is_pooled else collection.embeddings).items())


def _device_of(collection: Any) -> torch.device:
    """Returns the device of the rows; `collection.device` stays that of the construction when they move."""
    device: torch.device = next(iter(_tables_by_name(collection).values())).weight.device
    return device


def _empty_counterpart(
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


def from_static(
    collection: EmbeddingBagCollection | EmbeddingCollection,
    optimizer: torch.optim.Optimizer | None = None,
    dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None = None,
    fused_params: Mapping[str, Any] | None = None,
    num_embeddings: int | Mapping[str, int] | None = None,
) -> Any:
    """Returns a dynamic collection with the rows of a trained static collection: id i gets row i.

    The rows are equal bit for bit and keep the present dtype of the weights. Further training uses the
    rule, the state and the present learning rate of the optimizer that trained the rows: the optimizer
    that `apply_optimizer_in_backward` set on a parameter, else `optimizer`. As always in TorchRec, a step
    updates only the rows of its batch, whereas torch's Adam updates all rows at every step. Rows added later
    start with the optimizer state of a new row, such as `initial_accumulator_value`.

    Args:
        collection: an unsharded collection on the CPU or a GPU, where the new rows will be too; it is not
            changed.
        optimizer: the optimizer that trained the collection: plain, or TorchRec's keyed, wrapped or combined
            optimizer; None: fresh optimizer state, except for rows trained by an optimizer in backward.
        dynamic: options of the tables, one DynamicTableConfig for all tables or a dict by table name.
        fused_params: as in the dynamic collections. If it has an "optimizer", it is the complete rule for
            further training; its kind must be the kind of the saved state.
        num_embeddings: new limits, one number for all tables or a dict by table name, at least N; None: N
            for each table. Such a table is full, so new ids are errors unless a policy evicts when a table
            is full.

    Raises:
        ValueError: if a table or its optimizer has no dynamic counterpart.
    """
    where = "from_static"
    if type(collection) not in _STOCK:
        raise ValueError(
            f"{where}: expected an unsharded EmbeddingBagCollection or EmbeddingCollection, got "
            f"{type(collection).__name__}. Pass the collection itself; of a sharded one load a checkpoint."
        )
    weights: dict[str, Tensor] = {
        name: table.weight for name, table in _tables_by_name(collection).items()
    }
    device = next(iter(weights.values())).device
    limits = _checked_limits(collection, num_embeddings)
    for config in _configs_of(collection):
        _check_weight(weights[config.name], config, device, f"{where}(table='{config.name}')")
    kind = EmbeddingBagConfig if isinstance(collection, EmbeddingBagCollection) else EmbeddingConfig
    configs = [
        _config(config, limits[config.name], weights[config.name].dtype)
        for config in checked_configs(_configs_of(collection), kind, where, dynamic)
    ]
    converted = _empty_counterpart(collection, configs, device, dynamic, fused_params)
    tables: dict[str, UnshardedTable] = _tables_by_name(converted)
    whole_rule = "optimizer" in (fused_params or {})
    filled: list[tuple[UnshardedTable, StaticRows]] = []
    for name, weight in weights.items():
        tables[name].weight.requires_grad_(weight.requires_grad)
        states, step = _moments_of(tables[name], weight, optimizer, whole_rule)
        shard = tables[name].rows()
        readers = {
            one: _reader(rows.detach()) for one, rows in {"weight": weight, **states}.items()
        }
        rows = StaticRows(
            shard.where, name, weight.shape, weight.dtype, readers, shard.optimizer, step
        )
        filled.append((tables[name], rows))
    for table, rows in filled:  # rows are copied only after all checks
        rows.fill(table.as_table(), [table.rows()])
    return converted.train(collection.training)


def _checked_limits(collection: Any, wished: int | Mapping[str, int] | None) -> dict[str, int]:
    limits = {config.name: config.num_embeddings for config in _configs_of(collection)}
    if wished is None:
        return limits
    by_name = wished if isinstance(wished, Mapping) else dict.fromkeys(limits, wished)
    for name, limit in by_name.items():
        if name not in limits:
            raise ValueError(
                f"from_static.num_embeddings: expected names among {list(limits)}, got {name!r}."
            )
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < limits[name]:
            raise ValueError(
                f"from_static.num_embeddings: expected at least the {limits[name]} rows of table "
                f"'{name}', got {limit!r}."
            )
        limits[name] = limit
    return limits


def _check_weight(weight: Tensor, config: Any, device: torch.device, where: str) -> None:
    shape = (config.num_embeddings, config.embedding_dim)
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"{where}: expected a weight {list(shape)} as its config says, got {list(weight.shape)}."
        )
    if weight.is_meta or weight.device != device:
        raise ValueError(
            f"{where}: expected the rows of all tables on one real device, got {weight.device}. Move the "
            "collection with .to(device)."
        )
    if weight.dtype not in ROW_DTYPES:
        raise ValueError(
            f"{where}: expected rows of float32, float16 or bfloat16, got {weight.dtype}. "
            "Convert the collection with .float()."
        )


def _config(config: Any, limit: int, dtype: torch.dtype) -> Any:
    """Returns a checked config with another limit, and with the dtype that the weight has now."""
    if limit != config.num_embeddings:
        # The init_fn of a checked config is derived from its limit.
        config = replace(config, num_embeddings=limit, init_fn=None)
    # The weights may have been converted after their creation, and TorchRec creates a BF16 table as float16.
    return with_row_dtype(config, dtype)


def _moments_of(
    table: UnshardedTable,
    weight: Tensor,
    optimizer: torch.optim.Optimizer | None,
    whole_rule: bool,
) -> tuple[dict[str, Tensor], int]:
    """Returns optimizer state and steps of a static table; its rule becomes that of the new table."""
    name = table.config.name
    where = f"from_static(table='{name}')"
    trained = trainer_of(weight, optimizer, where)
    if trained is None:
        return {}, 0
    trainer, group = trained
    if whole_rule:
        pass
    elif group is None:  # TorchRec's placeholder optimizer has FBGEMM's options
        placeholder: Any = weight
        table.mark_optimizer(placeholder._optimizer_classes, placeholder._optimizer_kwargs)
    else:
        table.mark_optimizer([type(trainer)], [row_rule(trainer, group, where)])
    rule = table.rows().optimizer
    check_kind(trainer, rule, where)
    return saved_moments(trainer, weight, rule, name, where)


def _reader(rows: Tensor) -> ReadRows:
    return lambda first, last: rows[first:last].reshape(last - first, -1)
