"""Applies a delta to a copy of the model from which it was exported.

The delta is read and verified completely before anything changes on any rank: it is whole, it begins at the
contents of the copy, and it leads to the contents that it names. Content sums are additive: the sums of the
result are the sums before, minus the sums of the removed and rewritten rows, plus the sums of the delta.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
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
from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    ROW_TENSORS,
    add_sums,
    from_words,
)
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict import CheckedPart, sums_here
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
    apply_changes(tables_of(model, CALL), path)


class _Part(NamedTuple):
    """One rank's part of a table in a delta; all-gathered.

    Attributes:
        checked: of the delta.
        replaced: content sums of the rows that it removes or rewrites.
        held: content sums of the table, unless all ranks have them already.
    """

    checked: CheckedPart
    replaced: Sums
    held: Sums


def apply_changes(
    tables: Sequence[Table],
    path: str | os.PathLike[str],
    is_partial: bool = False,
    held: Sequence[Sums] = (),
) -> list[Sums]:
    """Applies a delta to tables, as `apply_delta`. Collective.

    With `is_partial` the delta may have further tables. `held` is what the call for the delta before has
    returned, if nothing has changed the tables since: the rows are not all read again then.

    Returns the content sums that the tables have now, but for those that were not compared. The ranks meet
    when each has read and checked its part, and when each can commit.
    """
    group = tables[0].group
    changes: list[TableChange] = []

    def read() -> list[_Part]:
        changes.extend(read_delta(tables, path, is_partial))
        is_held = bool(held) and all(map(_has_compared, held, changes))
        return [
            _Part(
                change.load.check(),
                _sums_replaced(change),
                {} if is_held else sums_here(change.table),
            )
            for change in changes
        ]

    by_table = list(zip(*gather_results(group, CALL, read), strict=True))
    ends: list[Sums] = []
    commits: list[tuple[Table, list[Commit]]] = []

    def prepare() -> None:
        for number, (change, parts) in enumerate(zip(changes, by_table, strict=True)):
            checked = [part.checked for part in parts]
            change.load.compare(
                [one.words for one in checked], add_sums(*(one.sums for one in checked))
            )
            sums = add_sums(*(part.held for part in parts)) or held[number]
            _check_begins(change, sums)
            ends.append(_end(change, sums, add_sums(*(part.replaced for part in parts))))
        for change in changes:
            commits.append((change.table, _prepared(change)))

    run_together(group, CALL, prepare)
    for table, of_shards in commits:
        with turn_of(table), commit(table):
            for change in of_shards:
                change()
    return ends


def _has_compared(held: Sums, change: TableChange) -> bool:
    """Returns True if all sums that are to be compared are among those of a table. All ranks decide alike."""
    names = set(change.compared)
    if change.table.options.has_life and change.is_unscored and not change.saved.num_rows:
        names.update(BY_ROW)  # compared if all scores are 0
    return held.keys() >= names


def _check_begins(change: TableChange, sums: Sums) -> None:
    """Raises ValueError unless the delta begins at the content sums of the copy."""
    base, result = (from_words(change.saved.read(when)) for when in ("base", "result"))
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


def _end(change: TableChange, held: Sums, replaced: Sums) -> Sums:
    """Returns the content sums to which the delta leads; raises ValueError if it names other sums."""
    added, result = change.saved.sums, from_words(change.saved.read("result"))
    sums: dict[str, int] = {}
    for name in change.compared:
        kept = held[name] - replaced.get(name, 0) if name in ROW_TENSORS else 0
        sums[name] = (kept + added[name]) % (1 << 64)
        if sums[name] != result[name]:
            raise ValueError(
                f"{change.where}: expected a delta that leads to the content sum "
                f"{result[name]:016x} of {name} that it names, got a delta that leads to "
                f"{sums[name]:016x}. {DAMAGED}"
            )
    return sums


def _sums_replaced(change: TableChange) -> Sums:
    """Returns the content sums of this rank's rows that the delta removes or rewrites."""
    staged = change.load.staged or ()
    with turn_of(change.table):
        maps = tuple(
            _rows_replaced(shard, own.id_map, change.removed)
            for shard, own in zip(change.table.shards, staged, strict=True)
        )
        return sums_here(replace(change.table, maps=maps))


def _rows_replaced(shard: TableShard, staged: IdMap, removed: Tensor) -> IdMap:
    """Returns a map of the ids of a shard whose rows a delta removes or rewrites."""
    ids = torch.cat([removed.to(shard.device), staged.contents()[0]])
    rows = shard.id_map.lookup(ids)
    return map_of(ids[rows >= 0], rows[rows >= 0])


def _prepared(change: TableChange) -> list[Commit]:
    """Prepares the merge of a delta into the shards of this rank."""
    commits = []
    with turn_of(change.table):
        finished = change.load.finished()
        for shard, rows in zip(change.table.shards, finished, strict=True):
            if rows.life is not None:
                rows.life.is_unscored = change.is_unscored
            commits.append(merge(shard, rows, change.removed))
    return commits
