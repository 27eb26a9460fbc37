"""Makes dynamic collections of trained static ones: id i gets row i, with its optimizer state.

Legend: N rows, D columns of a table, M rows of a chunk, C columns of a shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_dyn.config import DynamicTableConfig
from torchrec_dyn.migration.static_optimizer import (
    SavedMoments,
    Trainer,
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
    UnshardedCollection,
    UnshardedTable,
    checked_configs,
    with_row_dtype,
)
from torchrec_dyn.table import ROW_DTYPES, DynamicTable, named_states

# Rows are copied so many bytes at a time: beside both tables there are never more than a few chunks.
CHUNK_BYTES = 32 << 20


def from_static(
    collection: EmbeddingBagCollection | EmbeddingCollection,
    optimizer: torch.optim.Optimizer | None = None,
    dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None = None,
    fused_params: Mapping[str, Any] | None = None,
    num_embeddings: Mapping[str, int] | None = None,
) -> UnshardedCollection:
    """Makes a dynamic collection of a trained static one; id i gets the numbers of row i, bit for bit.

    The rows take the dtype that the weights have now. They learn on by the rule of the optimizer
    that trained them, with its state and its present learning rate: the optimizer that
    `apply_optimizer_in_backward` set on a parameter, else `optimizer`. As everywhere in TorchRec
    a row learns when a batch names it: torch's Adam moves all rows at every step, this one does not.
    Rows added later start with state 0, whatever `initial_accumulator_value` was.

    Args:
        collection: unsharded, on the CPU; it is only read.
        optimizer: the one that trained it, plain or TorchRec's keyed, wrapped, combined; None: rows start
            with fresh optimizer state, except where an optimizer in backward trained them.
        dynamic: how rows start and live; one for all tables or a dict by table name.
        fused_params: as the dynamic collections take it. If it names an "optimizer", it is the whole rule
            by which rows learn on; its kind must be the kind of the saved state.
        num_embeddings: new limits by table name, at least N; None: tables are full with their N rows,
            so that new ids are errors without an eviction.

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
    limits = _checked_limits(collection, num_embeddings)
    for config in configs_of(collection):
        _check_weight(weights[config.name], config, f"{where}(table='{config.name}')")
    kind = EmbeddingBagConfig if isinstance(collection, EmbeddingBagCollection) else EmbeddingConfig
    configs = [
        _config(one, limits[one.name], weights[one.name].dtype)
        for one in checked_configs(configs_of(collection), kind, where)
    ]
    made = empty_counterpart(collection, configs, "cpu", dynamic, fused_params)
    tables: dict[str, UnshardedTable] = tables_by_name(made)
    whole_rule = "optimizer" in (fused_params or {})
    filled: list[tuple[DynamicTable, Tensor, SavedMoments]] = []
    for name, weight in weights.items():
        table = tables[name]
        table.weight.requires_grad_(weight.requires_grad)
        of_table = f"{where}(table='{name}')"
        trainer = trainer_of(weight, optimizer, of_table)
        if trainer is not None and not whole_rule:
            _mark(table, trainer, weight, of_table)
        moments = SavedMoments({}, 0)
        if trainer is not None:
            check_kind(trainer, table.rows().optimizer, of_table)
            moments = saved_moments(trainer, weight, table.rows().optimizer, name, of_table)
        filled.append((table.rows(), weight.detach(), moments))
    for one in filled:  # nothing is copied before everything fits
        _fill(*one)
    return made.train(collection.training)


def _checked_limits(collection: Any, wished: Mapping[str, int] | None) -> dict[str, int]:
    limits = {config.name: config.num_embeddings for config in configs_of(collection)}
    for name, limit in (wished or {}).items():
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


def _check_weight(weight: Tensor, config: Any, where: str) -> None:
    shape = (config.num_embeddings, config.embedding_dim)
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"{where}: expected a weight {list(shape)} as its config says, got {list(weight.shape)}."
        )
    if weight.device.type != "cpu":
        raise ValueError(
            f"{where}: expected rows on the CPU, got {weight.device}. Move the collection with .cpu()."
        )
    if weight.dtype not in ROW_DTYPES:
        raise ValueError(
            f"{where}: expected rows of float32, float16 or bfloat16, got {weight.dtype}. "
            "Convert the collection with .float()."
        )


def _config(config: Any, limit: int, dtype: torch.dtype) -> Any:
    """Returns a checked config with another limit, and with the dtype that the weight has now."""
    if limit != config.num_embeddings:
        # The init_fn of a checked config follows from its limit.
        config = replace(config, num_embeddings=limit, init_fn=None)
    # Weights may have been converted since, and TorchRec makes float16 of a BF16 table.
    return with_row_dtype(config, dtype)


def _mark(table: UnshardedTable, trainer: Trainer, weight: Any, where: str) -> None:
    """Marks the placeholder of a table with the optimizer of its rows."""
    if trainer.group is None:  # a placeholder of TorchRec's, which takes FBGEMM's own options
        table.mark_optimizer(weight._optimizer_classes, weight._optimizer_kwargs)
    else:
        rule = row_rule(trainer, trainer.group, where)
        table.mark_optimizer([type(trainer.optimizer)], [rule])


def _fill(table: DynamicTable, weight: Tensor, moments: SavedMoments) -> None:
    """Inserts the ids 0 to N - 1 with the rows of a weight, [N, D], and their state, chunk by chunk."""
    table.step = moments.step  # before the rows: a policy counts their age from here
    table.reserve(len(weight))
    for first, last in chunks(len(weight), table.columns):
        states = {name: state.detach()[first:last] for name, state in moments.states.items()}
        put_rows(table, torch.arange(first, last), weight[first:last], states)


def put_rows(
    table: DynamicTable, ids: Tensor, weight: Tensor, states: Mapping[str, Tensor]
) -> None:
    """Inserts rows into a table, whatever its limit; scores start at the table's step.

    Args:
        table: one column shard.
        ids: [M] int64, distinct, without a row so far.
        weight: [M, C].
        states: optimizer state by name, [M, C] or one number a row; states not named start afresh.
    """
    table.reserve(ids.numel())
    rows = table.row_numbers.take(ids.numel())
    table.id_map.insert(ids, rows)
    table.weights.write(rows, weight)
    for one in named_states(table):
        if one.name in states:
            one.store.write(rows, states[one.name].reshape(ids.numel(), one.store.columns))
        else:
            one.store.zero(rows)
    if table.life is not None:
        table.life.add_rows(ids, rows, table.step, None)


def chunks(count: int, columns: int) -> Iterator[tuple[int, int]]:
    """Cuts `count` rows of so many columns into chunks: first row and row after the last of each."""
    size = max(1, CHUNK_BYTES // (4 * columns))
    for first in range(0, count, size):
        yield first, min(first + size, count)
