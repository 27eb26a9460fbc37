"""Writes the `.stats()` of every dynamic table of a model to a logger, in one call or in a hook.

A logger is a dict, or an object with the method `add_scalar` of TensorBoard's `SummaryWriter`. For a
sharded model each rank writes the stats of its own shards, without communication. Pass a separate logger
on each rank.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from torchrec_dyn.checkpoint_format import naming
from torchrec_dyn.whole_model.tables import collections_of, table_names


class ScalarWriter(Protocol):
    """A writer of numbers, such as TensorBoard's `SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Writes one number.

        Args:
            tag: name of the number.
            scalar_value: the number.
            global_step: step of the number.
        """
        ...


StatsLogger = ScalarWriter | MutableMapping[str, int | float]


def log_stats(model: nn.Module, to: StatsLogger, step: int) -> None:
    """Writes the stats of every dynamic table of a model.

    Names have the form "collection/table/stat", e.g. "model.ebc/user/hits". The collection is given by its
    path in the model without the wrappers DistributedModelParallel and DDP, so sharded and unsharded models
    have the same names. For a model that is itself a collection the name is "user/hits".

    Args:
        model: a model with dynamic collections, sharded or not.
        to: a dict, which gets each value under its name, or a writer, on which
            `add_scalar(name, value, step)` is called.
        step: step to write. The training steps of each table are its stat "step".

    Raises:
        ValueError: if the model has no dynamic collection, or `to` is neither a dict nor a writer.
        OSError: with the writer's `log_dir`, if the writer cannot write, because the disk is full or fails. A
            `SummaryWriter` writes later: one of the next calls raises the error. The tables are as they were.
    """
    _check_logger(to, "log_stats")
    scalars = {
        f"{path}/{table}/{name}" if path else f"{table}/{name}": value
        for path, collection in collections_of(model, "log_stats")
        for table in table_names(collection)
        for name, value in collection.table(table).stats().items()
    }
    for name, value in scalars.items():
        if isinstance(to, MutableMapping):
            to[name] = value
        else:
            with naming(str(getattr(to, "log_dir", to))):
                to.add_scalar(name, value, step)


def add_stats_hook(model: nn.Module, to: StatsLogger, every: int = 100) -> RemovableHandle:
    """Registers a hook that writes a model's stats after every `every` training forwards.

    The hook writes as step the number of training forwards since its registration. Evaluation is not
    counted.

    Args:
        model: the module that the training loop or the pipeline calls: a plain model, or a model in
            DistributedModelParallel.
        to: as in `log_stats`.
        every: number of training forwards between two writes.

    Returns:
        A handle; its `remove()` removes the hook.

    Raises:
        ValueError: if the model has no dynamic collection, `to` is neither a dict nor a writer, or `every`
            is not an integer above 0.
    """
    _check_logger(to, "add_stats_hook")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"add_stats_hook.every: expected an integer above 0, got {every!r}.")
    collections_of(model, "add_stats_hook")
    forwards = 0

    # Each call of the hook searches the collections again, because sharding after this call replaces them.
    def count_and_log(module: nn.Module, batch: object, output: object) -> None:
        nonlocal forwards
        if module.training:
            forwards += 1
            if forwards % every == 0:
                log_stats(module, to, forwards)

    return model.register_forward_hook(count_and_log)


def _check_logger(to: object, where: str) -> None:
    if not isinstance(to, MutableMapping) and not callable(getattr(to, "add_scalar", None)):
        raise ValueError(
            f"{where}.to: expected an object with add_scalar, as TensorBoard's SummaryWriter, or a "
            f"dict, got {type(to).__name__}."
        )
