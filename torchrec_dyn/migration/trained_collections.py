"""Converts trained static collections to dynamic collections: id i gets row i, with its optimizer state.

Legend: N rows, D columns of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.migration.static_rows import (
    ReadRows,
    StaticRows,
    check_kind,
    row_rule,
    saved_moments,
    trainer_of,
)
from torchrec_dyn.migration.stock_collections import (
    STOCK,
    configs_of,
    empty_counterpart,
    tables_by_name,
)
from torchrec_dyn.modules import (
    UnshardedTable,
    checked_configs,
    with_row_dtype,
)
from torchrec_dyn.table import ROW_DTYPES, TableShard


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
    that `apply_optimizer_in_backward` set on a parameter, else `optimizer`. As always in TorchRec, a row
    is updated only if it is in a batch; torch's Adam updates all rows at every step. Rows added later
    start with the state of a new row, as `initial_accumulator_value`.

    Args:
        collection: unsharded collection on the CPU or a GPU, where the rows will be too; not changed.
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
    if type(collection) not in STOCK:
        raise ValueError(
            f"{where}: expected an unsharded EmbeddingBagCollection or EmbeddingCollection, got "
            f"{type(collection).__name__}. Pass the collection itself; of a sharded one load a checkpoint."
        )
    weights: dict[str, Tensor] = {
        name: table.weight for name, table in tables_by_name(collection).items()
    }
    device = next(iter(weights.values())).device
    limits = _checked_limits(collection, num_embeddings)
    for config in configs_of(collection):
        _check_weight(weights[config.name], config, device, f"{where}(table='{config.name}')")
    kind = EmbeddingBagConfig if isinstance(collection, EmbeddingBagCollection) else EmbeddingConfig
    configs = [
        _config(config, limits[config.name], weights[config.name].dtype)
        for config in checked_configs(configs_of(collection), kind, where, dynamic)
    ]
    converted = empty_counterpart(collection, configs, device, dynamic, fused_params)
    tables: dict[str, UnshardedTable] = tables_by_name(converted)
    whole_rule = "optimizer" in (fused_params or {})
    filled: list[tuple[UnshardedTable, StaticRows]] = []
    for name, weight in weights.items():
        tables[name].weight.requires_grad_(weight.requires_grad)
        states, step = _moments_of(tables[name], weight, optimizer, whole_rule)
        rows = _static_rows(tables[name].rows(), weight.detach(), states, step)
        filled.append((tables[name], rows))
    for table, rows in filled:  # rows are copied only after all checks
        rows.fill(table.as_table(), [table.rows()])
    return converted.train(collection.training)


def _checked_limits(collection: Any, wished: int | Mapping[str, int] | None) -> dict[str, int]:
    limits = {config.name: config.num_embeddings for config in configs_of(collection)}
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


def _static_rows(
    table: TableShard, weight: Tensor, states: Mapping[str, Tensor], step: int
) -> StaticRows:
    """Returns the rows of a static module: weight [N, D], and the state of its optimizer."""

    def reader(values: Tensor) -> ReadRows:
        return lambda first, last: values[first:last].reshape(last - first, -1)

    tensors = {name: reader(state.detach()) for name, state in states.items()}
    return StaticRows(
        table.where, table.name, weight.shape, weight.dtype, {"weight": reader(weight), **tensors},
        table.optimizer, step,
    )  # fmt: skip
