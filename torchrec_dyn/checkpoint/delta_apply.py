"""Applies a delta to a copy of the model from which it was exported.

The delta is read and verified completely before anything changes on any rank: it is whole, it begins at the
contents of the copy, and it leads to the contents that it names. Content sums are additive: the sums of the
result are the sums before, minus the sums of the removed and rewritten rows, plus the sums of the delta.

Legend: M rows of a stretch, N removed ids.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchrec_dyn.checkpoint.delta_export import map_of
from torchrec_dyn.checkpoint.delta_reader import CALL, IN_ORDER, Sums, TableChange, read_delta
from torchrec_dyn.checkpoint_format import (
    CHUNK_BYTES,
    DAMAGED,
    ROW_TENSORS,
    add_sums,
    from_words,
    mean_over_cuts,
)
from torchrec_dyn.life import BY_ROW, Clock
from torchrec_dyn.ranks import Table, gather_results, run_together
from torchrec_dyn.state_dict import StagedRows, saved_sums, sums_here
from torchrec_dyn.storage import IdMap, RowStore, note_changed, turn_of
from torchrec_dyn.table import Addition, TableShard, insert_rows, named_states
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
        RuntimeError: on every rank, if some rank fails in another way, as without memory. If it failed while
            it wrote rows, some rows have changed: load the copy again.
    """
    apply_changes(tables_of(model, CALL), path)


def apply_changes(
    tables: Sequence[Table],
    path: str | os.PathLike[str],
    is_partial: bool = False,
    held: Sequence[Sums] = (),
) -> list[Sums]:
    """Applies a delta to tables, as `apply_delta`. Collective.

    With `is_partial` the delta may have further tables. `held` is what the call for the delta before has
    returned, if nothing has changed the tables since: the rows are not all read again then.

    Returns:
        The content sums that the tables have now, but for those that were not compared.
    """
    changes = read_delta(tables, path, is_partial)
    if not held or not all(map(_has_compared, held, changes)):
        held = saved_sums(tables, CALL)
    run_together(tables[0].group, CALL, lambda: _check_begins(changes, held))
    ends = _verify_result(tables, changes, held)
    run_together(tables[0].group, CALL, lambda: _reserve(changes))
    run_together(tables[0].group, CALL, lambda: _write(changes))
    return ends


def _has_compared(held: Sums, change: TableChange) -> bool:
    """Returns True if all sums that are to be compared are among those of a table. All ranks decide alike."""
    compared = set(change.compared)
    if change.table.options.has_life and change.is_unscored and not change.saved.num_rows:
        compared.update(BY_ROW)  # compared if all scores are 0
    return held.keys() >= compared


def _check_begins(changes: Sequence[TableChange], held: Sequence[Sums]) -> None:
    """Raises ValueError unless the delta begins at the content sums of the copy."""
    for change, sums in zip(changes, held, strict=True):
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


def _verify_result(
    tables: Sequence[Table], changes: Sequence[TableChange], held: Sequence[Sums]
) -> list[Sums]:
    """Returns the content sums to which the delta leads, of the compared tensors. Collective.

    Raises:
        ValueError: on every rank, if it names other sums.
    """
    group = tables[0].group
    of_ranks = gather_results(group, CALL, lambda: [_sums_replaced(change) for change in changes])
    replaced = [add_sums(*sums) for sums in zip(*of_ranks, strict=True)]
    return run_together(group, CALL, lambda: list(map(_ends, changes, held, replaced)))


def _ends(change: TableChange, held: Sums, replaced: Sums) -> Sums:
    added, result = change.saved.sums, from_words(change.saved.read("result"))
    ends: dict[str, int] = {}
    for name in change.compared:
        kept = held[name] - replaced.get(name, 0) if name in ROW_TENSORS else 0
        ends[name] = (kept + added[name]) % (1 << 64)
        if ends[name] != result[name]:
            raise ValueError(
                f"{change.where}: expected a delta that leads to the content sum "
                f"{result[name]:016x} of {name} that it names, got a delta that leads to "
                f"{ends[name]:016x}. {DAMAGED}"
            )
    return ends


def _sums_replaced(change: TableChange) -> Sums:
    """Returns the content sums of this rank's rows that the delta removes or rewrites."""
    with turn_of(change.table):
        maps = tuple(
            _rows_replaced(shard, staged, change.removed) for shard, staged, _ in change.shards
        )
        return sums_here(replace(change.table, maps=maps))


def _rows_replaced(shard: TableShard, staged: StagedRows, removed: Tensor) -> IdMap:
    """Returns a map of the ids of a shard whose rows a delta removes or rewrites."""
    removed = removed.to(shard.device)
    ids = torch.cat([removed, *(some for some, _ in _stretches(staged))])
    rows = shard.id_map.lookup(ids)
    return map_of(ids[rows >= 0], rows[rows >= 0])


def _reserve(changes: Sequence[TableChange]) -> None:
    """Reserves memory for the ids without a row in the shards, also above the limits of the shards."""
    for change in changes:
        for shard, staged, _ in change.shards:
            with turn_of(shard):
                parts = [ids for ids, _ in _stretches(staged)]
                shard.reserve(sum(int((shard.id_map.lookup(ids) < 0).sum()) for ids in parts))


def _write(changes: Sequence[TableChange]) -> None:
    for change in changes:
        with turn_of(change.table):
            for shard, staged, states in change.shards:
                _write_rows(shard, staged, states, change)


def _write_rows(
    shard: TableShard, staged: StagedRows, states: Mapping[str, RowStore], change: TableChange
) -> None:
    """Removes ids from a shard and writes the rows of the delta.

    The rows are checked and memory is reserved before this call.
    """
    if shard.life is not None:
        shard.life.forget_listed()  # before the first score: an interrupt may come in between
    shard.remove(*shard.id_map.find(change.removed.to(shard.device)), "erased")
    columns = (shard.first_column, shard.first_column + shard.columns)
    for ids, from_rows in _stretches(staged):
        rows = _rows_of(shard, ids)
        note_changed([shard.change_log], ids, rows, torch.tensor([0, rows.numel()], device="cpu"))
        shard.weights.write(rows, staged.weights.read(from_rows))
        for one in named_states(shard):
            values = states[one.name].read(from_rows)
            if one.is_rowwise:
                values = mean_over_cuts(values, change.cuts, columns)
            one.store.write(rows, values)
        if shard.life is not None and change.is_unscored:
            shard.life.scores.write(rows, torch.zeros_like(rows), torch.zeros_like(rows))
        elif shard.life is not None:
            shard.life.scores.write(rows, *staged.scores.read(from_rows))
    shard.step = int(change.optimizer.small["step"])
    if shard.life is not None:
        if staged.waiting is not None:
            shard.life.waiting = staged.waiting
        if shard.life.is_timed:
            clock = change.model.small.get("clock")
            shard.life.clock = Clock() if clock is None else Clock.load(clock)
        shard.life.is_unscored = change.is_unscored
        shard.step = max(shard.step, shard.life.clock.present_step - 1)
        shard.life = shard.life.caught_up(shard.step, shard.row_numbers.high_water_mark)
    shard.generation += 1  # the backward of an earlier forward must not write to these rows


def _rows_of(shard: TableShard, ids: Tensor) -> Tensor:
    """Returns the rows of ids; unseen ids get fresh rows."""
    rows = shard.id_map.lookup(ids)
    is_new = rows < 0
    added = Addition(shard, ids[is_new])
    insert_rows([added])
    rows[is_new] = added.rows
    return rows


def _stretches(staged: StagedRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields staged ids and their staged rows, [M] int64 each, in canonical order."""
    return staged.canonical().stretches(max(1, CHUNK_BYTES // staged.weights.row_bytes))
