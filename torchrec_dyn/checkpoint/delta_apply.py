"""Applies a delta to a copy of the model from which it was exported.

The delta is read and verified completely before anything changes on any rank: it is whole, it begins at the
contents of the copy, and it leads to the contents that it names. Content sums are additive: the sums of the
result are the sums before, minus the sums of the removed and rewritten rows, plus the sums of the delta.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchrec_dyn.checkpoint.delta_export import map_of
from torchrec_dyn.checkpoint.delta_reader import (
    CALL,
    IN_ORDER,
    Sums,
    TableChange,
    read_delta,
)
from torchrec_dyn.checkpoint_format import DAMAGED, ROW_TENSORS, add_sums
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict import sums_here
from torchrec_dyn.storage import IdMap, commit, turn_of
from torchrec_dyn.table import Commit, TableShard, merge
from torchrec_dyn.whole_model import tables_of


def apply_delta(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Updates a copy of a model to the contents that the model had at the export of a delta.

    The copy may have another plan, other ranks or no sharding; as at the load of a checkpoint it may have
    another dtype of rows and other policies. Tables are matched by their names. Rows, optimizer state,
    scores, counters, clock and steps change. Forwards from before the call cannot run their backward. Reads
    all rows of the copy once. Collective where the tables are sharded.

    Args:
        model: DistributedModelParallel, any module with dynamic tables, or one collection.
        path: directory that `export_delta` wrote; every rank must be able to read it.

    Raises:
        ValueError: on every rank, if the delta is torn or damaged, or does not begin at the present contents
            of the copy (an earlier delta is missing, or this delta was applied already). Nothing has changed
            then.
        RuntimeError: on every rank, if some rank fails in another way, as without memory. Nothing has changed
            then.
    """
    tables = tables_of(model, CALL)
    group = tables[0].group
    changes: list[TableChange] = []

    def read() -> list[_Part]:
        changes.extend(read_delta(tables, path))
        return [
            _Part(
                change.rows.sums,
                _sums_replaced(change),
                sums_here(change.table),
            )
            for change in changes
        ]

    by_table = list(zip(*gather_results(group, CALL, read), strict=True))
    commits: list[tuple[Table, list[Commit]]] = []

    def prepare() -> None:
        for change, parts in zip(changes, by_table, strict=True):
            change.rows.check_sums(*(part.sums for part in parts))
            held = add_sums(*(part.held for part in parts))
            _check_begins(change, held)
            _check_end(change, held, add_sums(*(part.replaced for part in parts)))
        for change in changes:
            commits.append((change.table, _prepared(change)))

    run_together(group, CALL, prepare)
    for table, changes_here in commits:
        with turn_of(table), commit(table):
            for change in changes_here:
                change()


class _Part(NamedTuple):
    """One rank's part of a table in a delta; all-gathered.

    Attributes:
        sums: content sums of the rows of the delta.
        replaced: content sums of the rows that it removes or rewrites.
        held: content sums of the table.
    """

    sums: Sums
    replaced: Sums
    held: Sums


def _check_begins(change: TableChange, sums: Sums) -> None:
    """Raises ValueError unless the delta begins at the content sums of the copy."""
    base, result = (change.saved.sums_at(when) for when in ("base", "result"))
    if not change.saved.num_rows and not sums.get("last_seen"):
        change.is_unscored = False  # all scores are 0, as those of the copy
    for name in change.compared:
        own, begin = sums[name], base[name]
        if name == "clock" and 0 in (own, begin):
            continue  # one of them was never set, or has no policy by time
        if own != begin:
            is_end = own == result[name]
            raise ValueError(
                f"{change.where}: expected a delta that begins at content sum {own:016x} of {name} "
                f"as the copy has, got a delta that begins at {begin:016x}"
                f"{' and ends at the sum of the copy: it was applied already' if is_end else ''}. "
                f"{IN_ORDER}"
            )


def _check_end(change: TableChange, held: Sums, replaced: Sums) -> None:
    """Raises ValueError unless the delta leads to the content sums that it names."""
    added, result = change.saved.sums, change.saved.sums_at("result")
    for name in change.compared:
        kept = held[name] - replaced.get(name, 0) if name in ROW_TENSORS else 0
        total = (kept + added[name]) % (1 << 64)
        if total != result[name]:
            raise ValueError(
                f"{change.where}: expected a delta that leads to the content sum "
                f"{result[name]:016x} of {name} that it names, got a delta that leads to "
                f"{total:016x}. {DAMAGED}"
            )


def _sums_replaced(change: TableChange) -> Sums:
    """Returns the content sums of this rank's rows that the delta removes or rewrites."""
    with turn_of(change.table):
        maps = tuple(
            _rows_replaced(shard, rows.id_map, change.removed)
            for shard, rows in zip(change.table.shards, change.rows.shards, strict=True)
        )
        return sums_here(replace(change.table, maps=maps))


def _rows_replaced(shard: TableShard, staged: IdMap, removed: Tensor) -> IdMap:
    """Returns a map of the ids of a shard whose rows a delta removes or rewrites."""
    ids = torch.cat([removed.to(shard.device), staged.contents()[0]])
    rows = shard.id_map.lookup(ids)
    return map_of(ids[rows >= 0], rows[rows >= 0])


def _prepared(change: TableChange) -> list[Commit]:
    """Prepares the merge of a delta into the shards of this rank."""
    change.rows.is_unscored = change.is_unscored
    with turn_of(change.table):
        return [
            merge(shard, rows, change.removed)
            for shard, rows in zip(change.table.shards, change.rows.finished(), strict=True)
        ]
