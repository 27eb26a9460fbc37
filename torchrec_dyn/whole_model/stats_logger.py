"""Writes what `.stats()` says of every dynamic table of a model to a logger, by hand or by a hook.

A logger is anything with TensorBoard's `SummaryWriter.add_scalar`, or a dict. On a sharded model each
rank writes of its own shard, without asking the others; give each rank a logger of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from torchrec_dyn.distributed import ShardedTableHandle
from torchrec_dyn.modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    TableHandle,
)
from torchrec_dyn.whole_model.by_id import Collection
from torchrec_dyn.whole_model.tables import collections_of

_Unsharded = DynamicEmbeddingBagCollection | DynamicEmbeddingCollection


class ScalarWriter(Protocol):
    """What is asked of a writer, as of TensorBoard's `SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Writes one number.

        Args:
            tag: its name.
            scalar_value: the number.
            global_step: when.
        """
        ...


StatsLogger = ScalarWriter | MutableMapping[str, int | float]


def log_stats(model: nn.Module, to: StatsLogger, step: int) -> None:
    """Writes the stats of every dynamic table of a model.

    Each is named "collection/table/stat", such as "model.ebc/user/hits": the collection by its path in
    the model, without the wrappers DistributedModelParallel and DDP, so that sharded and unsharded
    models write the same names. Of a model that is a collection itself the name is "user/hits".

    Args:
        model: a model with dynamic collections, sharded or not.
        to: gets `add_scalar(name, value, step)` for each, or, if it is a dict, the value by name.
        step: when, in the caller's count. Each table's own training steps are its stat "step".

    Raises:
        ValueError: if the model has no dynamic collection, or `to` is neither.
    """
    _check_logger(to, "log_stats")
    scalars = dict(_scalars(model, "log_stats"))
    for name, value in scalars.items():
        if isinstance(to, MutableMapping):
            to[name] = value
        else:
            to.add_scalar(name, value, step)


def add_stats_hook(model: nn.Module, to: StatsLogger, every: int = 100) -> RemovableHandle:
    """Makes a model write its stats by itself, after each `every`-th of its training forwards.

    The step that it writes is how many training forwards the hook has counted. Evaluation is not
    counted.

    Args:
        model: what the training loop or the pipeline calls: a plain model, or one in
            DistributedModelParallel.
        to: as of `log_stats`.
        every: training forwards from one writing to the next.

    Returns:
        a handle; its `remove()` ends this.

    Raises:
        ValueError: if the model has no dynamic collection, `to` cannot be written to, or `every` is
            no integer above 0.
    """
    _check_logger(to, "add_stats_hook")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"add_stats_hook.every: expected an integer above 0, got {every!r}.")
    next(collections_of(model, "add_stats_hook"))
    forwards = 0

    # Collections are looked for anew each time: sharding after this call replaces them.
    def count_and_log(module: nn.Module, batch: object, output: object) -> None:
        nonlocal forwards
        if module.training:
            forwards += 1
            if forwards % every == 0:
                log_stats(module, to, forwards)

    return model.register_forward_hook(count_and_log)


def _scalars(model: nn.Module, where: str) -> Iterator[tuple[str, int | float]]:
    for path, collection in collections_of(model, where):
        for table in _tables(collection):
            prefix = f"{path}/{table.name}" if path else table.name
            for name, value in table.stats().items():
                yield f"{prefix}/{name}", value


def _tables(collection: Collection) -> list[TableHandle] | list[ShardedTableHandle]:
    if isinstance(collection, _Unsharded):
        return [collection.table(name) for name in collection.dynamic_configs()]
    return [collection.table(name) for name in collection.module_sharding_plan]


def _check_logger(to: object, where: str) -> None:
    if not isinstance(to, MutableMapping) and not callable(getattr(to, "add_scalar", None)):
        raise ValueError(
            f"{where}.to: expected an object with add_scalar, as TensorBoard's SummaryWriter, or a "
            f"dict, got {type(to).__name__}."
        )
