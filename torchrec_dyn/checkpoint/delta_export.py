"""Deltas: the changes of a model's dynamic tables since a marker, as a checkpoint of the changed rows only.

A delta names the content sums of the whole tables at the marker (`base`) and at the export (`result`). By
these sums delta_apply.py verifies that a copy has the contents of the marker.

Legend: M ids, N removed ids.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrec_dyn.checkpoint.dcp_files import save_files
from torchrec_dyn.checkpoint_format import (
    Part,
    SavedTensor,
    add_sums,
    as_words,
    optimizer_config,
    sum_of_small,
    to_bytes,
    whole_tensor,
)
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table, gather_results
from torchrec_dyn.state_dict import Counts, Run, Share, TableSource, runs_of, share_of, sums_here
from torchrec_dyn.storage import CanonicalRows, IdMap, Version, to_host, turn_of
from torchrec_dyn.whole_model import tables_of

_CALL = "export_delta"
_CONFIGS = ("config", "optimizer_config")


@dataclass(frozen=True)
class _Marked:
    """The versions of a table's shards on this rank, in column order, and the content sums of the table."""

    versions: list[Version]
    sums: Mapping[str, int]


class Marker:
    """A point in a model's training. Changes after it are recorded as long as this object exists.

    `mark` and `export_delta` return it; each rank has a marker of its own.
    """

    def __init__(self, tables: dict[str, _Marked]) -> None:
        self._tables = tables

    def __repr__(self) -> str:
        return f"Marker(tables={list(self._tables)})"


def mark(model: nn.Module) -> Marker:
    """Marks this point in training: from now on changes are recorded for `export_delta`.

    A delta since this marker leads from a checkpoint saved now to a checkpoint saved at the export of the
    delta. Reads all rows once; beside another marker, on a CPU, only the rows that have changed. Recording
    takes 4 bytes a row, 8 for each changed row and 12 for each removed id, on a GPU 8 bytes a row. Collective
    where the tables are sharded.

    Args:
        model: DistributedModelParallel, any module with dynamic tables, or one collection.

    Returns:
        The marker of this point; changes are recorded as long as it exists.
    """
    tables, versions = tables_of(model, "mark"), {}

    def begin() -> list[dict[str, int]]:
        sums = []
        for table in tables:
            with turn_of(table):
                versions[table.name] = [shard.version() for shard in table.shards]
                sums.append(sums_here(table))
        return sums

    by_rank = gather_results(tables[0].group, "mark", begin)
    return _marker(tables, versions, [add_sums(*sums) for sums in zip(*by_rank, strict=True)])


def export_delta(model: nn.Module, path: str | os.PathLike[str], since: Marker) -> Marker:
    """Writes the rows that changed since a marker, and the removed ids, for `apply_delta`.

    On a CPU it reads the changed rows, on a GPU all rows. Collective where the tables are sharded; for an
    unsharded model, call it in one process. If it fails, `since` stays valid and no file is left.

    Args:
        model: the model that was given to `mark`.
        path: a directory that does not exist yet, or is empty; the same for all ranks.
        since: the marker that `mark` or the last `export_delta` returned.

    Returns:
        The marker of this point; the next delta begins where this delta ends.

    Raises:
        ValueError: on every rank, if the path is taken, the ranks do not share it, the marker is not of these
            tables, or a table was converted, or loaded with another config, after the marker.
        OSError: on every rank, if a file cannot be written, because the disk is full or fails.
    """
    changes = collect_changes(model, path, since)
    group = tables_of(model, _CALL)[0].group
    save_files(changes.state, path, changes.is_new, group, _CALL)
    return changes.marker


class Changes(NamedTuple):
    """The changes of a model's tables since a marker, not yet written.

    Attributes:
        state: the state dict to save; it reads the changed rows when it is saved or copied.
        is_new: True if the directory did not exist.
        marker: the marker of this point.
    """

    state: dict[str, Any]
    is_new: bool
    marker: Marker


class _Export(NamedTuple):
    """What changed of one table on this rank since a marker, at one moment."""

    versions: list[Version]
    source: TableSource  # of the changed rows
    removed: CanonicalRows | None  # the removed ids; None if this rank holds no part of the table


class _Gathered(NamedTuple):
    """What the ranks tell each other of one table: parts of its content sums, and numbers of rows."""

    sums: dict[str, int]
    counts: Counts | None
    removed: Share | None


def collect_changes(
    model: nn.Module, path: str | os.PathLike[str] | None, since: Marker
) -> Changes:
    """Returns the changes since a marker, for a directory if one is given; `export_delta` writes them."""
    tables = tables_of(model, _CALL)
    exports: list[_Export] = []

    def prepare() -> tuple[list[_Gathered], bool]:
        _check_arguments(tables, path, since)
        gathered = []
        for table in tables:
            with turn_of(table):
                marked = since._tables[table.name]
                versions = [shard.version() for shard in table.shards]
                sums = sums_here(table)
                source, removed = TableSource(_changed(table, marked)), _removed_rows(table, marked)
                share = None if removed is None else share_of(removed, table)
                gathered.append(_Gathered(sums, source.counts(), share))
                exports.append(_Export(versions, source, removed))
        return gathered, path is not None and not Path(path).exists()

    by_rank = gather_results(tables[0].group, _CALL, prepare)
    is_new = all(was_new for _, was_new in by_rank)
    by_table = list(zip(*(gathered for gathered, _ in by_rank), strict=True))
    results = [add_sums(*(rank.sums for rank in ranks)) for ranks in by_table]
    model_state: dict[str, Tensor] = {}
    optimizer_state: dict[str, dict[str, Tensor]] = {}
    for table, export, ranks, result in zip(tables, exports, by_table, results, strict=True):
        base = since._tables[table.name].sums
        _check_configs(table, base, result)
        rows, state = export.source.tensors([rank.counts for rank in ranks])
        ends = {"base": base, "result": result}
        words = {name: whole_tensor(as_words(sums), table.rank == 0) for name, sums in ends.items()}
        removed = _removed_ids(table, export.removed, [rank.removed for rank in ranks])
        named = {**rows, **words, "removed": removed}
        model_state |= {f"{table.key}.{name}": tensor for name, tensor in named.items()}
        optimizer_state[f"{table.key}.weight"] = {
            f"{table.name}.{name}": tensor for name, tensor in state.items()
        }
    saved = {"model": model_state, "optimizer": {"state": optimizer_state}}
    versions = {table.name: export.versions for table, export in zip(tables, exports, strict=True)}
    return Changes(saved, is_new, _marker(tables, versions, results))


def is_marker_of(marker: Marker, tables: Sequence[Table]) -> bool:
    """Returns True if a delta of these tables since a marker can be made; not collective.

    False if a table is another object than the marked one, or was converted.
    """
    for table in tables:
        marked = marker._tables.get(table.name)
        if marked is None or [one.log for one in marked.versions] != [
            shard.changes for shard in table.shards
        ]:
            return False
        configs = table.config, optimizer_config(table.optimizer, table.cuts)
        for name, config in zip(_CONFIGS, configs, strict=True):
            if marked.sums[name] != sum_of_small(table.name, name, to_bytes(config)):
                return False
    return len(marker._tables) == len(tables)


def _marker(
    tables: Sequence[Table],
    versions: Mapping[str, list[Version]],
    sums: Sequence[Mapping[str, int]],
) -> Marker:
    named = zip((table.name for table in tables), sums, strict=True)
    return Marker({name: _Marked(versions[name], of_table) for name, of_table in named})


def _check_arguments(
    tables: Sequence[Table], path: str | os.PathLike[str] | None, since: Marker
) -> None:
    """Raises ValueError unless the arguments of `export_delta` are right."""
    folder = None if path is None else Path(path)
    if folder and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
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
        logs = [version.log for version in since._tables[table.name].versions]
        if [shard.changes for shard in table.shards] != logs:
            raise ValueError(
                f"export_delta(table={table.name!r}): expected a marker of this table object, got a marker "
                "of another table, or from before the table was copied, moved, sharded or given another "
                "optimizer. Save a full checkpoint and call mark again."
            )


def _check_configs(table: Table, base: Mapping[str, int], result: Mapping[str, int]) -> None:
    """Raises ValueError if a config of a table has changed since the marker."""
    if any(base[name] != result[name] for name in _CONFIGS):
        raise ValueError(
            f"export_delta(table={table.name!r}): expected a table with the row dtype, initializer "
            "and optimizer of the marker, got a table that was converted, or loaded with another "
            "config. Save a full checkpoint and call mark again."
        )


def _changed(table: Table, marked: _Marked) -> Table:
    """Returns the table with only the ids whose rows changed."""
    maps = tuple(
        map_of(*version.log.changed_rows(version, shard.id_map))
        for shard, version in zip(table.shards, marked.versions, strict=True)
    )
    return replace(table, maps=maps)


def _removed_rows(table: Table, marked: _Marked) -> CanonicalRows | None:
    """Returns the ids that were removed on this rank; None if it holds no part of the table."""
    if table.part is None:
        return None
    version = marked.versions[0]  # all column shards removed the same ids
    ids = version.log.removed_ids(version, table.shards[0].id_map)
    removed = map_of(ids, torch.arange(ids.numel(), device=ids.device))
    return CanonicalRows(removed, table.where, lambda: None)


def _removed_ids(
    table: Table, rows: CanonicalRows | None, shares: Sequence[Share | None]
) -> SavedTensor:
    """Returns the tensor "removed", [N] int64."""
    runs = runs_of([share for share in shares if share is not None], table.part)
    parts = [
        Part((run.place,), (run.rows,), _reader(rows, run), table.has_first_column)
        for run in runs.mine
        if rows is not None
    ]
    return SavedTensor((runs.total,), torch.int64, parts)


def _reader(rows: CanonicalRows, run: Run) -> Callable[[int, int], Tensor]:
    return lambda start, stop: to_host(rows.read(run.here + start, run.here + stop)[0])


def map_of(ids: Tensor, rows: Tensor) -> IdMap:
    """Returns a map from ids [M] int64, distinct, to their rows [M] int64."""
    id_map = IdMap(ids.numel(), ids.device)
    id_map.reserve(ids.numel())
    id_map.insert(ids, rows)
    return id_map
