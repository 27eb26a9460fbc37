"""Applies a delta to a copy of the model that it was exported from.

All of it is read and verified before anything changes on any rank: the delta is whole, it begins at the
contents that the copy has, and what it leads to is what it says. Sums are additive: the result's are those
before, less those of the rows that go or are written anew, plus those of the delta.

Writes the rows of a delta into one shard of a table.

Legend: M rows of a stretch, N ids that left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchrec_dyn.checkpoint.delta_reader import CALL, IN_ORDER, Sums, TableChange, read_delta
from torchrec_dyn.checkpoint_format import (
    CHUNK_BYTES,
    DAMAGED,
    MODEL_TENSORS,
    OPTIMIZER,
    OPTIMIZER_TENSORS,
    ROW_TENSORS,
    SavedTable,
    add_sums,
    from_words,
    mean_over_cuts,
)
from torchrec_dyn.life import Clock
from torchrec_dyn.ranks import gather_results, run_together
from torchrec_dyn.state_dict import ModelSource, OptimizerSource, StagedRows
from torchrec_dyn.storage import IdMap, RowStore
from torchrec_dyn.table import DynamicTable, named_states, note_came, note_changed
from torchrec_dyn.whole_model import ModelTable, saved_forms, tables_of


def rows_replaced(shard: DynamicTable, staged: StagedRows, removed: Tensor) -> IdMap:
    """Maps the ids of a shard whose rows a delta takes out or writes anew.

    Args:
        shard: of the table.
        staged: what came for it.
        removed: [N] int64, those ids of the shard that left.
    """
    ids, rows = [removed], [shard.id_map.lookup(removed)]
    for some, _ in _stretches(staged):
        ids.append(some)
        rows.append(shard.id_map.lookup(some))
    all_ids, all_rows = torch.cat(ids), torch.cat(rows)
    is_here = all_rows >= 0
    made = IdMap(int(is_here.sum()))
    made.reserve(int(is_here.sum()))
    made.insert(all_ids[is_here], all_rows[is_here])
    return made


def reserve_rows(shard: DynamicTable, staged: StagedRows) -> None:
    """Takes the memory for ids that a shard does not have yet, whatever its limit."""
    absent = [int((shard.id_map.lookup(ids) < 0).sum()) for ids, _ in _stretches(staged)]
    shard.reserve(sum(absent))


def write_rows(
    shard: DynamicTable,
    staged: StagedRows,
    removed: Tensor,
    states: Mapping[str, RowStore],
    cuts: Sequence[int],
    clock: Tensor | None,
    step: int,
) -> None:
    """Takes ids out of a shard and writes what came, checked, with memory reserved.

    Args:
        shard: of the table.
        staged: what came for it.
        removed: [N] int64, those ids of the shard that left.
        states: optimizer state by name, in the rows of `staged`; of row-wise state all cuts.
        cuts: of the delta.
        clock: [2, K] int64, or None for none.
        step: of the table.
    """
    ids, rows = shard.id_map.erase(removed)
    shard.free(ids, rows, "erased")
    columns = (shard.first_column, shard.first_column + shard.columns)
    for ids, came in _stretches(staged):
        rows = _rows_of(shard, ids)
        shard.weights.write(rows, staged.weights.read(came))
        for one in named_states(shard):
            values = states[one.name].read(came)
            one.store.write(
                rows, mean_over_cuts(values, cuts, columns) if one.is_rowwise else values
            )
        if shard.life is not None:
            shard.life.scores.write(rows, *staged.scores.read(came))
        note_changed([shard], rows, torch.tensor([0, rows.numel()]))
    if shard.life is not None:
        shard.life.forget_listed()
        shard.life.is_unscored = False
        if staged.waiting is not None:
            shard.life.waiting = staged.waiting
        if shard.life.is_timed:
            shard.life.clock = Clock() if clock is None else Clock.load(clock)
    shard.step = step
    shard.generation += 1  # a forward of before must not write to these rows


def _rows_of(shard: DynamicTable, ids: Tensor) -> Tensor:
    """Gives the rows of ids, fresh ones to those that have none; nothing is written to these yet."""
    rows = shard.id_map.lookup(ids)
    is_new = rows < 0
    fresh = shard.row_numbers.take(int(is_new.sum()))
    shard.id_map.insert(ids[is_new], fresh)
    note_came(shard, fresh)
    shard.counters["inserted"] += fresh.numel()
    rows[is_new] = fresh
    return rows


def _stretches(staged: StagedRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Walks ids and rows of what came, some at a time."""
    most = max(1, CHUNK_BYTES // staged.weights.row_bytes)
    return staged.canonical().stretches(most)


def apply_delta(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Brings a copy of a model to the contents that it would have from a checkpoint saved at the delta.

    The copy may be sharded by another plan, over other ranks, or not at all; tables are found by their names.
    Rows, optimizer state, scores, counters, clock and steps change; forwards of before cannot run their
    backward. Collective where the tables are sharded. Costs one reading of all rows of the copy.

    Args:
        model: DistributedModelParallel, any module with dynamic tables, or one collection.
        path: of `export_delta`; every rank can read it.

    Raises:
        ValueError: on every rank, if the delta is torn or damaged, or is not for what the copy holds now (one
            before it is missing, or it was applied already); nothing has changed then.
    """
    tables = tables_of(model, CALL)
    changes = read_delta(tables, path)
    before = [
        (from_words(form.sums[0], MODEL_TENSORS), from_words(form.sums[1], OPTIMIZER_TENSORS))
        for form in saved_forms(tables, CALL)
    ]
    run_together(tables[0].group, CALL, lambda: _check_begins(changes, before))
    _verify_result(tables, changes, before)
    run_together(tables[0].group, CALL, lambda: _reserve(changes))
    run_together(tables[0].group, CALL, lambda: _write(changes))


def _check_begins(changes: Sequence[TableChange], before: Sequence[tuple[Sums, Sums]]) -> None:
    """Raises ValueError unless the delta begins at what the copy holds."""
    for change, sums in zip(changes, before, strict=True):
        base, result = _words(change.saved, "base"), _words(change.saved, "result")
        for which, names in enumerate(change.compared):
            for name in names:
                own, begin = sums[which][name], base[which][name]
                if own != begin:
                    is_end = own == result[which][name]
                    raise ValueError(
                        f"{change.where}: expected a delta that begins at content sum {own:016x} of {name} "
                        f"as the copy has, got one that begins at {begin:016x}"
                        f"{' and ends there: it was applied already' if is_end else ''}. {IN_ORDER}"
                    )


def _words(saved: SavedTable, which: str) -> tuple[Sums, Sums]:
    return (
        from_words(saved.read(which), MODEL_TENSORS),
        from_words(saved.read(OPTIMIZER + which), OPTIMIZER_TENSORS),
    )


def _verify_result(
    tables: Sequence[ModelTable],
    changes: Sequence[TableChange],
    before: Sequence[tuple[Sums, Sums]],
) -> None:
    """Raises ValueError unless the delta leads to what it says. Collective."""
    told = gather_results(
        tables[0].group, CALL, lambda: [_sums_replaced(change) for change in changes]
    )
    gone = [
        [add_sums(*(one[number][which] for one in told)) for which in range(2)]
        for number in range(len(changes))
    ]
    run_together(tables[0].group, CALL, lambda: _check_ends(changes, before, gone))


def _check_ends(
    changes: Sequence[TableChange],
    before: Sequence[tuple[Sums, Sums]],
    gone: Sequence[Sequence[Sums]],
) -> None:
    for change, held, less in zip(changes, before, gone, strict=True):
        came, result = _words(change.saved, "checksum"), _words(change.saved, "result")
        for which, names in enumerate(change.compared):
            for name in names:
                kept = held[which][name] - less[which].get(name, 0) if name in ROW_TENSORS else 0
                end, told = (kept + came[which][name]) % (1 << 64), result[which][name]
                if end != told:
                    raise ValueError(
                        f"{change.where}: expected a delta that leads to content sum {told:016x} of {name} "
                        f"as it says, got one that leads to {end:016x}. {DAMAGED}"
                    )


def _sums_replaced(change: TableChange) -> tuple[Sums, Sums]:
    """Sums the rows of the copy that the delta takes out or writes anew."""
    pieces = change.table.pieces
    both = zip(pieces.shards, change.model.staged or (), strict=True)
    maps = tuple(rows_replaced(shard, staged, change.removed) for shard, staged in both)
    some = replace(pieces, maps=maps)
    model = ModelSource(some, None).summary()
    optimizer = OptimizerSource(some, None).summary()
    return ({} if model is None else model.sums, {} if optimizer is None else optimizer.sums)


def _reserve(changes: Sequence[TableChange]) -> None:
    for change in changes:
        for shard, staged in zip(
            change.table.pieces.shards, change.model.staged or (), strict=True
        ):
            reserve_rows(shard, staged)


def _write(changes: Sequence[TableChange]) -> None:
    for change in changes:
        small = change.model.small
        for number, shard in enumerate(change.table.pieces.shards):
            assert change.model.staged is not None and change.optimizer.staged is not None
            write_rows(
                shard,
                change.model.staged[number],
                change.removed,
                change.optimizer.staged[number],
                change.cuts,
                small.get("clock"),
                int(change.optimizer.small["step"]),
            )
