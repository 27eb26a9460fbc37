"""A trained static collection becomes a dynamic one: row i becomes id i, optimizer state comes along.

Legend: N rows, D columns of a table.

Rows of a static table become rows of a dynamic one that has none of them yet: row i is that of id i.

Legend: M rows of a chunk, C columns of the shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from torchrec_dyn.modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    LocalTable,
    checked_configs,
    with_row_dtype,
)
from torchrec_dyn.table import ROW_DTYPES, DynamicTable, named_states

# Rows are copied so many bytes at a time: beside both tables there is never more than a few of these.
CHUNK_BYTES = 32 << 20


def put_rows(
    table: DynamicTable, ids: Tensor, weight: Tensor, states: Mapping[str, Tensor]
) -> None:
    """Puts rows into a table, whatever its limit; what a policy counts starts at the table's step.

    Args:
        table: one shard.
        ids: [M] int64, distinct, without a row so far.
        weight: [M, C].
        states: optimizer state by name, [M, C] or one number a row; what is missing starts afresh.
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
    """Cuts `count` rows of so many columns into chunks: the first row, and the one after the last."""
    size = max(1, CHUNK_BYTES // (4 * columns))
    for first in range(0, count, size):
        yield first, min(first + size, count)


_Dynamic = DynamicEmbeddingBagCollection | DynamicEmbeddingCollection


def from_static(
    collection: EmbeddingBagCollection | EmbeddingCollection,
    optimizer: torch.optim.Optimizer | None = None,
    dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None = None,
    fused_params: Mapping[str, Any] | None = None,
    num_embeddings: Mapping[str, int] | None = None,
) -> _Dynamic:
    """Makes a dynamic collection out of a trained static one; id i has what row i had, bit for bit.

    The rows take the dtype that the weights have now. They learn on by the rule of the optimizer
    that trained them, with its state and its learning rate of now: the one that
    `apply_optimizer_in_backward` set on a parameter, else `optimizer`. As everywhere in TorchRec
    a row learns when a batch names it: torch's Adam moves all rows at every step, this one does not.
    A row that comes later starts with state 0, whatever `initial_accumulator_value` was.

    Args:
        collection: unsharded, on the CPU; it is only read.
        optimizer: what trained it, plain or TorchRec's keyed, wrapped, combined; None: rows start
            with fresh optimizer state, but for optimizers in backward.
        dynamic: how rows start and live; one for all tables or a dict by table name.
        fused_params: as the dynamic collections take it. With an "optimizer" in it, the whole rule
            by which rows learn on; it must be of the kind whose state there is.
        num_embeddings: new limits by table name, at least N; None: tables are full with their N rows,
            so that new ids are errors without an eviction.

    Raises:
        ValueError: if a table or its optimizer has no dynamic counterpart.
    """
    where = "from_static"
    if type(collection) not in (EmbeddingBagCollection, EmbeddingCollection):
        raise ValueError(
            f"{where}: expected an unsharded EmbeddingBagCollection or EmbeddingCollection, got "
            f"{type(collection).__name__}. Pass the collection itself; of a sharded one load a checkpoint."
        )
    weights = _weights(collection)
    limits = _checked_limits(collection, num_embeddings)
    for config in _configs(collection):
        _check_weight(weights[config.name], config, f"{where}(table='{config.name}')")
    made = _counterpart(collection, weights, limits, dynamic, fused_params)
    tables = made.embedding_bags if hasattr(made, "embedding_bags") else made.embeddings
    whole_rule = "optimizer" in (fused_params or {})
    filled: list[tuple[DynamicTable, Tensor, SavedMoments]] = []
    for name, weight in weights.items():
        table = tables[name]
        assert isinstance(table, LocalTable)
        table.weight.requires_grad_(weight.requires_grad)
        told = f"{where}(table='{name}')"
        trainer = trainer_of(weight, optimizer, told)
        if trainer is not None and not whole_rule:
            _mark(table, trainer, weight, told)
        moments = SavedMoments({}, 0)
        if trainer is not None:
            check_kind(trainer, table.rows().optimizer, told)
            moments = saved_moments(trainer, weight, table.rows().optimizer, name, told)
        filled.append((table.rows(), weight.detach(), moments))
    for one in filled:  # nothing is copied before everything fits
        _fill(*one)
    return made.train(collection.training)


def _weights(collection: EmbeddingBagCollection | EmbeddingCollection) -> dict[str, Tensor]:
    pooled = isinstance(collection, EmbeddingBagCollection)
    tables = collection.embedding_bags if pooled else collection.embeddings
    return {name: table.get_parameter("weight") for name, table in tables.items()}


def _configs(collection: Any) -> Sequence[Any]:
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def _checked_limits(collection: Any, wished: Mapping[str, int] | None) -> dict[str, int]:
    limits = {config.name: config.num_embeddings for config in _configs(collection)}
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


def _counterpart(
    stock: EmbeddingBagCollection | EmbeddingCollection,
    weights: Mapping[str, Tensor],
    limits: Mapping[str, int],
    dynamic: DynamicTableConfig | Mapping[str, DynamicTableConfig] | None,
    fused_params: Mapping[str, Any] | None,
) -> _Dynamic:
    """Makes the empty dynamic collection."""
    if isinstance(stock, EmbeddingBagCollection):
        bags = [
            _config(one, weights, limits)
            for one in checked_configs(
                stock.embedding_bag_configs(), EmbeddingBagConfig, "from_static"
            )
        ]
        return DynamicEmbeddingBagCollection(
            bags, stock.is_weighted(), "cpu", dynamic, fused_params
        )
    sequences = [
        _config(one, weights, limits)
        for one in checked_configs(stock.embedding_configs(), EmbeddingConfig, "from_static")
    ]
    return DynamicEmbeddingCollection(sequences, "cpu", stock.need_indices(), dynamic, fused_params)


def _config(config: Any, weights: Mapping[str, Tensor], limits: Mapping[str, int]) -> Any:
    if limits[config.name] != config.num_embeddings:
        # The init_fn of a checked config follows from its limit.
        config = replace(config, num_embeddings=limits[config.name], init_fn=None)
    # Weights may have been converted since, and TorchRec makes float16 of a BF16 table.
    return with_row_dtype(config, weights[config.name].dtype)


def _mark(table: LocalTable, trainer: Trainer, weight: Any, where: str) -> None:
    """Says on the placeholder how its rows learn."""
    if trainer.group is None:  # a placeholder of TorchRec's, which takes FBGEMM's own options
        table.mark_optimizer(weight._optimizer_classes, weight._optimizer_kwargs)
    else:
        rule = row_rule(trainer, trainer.group, where)
        table.mark_optimizer([type(trainer.optimizer)], [rule])


def _fill(table: DynamicTable, weight: Tensor, moments: SavedMoments) -> None:
    """Gives the ids 0 to N - 1 the rows of a weight, [N, D], and their state, chunk by chunk."""
    table.step = moments.step  # before the rows: a life counts their age from here
    table.reserve(len(weight))
    for first, last in chunks(len(weight), table.columns):
        states = {name: state.detach()[first:last] for name, state in moments.states.items()}
        put_rows(table, torch.arange(first, last), weight[first:last], states)
