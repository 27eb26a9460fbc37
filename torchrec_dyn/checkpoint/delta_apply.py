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
    check_removed,
    read_delta,
)
from torchrec_dyn.checkpoint_format import (
    DAMAGED,
    MODEL_TENSORS,
    OPTIMIZER,
    OPTIMIZER_TENSORS,
    ROW_TENSORS,
    SavedTable,
    add_sums,
    from_words,
)
from torchrec_dyn.life import BY_ROW
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict import ModelSource, OptimizerSource, load_name, saved_sums
from torchrec_dyn.storage import IdMap, turn_of
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
    """Content sums of one table on one rank: of the delta, and of the rows that it removes or rewrites."""

    added: Sums
    replaced: Sums


def apply_changes(
    tables: Sequence[Table],
    path: str | os.PathLike[str],
    is_partial: bool = False,
    held: Sequence[Sums] = (),
) -> list[Sums]:
    """Applies a delta to tables, as `apply_delta`. Collective: ranks meet when read, and when prepared.

    With `is_partial` the delta may have further tables. `held` is what the call for the delta before has
    returned, if nothing has changed the tables since: the rows are not all read again then.

    Returns the content sums that the tables have now, but for those that were not compared.
    """
    group = tables[0].group
    changes: list[TableChange] = []

    def read() -> list[_Part]:
        changes.extend(read_delta(tables, path, is_partial))
        return [_Part(_checked(change), _sums_replaced(change)) for change in changes]

    by_rank = gather_results(group, CALL, read)
    if not held or not all(map(_has_compared, held, changes)):
        held = _sums_of(tables)
    ends: list[Sums] = []
    commits: list[tuple[Table, list[Commit]]] = []

    def prepare() -> None:
        for number, change in enumerate(changes):
            parts = [parts[number] for parts in by_rank]
            change.load.compare(add_sums(*(part.added for part in parts)))
            _check_begins(change, held[number])
            replaced = add_sums(*(part.replaced for part in parts))
            ends.append(_end(change, held[number], replaced))
        for change in changes:
            commits.append((change.table, _prepared(change)))

    run_together(group, CALL, prepare)
    for table, of_shards in commits:
        with turn_of(table):
            for commit in of_shards:
                commit()
    return ends


def _checked(change: TableChange) -> Sums:
    """Checks this rank's part of a table, and returns its content sums."""
    sums, _, _ = change.load.check()
    check_removed(change)
    return sums or {}


def _has_compared(held: Sums, change: TableChange) -> bool:
    """Returns True if all sums that are to be compared are among those of a table. All ranks decide alike."""
    names = set(change.compared)
    if change.table.options.has_life and change.is_unscored and not change.saved.num_rows:
        names.update(BY_ROW)  # compared if all scores are 0
    return held.keys() >= names


def _sums_of(tables: Sequence[Table]) -> list[Sums]:
    """Returns the content sums of tables, whose rows are all read. Collective."""
    return [_named(model, optimizer) for model, optimizer in saved_sums(tables, CALL)]


def _named(model: Tensor, optimizer: Tensor) -> dict[str, int]:
    """Returns the content sums of the words of two checksums, by the names of a `TableLoad`."""
    of_state = from_words(optimizer, OPTIMIZER_TENSORS)
    named = {load_name(name, True): total for name, total in of_state.items()}
    return {**from_words(model, MODEL_TENSORS), **named}


def _words(saved: SavedTable, when: str) -> dict[str, int]:
    return _named(saved.read(when), saved.read(OPTIMIZER + when))


def _check_begins(change: TableChange, sums: Sums) -> None:
    """Raises ValueError unless the delta begins at the content sums of the copy."""
    base, result = _words(change.saved, "base"), _words(change.saved, "result")
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
    added, result = _words(change.saved, "checksum"), _words(change.saved, "result")
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
        chosen = replace(change.table, maps=maps)
        model = ModelSource(chosen, None).summary()
        optimizer = OptimizerSource(chosen, None).summary()
    return {
        **({} if model is None else model.sums.by_name),
        **({} if optimizer is None else optimizer.sums.by_name),
    }


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
