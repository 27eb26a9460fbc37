"""Fills dynamic tables from a checkpoint of static tables: id i gets row i, under any plans of both.

Each rank reads the files itself, 32 MiB at a time, and keeps the ids and columns of its shards.

Legend: N rows, D columns of a static table, S its column shards, M rows of a chunk.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_dyn.checkpoint_format import ChunkedTensor, open_files
from torchrec_dyn.migration.static_rows import (
    MOMENTS,
    STEPS,
    ReadRows,
    StaticRows,
    check_states,
)
from torchrec_dyn.ranks import Table, run_together
from torchrec_dyn.storage import commit, turn_of
from torchrec_dyn.table import Commit, beside, replace
from torchrec_dyn.whole_model import tables_in

_OTHER_STATES = (
    " Choose the optimizer that trained the table, pass `optimizer_fqn` if the saved optimizer names the "
    "table by another path than the saved model, or with_optimizer=False to start with fresh state."
)


def load_static(
    collection: nn.Module,
    path: str | os.PathLike[str],
    fqn: str = "",
    with_optimizer: bool = True,
    step: int | None = None,
    optimizer_fqn: str | None = None,
) -> None:
    """Replaces the rows of a dynamic collection with the rows of a static collection's checkpoint.

    Tables are found by name. Row-wise optimizer state saved under other column cuts is converted: a shard
    gets the mean of the saved state over its columns. Collective on a sharded collection: every rank must
    have access to the files.

    Args:
        collection: the dynamic collection, sharded or not, with the optimizer that trained the static tables.
        path: a directory written by `torch.distributed.checkpoint.save`. The saved state dict must contain,
            at any depth, the model's state dict and, for optimizer state, the state dict of its
            KeyedOptimizer. Open only files from a source that you trust: DCP's metadata is a pickle.
        fqn: path of the collection in the saved model; needed if several saved tables have the same name.
        with_optimizer: True to load optimizer state, False to start with fresh state.
        step: number of training steps so far; None: the saved number. Required for TorchRec's sharded Adam,
            which does not save it.
        optimizer_fqn: path of the collection in the saved optimizer, e.g. "sparse" for "ema.sparse", or
            "state.sparse" if there is a "tower.sparse" with the same tables. None: `fqn`.

    Raises:
        ValueError: on every rank, if the checkpoint does not fit; nothing has changed then.
        RuntimeError: on every rank, if a rank failed in another way; nothing has changed then.
    """
    tables = tables_in(collection, call="load_static")
    paths = fqn, fqn if optimizer_fqn is None else optimizer_fqn
    first = next(iter(tables.values()))  # all have one lock
    commits: list[Commit] = []

    def prepare() -> None:
        files = _Files(Path(path), *paths)
        with turn_of(first, also_torn=True):
            for table in tables.values():
                rows = files.table(table, with_optimizer, step)
                filled = [beside(shard) for shard in table.shards]
                rows.fill(table, filled)
                commits.extend(map(replace, table.shards, filled))

    run_together(first.group, "load_static", prepare)
    with turn_of(first, also_torn=True), commit(*tables.values(), replaces=True):
        for commit_shard in commits:
            commit_shard()


class _Files:
    """The tensors of a checkpoint, found by the ends of their keys."""

    def __init__(self, folder: Path, fqn: str, optimizer_fqn: str) -> None:
        self._folder, self._fqn, self._optimizer_fqn = folder, fqn, optimizer_fqn
        self._reader, metadata = open_files(folder)
        self._saved = metadata.state_dict_metadata

    def table(self, table: Table, with_optimizer: bool, step: int | None) -> StaticRows:
        """Returns the static table for a dynamic table, after checking that it fits this rank's shards."""
        where = f"{self._folder}: table '{table.name}'"
        key, weight = self._weight(table, where)
        chunks = self._saved[key].chunks  # type: ignore[union-attr]
        cuts = [*sorted({chunk.offsets[1] for chunk in chunks}), weight.shape[1]]
        states, steps = self._states(table) if with_optimizer else ({}, [])
        steps = steps if step is None else [step]
        if with_optimizer and table.shards:
            optimizer = table.optimizer
            check_states(states, weight.shape, len(cuts) - 1, optimizer, where, _OTHER_STATES)
            if optimizer.counts_steps and not steps:
                raise ValueError(
                    f"{where}: expected the training steps of {optimizer.kind.name}, which TorchRec does not "
                    "save, got none. Pass step=..."
                )
        tensors: dict[str, ReadRows] = {"weight": weight.rows}
        for name, state in states.items():
            tensors[name] = partial(_state_rows, state, len(cuts) - 1)
        return StaticRows(
            where, table.name, weight.shape, weight.dtype, tensors, table.optimizer,
            max(steps, default=0), cuts,
        )  # fmt: skip

    def _weight(self, table: Table, where: str) -> tuple[str, ChunkedTensor]:
        """Returns the rows of a static table, with their key."""
        tail = _tail(self._fqn, table)
        key = self._only(
            [key for key in self._saved if f".{key}".endswith(f".{tail}")], tail, "fqn"
        )
        if key.removesuffix("weight") + "ids" in self._saved:
            raise ValueError(
                f"{where}: expected a static table, got a dynamic one. Load it with "
                "torch.distributed.checkpoint.load and torchrec_dyn.checkpoint.LoadPlanner."
            )
        weight, columns = self._tensor(key), table.embedding_dim
        if weight.shape[1:] != (columns,):
            raise ValueError(
                f"{where}: expected rows [N, {columns}], got {list(weight.shape)} in '{key}'."
            )
        return key, weight

    def _states(self, table: Table) -> tuple[dict[str, ChunkedTensor], list[int]]:
        """Returns the optimizer state of a table, and its saved steps."""
        # Keys of states have the form "...{tail}.{table}.momentum1" or "...{tail}.sum".
        tail = _tail(self._optimizer_fqn, table)
        by_name: dict[str, list[str]] = {}
        for key in self._saved:
            _, inside, name = f".{key}".rpartition(f".{tail}.")
            if inside:
                plain = name.removeprefix(f"{table.name}.")
                by_name.setdefault(MOMENTS.get(plain, plain), []).append(key)
        keys = {
            name: self._only(matching, f"{tail}.{name}", "optimizer_fqn")
            for name, matching in by_name.items()
        }
        steps = [int(self._tensor(keys.pop(name)).whole()) for name in STEPS if name in keys]
        return {name: self._tensor(key) for name, key in keys.items()}, steps

    def _tensor(self, key: str) -> ChunkedTensor:
        metadata = self._saved[key]
        if not isinstance(metadata, TensorStorageMetadata):
            raise ValueError(f"{self._folder}: expected '{key}' as a tensor, got an object.")
        return ChunkedTensor.in_files(f"'{key}' in {self._folder}", self._reader, key, metadata)

    def _only(self, keys: list[str], tail: str, argument: str) -> str:
        if len(keys) != 1:
            raise ValueError(
                f"{self._folder}: expected one key that ends with '{tail}', got {keys}. Pass the right "
                f"checkpoint, and `{argument}` if it has several tables of this name."
            )
        return keys[0]


def _tail(fqn: str, table: Table) -> str:
    """Returns the end of the key of a table's weight, in a model or in the state of an optimizer."""
    return f"{fqn}.{table.key}.weight" if fqn else f"{table.key}.weight"


def _state_rows(saved: ChunkedTensor, shards: int, first: int, last: int) -> Tensor:
    """Returns state of rows [first, last): [M, D], or [M, S] of saved [N * S], shard after shard."""
    if len(saved.shape) == 2:
        return saved.rows(first, last)
    rows = saved.shape[0] // shards
    parts = [saved.rows(n * rows + first, n * rows + last) for n in range(shards)]
    return torch.stack(parts, 1)
