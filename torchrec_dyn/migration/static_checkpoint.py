"""Fills dynamic tables from a checkpoint of static tables: id i gets row i, under any plans of both.

Each rank reads the files itself, 32 MiB at a time, and keeps the ids and columns of its shards.

Legend: N rows, D columns of a static table, S its column shards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_dyn.checkpoint_format import ChunkedTensor, mean_over_cuts, open_files
from torchrec_dyn.migration.static_optimizer import MOMENTS, STEPS
from torchrec_dyn.migration.trained_collections import chunks, put_rows
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks import Table, run_together
from torchrec_dyn.table import TableShard
from torchrec_dyn.whole_model import tables_in


def load_static(
    collection: nn.Module,
    path: str | os.PathLike[str],
    fqn: str = "",
    with_optimizer: bool = True,
    step: int | None = None,
    optimizer_fqn: str | None = None,
) -> None:
    """Replaces the rows of a dynamic collection with the rows of a static collection's checkpoint.

    Tables are found by name. Row-wise optimizer state that was saved under other column cuts is converted: a
    shard gets the mean of the saved state over its columns. Collective on a sharded collection: every rank
    must have access to the files.

    Args:
        collection: the dynamic collection, sharded or not, with the optimizer that trained the static tables.
        path: a directory written by `torch.distributed.checkpoint.save`. The saved state dict must contain,
            at any depth, the model's state dict and, for optimizer state, the state dict of its
            KeyedOptimizer. Open only files from a source that you trust: DCP's metadata is a pickle.
        fqn: path of the collection in the saved model; needed if several saved tables have the same name.
        with_optimizer: True to load optimizer state, False to start with fresh state.
        step: number of training steps so far; None: the saved number. Needed for TorchRec's sharded Adam,
            which does not save it.
        optimizer_fqn: path of the collection in the saved optimizer, e.g. "sparse" for "ema.sparse", or
            "state.sparse" if there is a "tower.sparse" with the same tables. None: `fqn`.

    Raises:
        ValueError: on every rank, if the checkpoint does not fit; nothing has changed then.
        RuntimeError: on every rank, if one rank failed in another way; nothing has changed then.
    """
    tables = tables_in(collection, call="load_static")
    paths = fqn, fqn if optimizer_fqn is None else optimizer_fqn
    group = next(iter(tables.values())).group

    def find() -> list[_StaticTable]:
        files = _Files(Path(path), *paths)
        return [files.table(table, with_optimizer, step) for table in tables.values()]

    is_filled = False

    def fill() -> None:
        nonlocal is_filled
        for table, of_table in zip(tables.values(), saved, strict=True):
            _fill(table, of_table)
        is_filled = True
        for one, contents in before:
            one.note_replaced(contents["id_map"])

    saved = run_together(group, "load_static", find)
    before = [(one, dict(one.__dict__)) for table in tables.values() for one in table.shards]
    try:
        run_together(group, "load_static", fill)
    except BaseException:
        for one, contents in before:  # unchanged: _fill creates new objects (TableShard.reset)
            for name, value in contents.items():
                setattr(one, name, value)
            if is_filled:  # the log may have noted what is undone: the next save is a full one
                one.changes = None
        raise


@dataclass(frozen=True)
class _StaticTable:
    """One table of the checkpoint."""

    weight: ChunkedTensor  # [N, D]
    cuts: list[int]  # first columns of its column shards, and D
    # Optimizer state by FBGEMM's name: [N, D], [N, 1] or [N * S], column shard after column shard.
    states: Mapping[str, ChunkedTensor]
    step: int  # training steps so far

    def state_rows(self, name: str, first: int, last: int, shard: TableShard) -> Tensor:
        """Returns the optimizer state of rows [first, last) for the columns of a shard."""
        saved, (rows, columns) = self.states[name], self.weight.shape
        span = shard.first_column, shard.first_column + shard.columns
        if saved.shape == (rows, columns) and not shard.optimizer.is_rowwise(name):
            return saved.rows(first, last)[:, span[0] : span[1]]
        shards = range(len(self.cuts) - 1)
        parts = [saved.rows(n * rows + first, n * rows + last).reshape(-1, 1) for n in shards]
        return mean_over_cuts(torch.cat(parts, 1), self.cuts, span)


class _Files:
    """The tensors of a checkpoint, found by the ends of their keys."""

    def __init__(self, folder: Path, fqn: str, optimizer_fqn: str) -> None:
        self._folder, self._fqn, self._optimizer_fqn = folder, fqn, optimizer_fqn
        self._reader, metadata = open_files(folder)
        self._saved = metadata.state_dict_metadata

    def table(self, table: Table, with_optimizer: bool, step: int | None) -> _StaticTable:
        """Returns the static table for a dynamic table, after checking that it fits this rank's shards.

        Raises:
            ValueError: if it is missing, or does not fit.
        """
        where = f"{self._folder}: table '{table.name}'"
        tail = _tail(self._fqn, table)
        keys = [key for key in self._saved if f".{key}".endswith(f".{tail}")]
        key = self._only(keys, tail, "fqn")
        if key.removesuffix("weight") + "ids" in self._saved:
            raise ValueError(
                f"{where}: expected a static table, got a dynamic one. Load it with "
                "torch.distributed.checkpoint.load and torchrec_dyn.checkpoint.LoadPlanner."
            )
        metadata = self._saved[key]
        assert isinstance(metadata, TensorStorageMetadata)
        weight = self._tensor(key)
        shards = table.shards
        columns = shards[0].embedding_dim if shards else None
        if len(weight.shape) != 2 or columns not in (None, weight.shape[1]):
            raise ValueError(
                f"{where}: expected rows [N, {columns}], got {list(weight.shape)} in '{key}'."
            )
        cuts = [*sorted({chunk.offsets[1] for chunk in metadata.chunks}), weight.shape[1]]
        states, steps = self._states(table) if with_optimizer else ({}, [])
        last = max(steps, default=0) if step is None else step
        found = _StaticTable(weight, cuts, states, last)
        if with_optimizer and shards:
            known = step is not None or bool(steps)
            _check_states(found, shards[0].optimizer, known, where)
        return found

    def _states(self, table: Table) -> tuple[dict[str, ChunkedTensor], list[int]]:
        """Returns the optimizer state of a table, and its saved steps.

        Keys of states have the form "...{tail}.{table}.momentum1" or "...{tail}.sum".
        """
        tail = _tail(self._optimizer_fqn, table)
        found: dict[str, list[str]] = {}
        for key in self._saved:
            _, inside, name = f".{key}".rpartition(f".{tail}.")
            if inside:
                plain = name.removeprefix(f"{table.name}.")
                found.setdefault(MOMENTS.get(plain, plain), []).append(key)
        keys = {
            name: self._only(some, f"{tail}.{name}", "optimizer_fqn")
            for name, some in found.items()
        }
        steps = [int(self._tensor(keys.pop(name)).whole()) for name in STEPS if name in keys]
        return {name: self._tensor(key) for name, key in keys.items()}, steps

    def _tensor(self, key: str) -> ChunkedTensor:
        metadata = self._saved[key]
        if not isinstance(metadata, TensorStorageMetadata):
            raise ValueError(f"{self._folder}: expected '{key}' as a tensor, got an object.")
        return ChunkedTensor(f"'{key}' in {self._folder}", self._reader, key, metadata)

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


def _check_states(found: _StaticTable, optimizer: RowOptimizer, known: bool, where: str) -> None:
    """Raises ValueError unless the optimizer state fits the optimizer here."""
    if sorted(found.states) != sorted(optimizer.state_names):
        raise ValueError(
            f"{where}: expected optimizer state {list(optimizer.state_names)} of {optimizer.kind.name}, "
            f"got {sorted(found.states)}. Choose the optimizer that trained the table, pass `optimizer_fqn` "
            "if the saved optimizer names the table by another path than the saved model, or "
            "with_optimizer=False to start with fresh state."
        )
    rows, columns = found.weight.shape
    for name, state in found.states.items():
        spread = (rows * (len(found.cuts) - 1),)
        fits = [spread, (rows, 1)] if optimizer.is_rowwise(name) else [(rows, columns)]
        if state.shape not in fits or (state.shape == (rows, 1) and len(found.cuts) > 2):
            raise ValueError(
                f"{where}: expected {name} of {optimizer.kind.name} as {list(fits[0])}, got "
                f"{list(state.shape)}."
            )
    if optimizer.counts_steps and not known:
        raise ValueError(
            f"{where}: expected the training steps of {optimizer.kind.name}, which TorchRec does not "
            "save, got none. Pass step=..."
        )


def _fill(table: Table, saved: _StaticTable) -> None:
    """Replaces the contents of this rank's shards."""
    rows, columns = saved.weight.shape
    for shard in table.shards:
        shard.reset(shard.dtype, shard.device)
        shard.step = saved.step
        shard.reserve(rows // table.layout.row_ranks)
    for first, last in chunks(rows, columns) if table.shards else ():
        ids = torch.arange(first, last, device="cpu")
        ids = ids[table.owns(ids)]
        weight, at = saved.weight.rows(first, last), ids - first
        for shard in table.shards:
            span = slice(shard.first_column, shard.first_column + shard.columns)
            states = {name: saved.state_rows(name, first, last, shard)[at] for name in saved.states}
            put_rows(shard, ids, weight[at, span], states)
