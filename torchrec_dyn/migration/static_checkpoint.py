"""A checkpoint of static tables fills dynamic ones: row i becomes id i, whatever plans either has.

Each rank reads the files itself, 32 MB at a time, and keeps the ids and columns that it holds.

Legend: N rows, D columns of a static table, S its column shards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_dyn.checkpoint_format import ChunkedTensor, check_files, mean_over_cuts, read_metadata
from torchrec_dyn.distributed import ShardedDynamicEmbeddingBagCollection
from torchrec_dyn.migration.static_optimizer import MOMENTS, STEPS
from torchrec_dyn.migration.trained_collections import chunks, put_rows
from torchrec_dyn.modules import DynamicEmbeddingBagCollection
from torchrec_dyn.optimizers import RowOptimizer
from torchrec_dyn.ranks import done_together
from torchrec_dyn.table import DynamicTable
from torchrec_dyn.whole_model import Collection, RowsHere, rows_here

_POOLED = (DynamicEmbeddingBagCollection, ShardedDynamicEmbeddingBagCollection)


def load_static(
    collection: Collection,
    path: str | os.PathLike[str],
    fqn: str = "",
    with_optimizer: bool = True,
    step: int | None = None,
) -> None:
    """Replaces the rows of a dynamic collection by those of a checkpoint of the static one.

    Tables are found by name. Row-wise optimizer state of other column shards becomes the mean over the
    columns of a shard here. Collective on a sharded collection: every rank must see the files.

    Args:
        collection: sharded or not, with the optimizer that trained the static one.
        path: what was given to `torch.distributed.checkpoint.save`, of a state dict with the model's
            and, for the optimizer state, that of its KeyedOptimizer somewhere in it. Open only files
            whose origin you trust: DCP's metadata is a pickle.
        fqn: where the saved model held the collection, if the checkpoint has several tables of a name.
        with_optimizer: whether optimizer state is loaded; else it starts afresh.
        step: training steps so far. TorchRec's sharded Adam does not save them.

    Raises:
        ValueError: on every rank, if the checkpoint does not fit; nothing has changed.
        RuntimeError: on every rank, if one failed otherwise; nothing has changed.
    """
    here = rows_here(collection)
    group = next(iter(here.values())).group
    holder = "embedding_bags" if isinstance(collection, _POOLED) else "embeddings"

    def find() -> dict[str, _StaticTable]:
        files = _Files(Path(path), f"{fqn}.{holder}" if fqn else holder)
        return {name: files.table(name, rows, with_optimizer, step) for name, rows in here.items()}

    def fill() -> None:
        for name, rows in here.items():
            _fill(rows, saved[name])

    saved = done_together(group, "load_static", find)
    before = [(one, dict(one.__dict__)) for rows in here.values() for one in rows.shards]
    try:
        done_together(group, "load_static", fill)
    except BaseException:
        for one, contents in before:  # filling makes new objects (table_state.replace_contents)
            one.__dict__.update(contents)
        raise


@dataclass(frozen=True)
class _StaticTable:
    """One table of the checkpoint.

    Attributes:
        weight: [N, D].
        cuts: where its column shards begin, and D.
        states: by FBGEMM's name, [N, D], [N, 1] or [N * S], one column shard after the other.
        step: training steps so far.
    """

    weight: ChunkedTensor
    cuts: list[int]
    states: Mapping[str, ChunkedTensor]
    step: int

    def state_rows(self, name: str, first: int, last: int, shard: DynamicTable) -> Tensor:
        """Reads optimizer state of rows [first, last) for the columns of a shard."""
        saved, (rows, columns) = self.states[name], self.weight.shape
        span = shard.first_column, shard.first_column + shard.columns
        if saved.shape == (rows, columns) and not _is_rowwise(shard.optimizer, name):
            return saved.rows(first, last)[:, span[0] : span[1]]
        shards = range(len(self.cuts) - 1)
        parts = [saved.rows(n * rows + first, n * rows + last).reshape(-1, 1) for n in shards]
        return mean_over_cuts(torch.cat(parts, 1), self.cuts, span)


class _Files:
    """The tensors of a checkpoint by what their keys end with."""

    def __init__(self, folder: Path, holder: str) -> None:
        self._folder = folder
        self._holder = holder
        self._reader = FileSystemReader(folder)
        metadata = read_metadata(folder, self._reader)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        check_files(folder, metadata)
        self._saved = metadata.state_dict_metadata

    def table(
        self, name: str, here: RowsHere, with_optimizer: bool, step: int | None
    ) -> _StaticTable:
        """Finds a table and checks that it fits what this rank holds of it.

        Raises:
            ValueError: if it is not there, or does not fit.
        """
        where = f"{self._folder}: table '{name}'"
        tail = f"{self._holder}.{name}.weight"
        key = self._only([key for key in self._saved if f".{key}".endswith(f".{tail}")], tail)
        if key.removesuffix("weight") + "ids" in self._saved:
            raise ValueError(
                f"{where}: expected a static table, got a dynamic one. Load it with "
                "torch.distributed.checkpoint.load and torchrec_dyn.checkpoint.LoadPlanner."
            )
        metadata = self._saved[key]
        assert isinstance(metadata, TensorStorageMetadata)
        weight = self._tensor(key)
        whole = here.shards[0].embedding_dim if here.shards else None
        if len(weight.shape) != 2 or whole not in (None, weight.shape[1]):
            raise ValueError(
                f"{where}: expected rows [N, {whole}], got {list(weight.shape)} in '{key}'."
            )
        cuts = [*sorted({chunk.offsets[1] for chunk in metadata.chunks}), weight.shape[1]]
        states, steps = self._states(name, tail) if with_optimizer else ({}, [])
        last = max(steps, default=0) if step is None else step
        found = _StaticTable(weight, cuts, states, last)
        if with_optimizer and here.shards:
            known = step is not None or bool(steps)
            _check_states(found, here.shards[0].optimizer, known, where)
        return found

    def _states(self, table: str, tail: str) -> tuple[dict[str, ChunkedTensor], list[int]]:
        """Finds the optimizer state of a table, "...{tail}.{table}.momentum1" or "...{tail}.sum"."""
        found: dict[str, list[str]] = {}
        for key in self._saved:
            _, inside, name = f".{key}".rpartition(f".{tail}.")
            if inside:
                plain = name.removeprefix(f"{table}.")
                found.setdefault(MOMENTS.get(plain, plain), []).append(key)
        keys = {name: self._only(some, f"{tail}.{name}") for name, some in found.items()}
        steps = [int(self._tensor(keys.pop(name)).whole()) for name in STEPS if name in keys]
        return {name: self._tensor(key) for name, key in keys.items()}, steps

    def _tensor(self, key: str) -> ChunkedTensor:
        metadata = self._saved[key]
        if not isinstance(metadata, TensorStorageMetadata):
            raise ValueError(f"{self._folder}: expected '{key}' as a tensor, got an object.")
        return ChunkedTensor(f"'{key}' in {self._folder}", self._reader, key, metadata)

    def _only(self, keys: list[str], tail: str) -> str:
        if len(keys) != 1:
            raise ValueError(
                f"{self._folder}: expected one key that ends with '{tail}', got {keys}. Give the right "
                "checkpoint, and `fqn` where it has several tables of this name."
            )
        return keys[0]


def _is_rowwise(optimizer: RowOptimizer, name: str) -> bool:
    return dict(zip(optimizer.state_names, optimizer.state_is_rowwise, strict=True))[name]


def _check_states(found: _StaticTable, optimizer: RowOptimizer, known: bool, where: str) -> None:
    """Raises ValueError unless the optimizer state is that of the optimizer here."""
    if sorted(found.states) != sorted(optimizer.state_names):
        raise ValueError(
            f"{where}: expected optimizer state {list(optimizer.state_names)} of {optimizer.kind.name}, "
            f"got {sorted(found.states)}. Choose the optimizer that trained the table, or "
            "with_optimizer=False to start with fresh state."
        )
    rows, columns = found.weight.shape
    for name, state in found.states.items():
        rowwise = _is_rowwise(optimizer, name)
        spread = (rows * (len(found.cuts) - 1),)
        fits = [spread, (rows, 1)] if rowwise else [(rows, columns)]
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


def _fill(here: RowsHere, saved: _StaticTable) -> None:
    """Replaces the contents of this rank's shards."""
    rows, columns = saved.weight.shape
    for shard in here.shards:
        shard.reset(shard.dtype, shard.device)
        shard.step = saved.step
        shard.reserve(rows // here.parts)
    for first, last in chunks(rows, columns) if here.shards else ():
        mine = here.of(torch.arange(first, last))
        weight, at = saved.weight.rows(first, last), mine - first
        for shard in here.shards:
            span = slice(shard.first_column, shard.first_column + shard.columns)
            states = {name: saved.state_rows(name, first, last, shard)[at] for name in saved.states}
            put_rows(shard, mine, weight[at, span], states)
