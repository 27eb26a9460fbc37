"""Deltas: the changes of a model's dynamic tables since a marker, as a checkpoint of the changed rows only.

A delta names the content sums of the whole tables at the marker (`base`) and at the export (`result`). By
these sums delta_apply.py verifies that a copy has the contents of the marker.

Legend: M ids, N removed ids.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrec_dyn.checkpoint.dcp_files import save_files
from torchrec_dyn.checkpoint_format import (
    MODEL_TENSORS,
    OPTIMIZER_TENSORS,
    Part,
    SavedTensor,
    from_words,
    optimizer_config,
    sum_of_small,
    to_bytes,
    whole_tensor,
)
from torchrec_dyn.name_lists import listed
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict import (
    ModelSource,
    OptimizerSource,
    Run,
    Share,
    runs_of,
    saved_sums,
    saved_tensors,
    share_of,
)
from torchrec_dyn.storage import CanonicalRows, IdMap, Version, to_host, turn_of
from torchrec_dyn.table import stamp_of
from torchrec_dyn.whole_model import tables_of

_CALL = "export_delta"


@dataclass(frozen=True)
class _Marked:
    """The versions of a table's shards on this rank, in column order, and the words of its two checksums."""

    versions: list[Version]
    sums: tuple[Tensor, Tensor]  # of the model, of the optimizer


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
    tables = tables_of(model, "mark")
    versions = _begin(tables, "mark")
    return _marker(tables, versions, saved_sums(tables, "mark"))


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


def collect_changes(
    model: nn.Module, path: str | os.PathLike[str] | None, since: Marker
) -> Changes:
    """Returns the changes since a marker, for a directory if one is given; `export_delta` writes them."""
    tables = tables_of(model, _CALL)
    group = tables[0].group
    stamps = run_together(group, _CALL, lambda: _checked_stamps(tables, path, since))
    is_new = (
        path is not None and not Path(path).exists()
    )  # all ranks meet once more before one writes
    before = [since._tables[table.name] for table in tables]
    versions = _begin(tables, _CALL)
    results = saved_sums(tables, _CALL)
    run_together(group, _CALL, lambda: _check_configs(tables, before, results))
    state = _state_dict(tables, before, results)
    run_together(group, _CALL, lambda: _check_unchanged(tables, stamps))
    return Changes(state, is_new, _marker(tables, versions, results))


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
        for words, order, config in zip(
            marked.sums, (MODEL_TENSORS, OPTIMIZER_TENSORS), configs, strict=True
        ):
            if from_words(words, order)["config"] != sum_of_small(
                table.name, "config", to_bytes(config)
            ):
                return False
    return len(marker._tables) == len(tables)


def _begin(tables: Sequence[Table], call: str) -> list[list[Version]]:
    """Starts a version of every shard and returns the versions, by table. Collective."""
    return run_together(
        tables[0].group,
        call,
        lambda: [[shard.version() for shard in table.shards] for table in tables],
    )


def _marker(
    tables: Sequence[Table],
    versions: Sequence[list[Version]],
    sums: Sequence[tuple[Tensor, Tensor]],
) -> Marker:
    of_tables = zip(tables, versions, sums, strict=True)
    return Marker({table.name: _Marked(begun, words) for table, begun, words in of_tables})


def _checked_stamps(
    tables: Sequence[Table], path: str | os.PathLike[str] | None, since: Marker
) -> list[list[tuple[int, ...]]]:
    """Returns `_stamps` after checking the arguments of `export_delta`."""
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
    return _stamps(tables)


def _stamps(tables: Sequence[Table]) -> list[list[tuple[int, ...]]]:
    return [[stamp_of(shard) for shard in table.shards] for table in tables]


def _check_unchanged(tables: Sequence[Table], stamps: list[list[tuple[int, ...]]]) -> None:
    changed = [
        table.name
        for table, before, now in zip(tables, stamps, _stamps(tables), strict=True)
        if now != before
    ]
    if changed:
        raise RuntimeError(
            f"export_delta: expected tables that do not change during the call, got changes of {changed}. "
            "Export between two steps, in the thread that trains."
        )


def _check_configs(
    tables: Sequence[Table],
    before: Sequence[_Marked],
    results: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Raises ValueError if the configs of a table have changed since the marker."""
    orders = MODEL_TENSORS, OPTIMIZER_TENSORS
    for table, marked, result in zip(tables, before, results, strict=True):
        for words, now, order in zip(marked.sums, result, orders, strict=True):
            if from_words(words, order)["config"] != from_words(now, order)["config"]:
                raise ValueError(
                    f"export_delta(table={table.name!r}): expected a table with the row dtype, initializer "
                    "and optimizer of the marker, got a table that was converted, or loaded with another "
                    "config. Save a full checkpoint and call mark again."
                )


def _state_dict(
    tables: Sequence[Table],
    before: Sequence[_Marked],
    results: Sequence[tuple[Tensor, Tensor]],
) -> dict[str, Any]:
    """Returns the state dict to save: the keys of a checkpoint, with the changed rows. Collective."""
    group, both = tables[0].group, list(zip(tables, before, strict=True))
    changed = run_together(group, _CALL, lambda: [_changed(*one) for one in both])
    removed = run_together(group, _CALL, lambda: [_removed_rows(*one) for one in both])
    shares = gather_results(
        group, _CALL, lambda: [_share(*one) for one in zip(tables, removed, strict=True)]
    )
    saved = saved_tensors(
        changed, _CALL, lambda one: [ModelSource(one, None), OptimizerSource(one, None)]
    )

    def join() -> dict[str, Any]:
        model: dict[str, Tensor] = {}
        optimizer: dict[str, dict[str, Tensor]] = {}
        of_tables = zip(tables, saved[::2], saved[1::2], strict=True)
        for number, (table, rows, state) in enumerate(of_tables):
            saves = table.rank == 0
            words = [
                {
                    "base": whole_tensor(base, saves, None),
                    "result": whole_tensor(result, saves, None),
                }
                for base, result in zip(before[number].sums, results[number], strict=True)
            ]
            ids = _removed_ids(table, removed[number], [of_rank[number] for of_rank in shares])
            of_model = {**rows, **words[0], "removed": ids}
            model |= {f"{table.key}.{name}": one for name, one in of_model.items()}
            of_optimizer = {**state, **words[1]}
            optimizer[f"{table.key}.weight"] = {
                f"{table.name}.{name}": one for name, one in of_optimizer.items()
            }
        return {"model": model, "optimizer": {"state": optimizer}}

    return run_together(group, _CALL, join)


def _changed(table: Table, marked: _Marked) -> Table:
    """Returns the table with only the ids whose rows changed."""
    with turn_of(table):
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


def _share(table: Table, rows: CanonicalRows | None) -> Share | None:
    return None if rows is None or table.part is None else share_of(rows, table)


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


def _reader(rows: CanonicalRows, run: Run) -> Any:
    return lambda start, stop: to_host(rows.read(run.here + start, run.here + stop)[0])


def map_of(ids: Tensor, rows: Tensor) -> IdMap:
    """Returns a map from ids [M] int64, distinct, to their rows [M] int64."""
    made = IdMap(ids.numel(), ids.device)
    made.reserve(ids.numel())
    made.insert(ids, rows)
    return made
