"""Deltas: the changes of a model's dynamic tables since a marker, as a checkpoint of the changed rows only.

A delta names the content sums of the whole tables at the marker (`base`) and at the export (`result`). By
these sums delta_apply.py verifies that a copy has the contents of the marker.

Legend: M ids, N removed ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_dyn.checkpoint.dcp_files import save_files
from torchrec_dyn.checkpoint_format import (
    Part,
    Place,
    PlaceLike,
    SavedTensor,
    add_sums,
    as_words,
    optimizer_config,
    place_of,
    to_bytes,
    whole_tensor,
)
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table, gather_results
from torchrec_dyn.state_dict import Counts, Run, Share, TableSource, runs_of, share_of, sums_here
from torchrec_dyn.storage import CanonicalRows, IdMap, Version, to_host, turn_of
from torchrec_dyn.whole_model import tables_of

_CALL = "export_delta"
_REMEDY = "Save a full checkpoint and call mark again."


@dataclass(frozen=True)
class _Marked:
    """A table on this rank: versions of its shards in column order, its part of the content sums, configs."""

    versions: list[Version]
    sums: dict[str, int]
    configs: list[bytes]


class Marker:
    """A point in a model's training. Changes after it are recorded as long as this object exists.

    `mark` and `export_delta` return markers; each rank has its own.
    """

    def __init__(self, tables: dict[str, _Marked]) -> None:
        self._tables = tables

    def __repr__(self) -> str:
        return f"Marker(tables={list(self._tables)})"


def mark(model: nn.Module) -> Marker:
    """Marks this point in training: from now on changes are recorded for `export_delta`.

    A delta since this marker leads from a checkpoint saved now to a checkpoint saved at the export of the
    delta. The call reads all rows once; on a CPU, if another marker exists, it reads only the rows that have
    changed. Recording takes 4 bytes per row, 8 per changed row and 12 per removed id; on a GPU it takes 8
    bytes per row. If the tables are sharded, all ranks call `mark` between the same two steps; it does not
    communicate.

    Args:
        model: DistributedModelParallel, any module with dynamic tables, or one collection.

    Returns:
        The marker of this point; changes are recorded as long as it exists.
    """
    return Marker({table.name: _mark(table) for table in tables_of(model, "mark")})


def _mark(table: Table) -> _Marked:
    with turn_of(table):
        versions = [shard.version() for shard in table.shards]
        return _Marked(versions, sums_here(table), _configs(table))


def _configs(table: Table) -> list[bytes]:
    configs = table.config, optimizer_config(table.optimizer, table.cuts)
    return [to_bytes(config).numpy().tobytes() for config in configs]


def export_delta(model: nn.Module, path: PlaceLike, since: Marker) -> Marker:
    """Writes the rows that changed since a marker, and the removed ids, for `apply_delta`.

    On a CPU it reads the changed rows, on a GPU all rows. Collective if the tables are sharded; for an
    unsharded model, call it in one process. If it fails, `since` stays valid and no file is left.

    Args:
        model: the model that was given to `mark`.
        path: a directory or URL that does not exist yet, or is empty; the same for all ranks.
        since: the marker that `mark` or the last `export_delta` returned.

    Returns:
        The marker of this point; the next delta begins where this delta ends.

    Raises:
        ValueError: on every rank, if the path is taken, the ranks do not share it, the marker is not of these
            tables, or after the marker a table was converted or was loaded with another config.
        OSError: on every rank, if a file cannot be written because the disk is full or fails.
    """
    tables, prepared = tables_of(model, _CALL), []
    group = tables[0].group

    def prepare() -> list[_Numbers]:
        _check_arguments(tables, place_of(path), since)
        prepared.append(changes_since(tables, since))
        return [change.counts() for change in prepared[0][0]]

    by_rank = gather_results(group, _CALL, prepare)
    ((changes, marker),) = prepared
    names = {table.name: f"{table.key}.weight" for table in tables}
    save_files(rows_state(tables, changes, by_rank, names), path, group, _CALL)
    return marker


# What the other ranks need of a rank: its part of the content sums at the marker and now, its numbers of
# rows, and of removed ids.
_Numbers = tuple[dict[str, int], dict[str, int], Counts | None, Share | None]


class TableChanges:
    """What changed of one table on this rank since a marker, at one moment."""

    def __init__(self, table: Table, since: _Marked) -> None:
        self._table, self._base, self.marked = table, since.sums, _mark(table)
        maps = [
            map_of(*version.log.changed_rows(version, shard.id_map))
            for shard, version in zip(table.shards, since.versions, strict=True)
        ]
        self._source = TableSource(replace(table, maps=tuple(maps)))
        self._removed: CanonicalRows | None = None
        if table.part is not None:
            version = since.versions[0]  # all column shards removed the same ids
            ids = version.log.removed_ids(version, table.shards[0].id_map)
            removed = map_of(ids, torch.arange(ids.numel(), device=ids.device))
            self._removed = CanonicalRows(removed, table.where, lambda: None)

    def counts(self) -> _Numbers:
        """Returns the numbers of this rank."""
        removed = None if self._removed is None else share_of(self._removed, self._table)
        return self._base, self.marked.sums, self._source.counts(), removed

    def tensors(
        self, by_rank: Sequence[_Numbers]
    ) -> tuple[dict[str, SavedTensor], dict[str, SavedTensor]]:
        """Returns the tensors of the model's and of the optimizer's state dict."""
        table = self._table
        base, result, counts, shares = zip(*by_rank, strict=True)
        rows, state = self._source.tensors(counts)
        for name, sums in (("base", base), ("result", result)):
            rows[name] = whole_tensor(as_words(add_sums(*sums)), table.rank == 0)
        total, runs = runs_of(shares, table.part)
        removed = [
            Part(
                (run.place,), (run.rows,), partial(self._read_removed, run), table.has_first_column
            )
            for run in runs
        ]
        rows["removed"] = SavedTensor((total,), torch.int64, removed)
        return rows, state

    def _read_removed(self, run: Run, start: int, stop: int) -> Tensor:
        assert self._removed is not None
        return to_host(self._removed.read(run.here + start, run.here + stop)[0])


def changes_since(tables: Sequence[Table], since: Marker) -> tuple[list[TableChanges], Marker]:
    """Returns what changed of each table on this rank since a marker, and the marker of this point."""
    changes = []
    for table in tables:
        with turn_of(table):
            changes.append(TableChanges(table, since._tables[table.name]))
    names = [table.name for table in tables]
    return changes, Marker(dict(zip(names, (change.marked for change in changes), strict=True)))


def rows_state(
    tables: Sequence[Table],
    sources: Sequence[Any],
    by_rank: Sequence[Sequence[Any]],
    state_names: Mapping[str, str],
) -> dict[str, Any]:
    """Returns state dicts of tables, or of their changes; rows are read when they are saved or copied."""
    model: dict[str, SavedTensor] = {}
    states: dict[str, dict[str, SavedTensor]] = {}
    for table, source, counts in zip(tables, sources, zip(*by_rank, strict=True), strict=True):
        rows, state = source.tensors(counts)
        model |= {f"{table.key}.{name}": tensor for name, tensor in rows.items()}
        states[state_names[table.name]] = {
            f"{table.name}.{name}": tensor for name, tensor in state.items()
        }
    return {"model": model, "optimizer": {"state": states}}


def is_marker_of(marker: Marker, tables: Sequence[Table]) -> bool:
    """Returns True if a delta of these tables since a marker can be made; not collective."""
    same_names = marker._tables.keys() == {table.name for table in tables}
    return same_names and not any(_misfit(marker, table) for table in tables)


def _check_arguments(tables: Sequence[Table], folder: Place, since: Marker) -> None:
    """Raises ValueError unless the arguments of `export_delta` are right."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"export_delta: expected a new directory, got {folder}, which is taken. "
            "Give every delta a directory of its own."
        )
    if not isinstance(since, Marker):
        raise ValueError(
            f"export_delta: expected a marker of torchrec_dyn.checkpoint.mark, got {since!r}."
        )
    names = [table.name for table in tables]
    if sorted(names) != sorted(since._tables):
        raise ValueError(
            f"export_delta: expected a marker of the tables {listed(names)}, got a "
            f"marker of {listed(since._tables)}."
        )
    for table in tables:
        if misfit := _misfit(since, table):
            raise ValueError(f"export_delta(table={table.name!r}): expected {misfit} {_REMEDY}")


def _misfit(marker: Marker, table: Table) -> str:
    """Returns why no delta of a table since a marker can be made; "" if it can."""
    marked = marker._tables[table.name]
    if [version.log for version in marked.versions] != [shard.changes for shard in table.shards]:
        return (
            "a marker of this table object, got a marker of another table, or from before the table was "
            "copied, moved, sharded or given another optimizer."
        )
    if marked.configs != _configs(table):
        return (
            "a table with the row dtype, initializer and optimizer of the marker, got a table that was "
            "converted, or loaded with another config."
        )
    return ""


def map_of(ids: Tensor, rows: Tensor) -> IdMap:
    """Returns a map from ids [M] int64, distinct, to their rows [M] int64."""
    id_map = IdMap(ids.numel(), ids.device)
    id_map.reserve(ids.numel())
    id_map.insert(ids, rows)
    return id_map
